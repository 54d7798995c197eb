"""How far the writers of a machine are with what they may write: one small file in the cache directory of a store.

It may be lost, damaged, forged, read-only or busy at any time: then there is nothing to share, and that is no error.

    pace-<boot>         digest of the boot, rate, when it was set, level of the bucket, when it was that; CRC-32

The file is named after the boot: machines may share a cache directory, and after another boot the clock begins anew.
Its lock (flock) is asked for without waiting, as whoever holds it may have been stopped. A holder that was killed has
let go of it; what it had half written fails its CRC. Nothing is fsynced, as nothing of it matters after a crash.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ckstore.process import current_owner

SLOWEST, FASTEST = 4096, (1 << 63) - 1
"""Bytes a second that a limit may be."""

_RECORD = struct.Struct("<16sQddd")
_CRC = struct.Struct("<I")
_SIZE = _RECORD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Pace:
    """A limit and how far it is used. Times, in seconds, are those of the machine's monotonic clock."""

    rate: int
    """Bytes a second."""
    set_at: float
    """When an opening of the store asked for this rate; 0 if that is not known."""
    level: float
    """Bytes that might be written at once; less than 0 if somebody waits."""
    at: float
    """When the level was that."""


class SharedPace:
    """The `Pace` that all processes of this machine share that use the cache directory `cache`."""

    def __init__(self, cache: Path) -> None:
        boot = current_owner().boot
        self._boot = blake3(boot.encode()).digest(16)
        self.path = cache / f"pace-{self._boot.hex()}" if boot else None
        """None where the machine does not tell one boot from another: nothing is shared."""

    def update(self, change: Callable[[Pace | None, float], Pace], monotonic: Callable[[], float]) -> Pace | None:
        """Replace the pace by what `change` makes of it and of the time; None if it could not be kept.

        `change` gets None for a pace that is missing or cannot be true, and is not called while another process is in
        here. The time is read with the lock in hand, so that it never goes back from one change to the next.
        """
        try:
            return None if self.path is None else self._update(self.path, change, monotonic)
        except OSError:
            return None

    def _update(
        self, path: Path, change: Callable[[Pace | None, float], Pace], monotonic: Callable[[], float]
    ) -> Pace | None:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                now = monotonic()
                pace = change(self._decode(os.pread(descriptor, _SIZE + 1, 0), now), now)
                return pace if self._write(descriptor, pace) else None
            finally:
                # A fork may have inherited the descriptor, and would keep the lock though this one is closed.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, pace: Pace) -> bool:
        data = _RECORD.pack(self._boot, pace.rate, pace.set_at, pace.level, pace.at)
        data += _CRC.pack(zlib.crc32(data))
        if os.fstat(descriptor).st_size > _SIZE:
            os.ftruncate(descriptor, _SIZE)
        return os.pwrite(descriptor, data, 0) == _SIZE

    def _decode(self, data: bytes, now: float) -> Pace | None:
        if len(data) != _SIZE or _CRC.pack(zlib.crc32(data[: _RECORD.size])) != data[_RECORD.size :]:
            return None
        boot, rate, set_at, level, at = _RECORD.unpack_from(data)
        numbers = math.isfinite(level) and 0 <= set_at <= now and 0 <= at <= now  # which NaN is not
        if boot != self._boot or not SLOWEST <= rate <= FASTEST or not numbers:
            return None
        return Pace(rate, set_at, level, at)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)
