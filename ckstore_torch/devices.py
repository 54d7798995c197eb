"""Copies from devices that training does not wait for: streams of their own, events, pinned host memory.

Where CUDA is not in use, all of it is nothing: copies run where they are told to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from ckstore.state.views import Bytes

Act = Callable[[], None]


def copying() -> Callable[[Act], None]:
    """Remember what the current streams have been given; what comes back runs copies behind that, and waits for them.

    The copies run on a stream of their own for each device, so that what the training gives its streams later neither
    delays them nor is delayed.
    """
    if not _in_use():
        return _at_once
    given = {number: torch.cuda.current_stream(number).record_event() for number in _devices_in_use()}

    def run(act: Act) -> None:
        with ExitStack() as current:
            streams = [_stream(number) for number in given]
            for stream, event in zip(streams, given.values(), strict=True):
                stream.wait_event(event)
                current.enter_context(torch.cuda.stream(stream))
            try:
                act()
            finally:  # also when it failed: the memory may be let go of next
                for stream in streams:
                    stream.synchronize()

    return run


def pin(memory: Bytes) -> Act:
    """Lock host memory and make it known to CUDA, so that copies into it need no buffer between; undone by the call.

    Where that is refused, copies are slower and otherwise the same.
    """
    if not _in_use():
        return _nothing
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.__array_interface__["data"][0]
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        return _nothing
    return lambda: runtime.cudaHostUnregister(address)


_streams: dict[int, torch.cuda.Stream] = {}


def _stream(number: int) -> torch.cuda.Stream:
    if number not in _streams:
        _streams[number] = torch.cuda.Stream(number)  # type: ignore[no-untyped-call]
    return _streams[number]


def _devices_in_use() -> list[int]:
    """Those on which this process has a context: an event on another one would make one, which takes memory there."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return [number for number in range(torch.cuda.device_count()) if has_context is None or has_context(number)]


def _in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _at_once(act: Act) -> None:
    act()


def _nothing() -> None:
    pass
