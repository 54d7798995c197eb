"""The name of this machine, as people know it: written beside what it wrote and what it found damaged."""

from __future__ import annotations

import platform

HOST_PATTERN = r"[ -~]{0,100}"
"""The name of a host in a record, as a regular expression: printable ASCII, empty where it is not known."""


def host_name() -> str:
    """What this machine calls itself, escaped and cut to what a record may hold."""
    name = platform.node().encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in name)[:100]
