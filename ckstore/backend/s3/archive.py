"""Objects in a storage class that cannot be read until they are restored from it (Glacier, Deep Archive)."""

from __future__ import annotations

from typing import Any

from ckstore.backend.s3.calls import Calls, Refused

DAYS = 7
"""How long what was brought back can be read."""
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_UNDER_WAY = frozenset({"RestoreAlreadyInProgress"})


def thaw(calls: Calls, name: str) -> bool:
    """Whether an object can be read now; if not, it is asked for. `BackendError` if it is not there."""
    key, doing = calls.place.key(name), f"bring {name} back from the archive"
    found = calls.call("head_object", doing, Key=key)
    tiered = bool(found.get("ArchiveStatus"))  # of the class that moves objects by itself
    if not tiered and found.get("StorageClass") not in _ARCHIVES:
        return True
    state = str(found.get("Restore", ""))
    if state:
        return 'ongoing-request="false"' in state
    request: dict[str, Any] = {"GlacierJobParameters": {"Tier": "Standard"}}
    try:
        calls.call(
            "restore_object", doing, _UNDER_WAY, Key=key, RestoreRequest=request if tiered else request | {"Days": DAYS}
        )
    except Refused:
        pass  # somebody else has asked
    return False
