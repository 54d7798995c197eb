"""What a Checkpointer can be told, checked when it is told: `InvalidInputError` says what each takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckstore import Retention
from ckstore.arguments import WHEN_BUSY, name_of
from ckstore.errors import InvalidInputError
from ckstore_torch.metadata import branch_beside


def check_options(
    periods: Mapping[str, Any], switches: Mapping[str, Any], extra: Any, branch: str, when_busy: str, world: int
) -> None:
    """Those of making one; `periods` are numbers of steps by name."""
    for name, every in periods.items():
        if every is not None and (type(every) is not int or every < 1):
            raise InvalidInputError(f"{name} is a whole number of steps, 1 or more, not {every!r}")
    _check_switches(switches)
    if extra is not None and not isinstance(extra, Mapping):
        kind = type(extra).__name__
        raise InvalidInputError(f"extra takes objects by name, as in extra={{'ema': ema}}, not {kind}")
    name_of("branch", branch)
    if periods["metadata_every"] is not None:
        branch_beside(branch)
    if when_busy not in WHEN_BUSY:
        raise InvalidInputError(f"when_busy is one of {', '.join(WHEN_BUSY)}, not {when_busy!r}")
    if world > 1 and when_busy != "wait":
        raise InvalidInputError(f"when_busy={when_busy!r} is for one process: of several each would decide alone")


def check_resume_options(switches: Mapping[str, Any], warmup: Any) -> None:
    """Those of `resume`."""
    _check_switches(switches)
    if warmup is not None and not callable(warmup):
        raise InvalidInputError(
            f"warmup is a function that runs one forward and backward (give the function, and do not call it), not "
            f"{warmup!r:.80}"
        )


def policy_of(keep: int | Retention | Mapping[str, Any] | None) -> Retention | None:
    """What `keep` says about old snapshots."""
    if keep is None:
        return None
    return Retention(keep_last=keep) if isinstance(keep, int) else Retention.of(keep)


def _check_switches(switches: Mapping[str, Any]) -> None:
    for name, value in switches.items():
        if type(value) is not bool:
            raise InvalidInputError(f"{name} is True or False, not {value!r:.80}")
