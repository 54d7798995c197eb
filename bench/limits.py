"""What the machine itself can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from bench.harness import Contender, remove
from bench.states import State, like, memory

REQUEST = 16 << 20
CHUNK = 4 << 20

Span = tuple[int, memoryview]


def views(state: State, request: int) -> list[Span]:
    """The memory of `state` in pieces of at most `request` bytes, each with where it begins in a file of them all."""
    found: list[Span] = []
    start = 0
    for tensor in state.values():
        held = memory(tensor)
        found += [(start + at, held[at : at + request]) for at in range(0, len(held), request)]
        start += len(held)
    return found


def write_direct(path: Path, state: State, threads: int) -> None:
    """The bytes of `state` in aligned requests past the page cache, preallocated, fsynced."""
    spans = [span for span in views(state, REQUEST) if len(span[1]) % mmap.PAGESIZE == 0]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    try:
        os.posix_fallocate(fd, 0, sum(len(view) for _, view in spans))
        _on_threads(threads, spans, lambda span, buffer: os.pwrite(fd, memoryview(buffer)[: len(span[1])], span[0]))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_direct(path: Path, size: int, threads: int) -> None:
    """The whole file in aligned requests past the page cache, into memory that is used again."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _on_threads(threads, range(0, size, REQUEST), lambda start, buffer: os.preadv(fd, [buffer], start))
    finally:
        os.close(fd)


def write_plain(path: Path, state: State) -> None:
    """The bytes of `state` through the page cache, fsynced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for start, view in views(state, REQUEST):
            os.pwrite(fd, view, start)
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_all(state: State, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda span: blake3(span[1]).digest(), views(state, CHUNK)))


def read_and_hash(path: Path, target: State, threads: int, request: int = CHUNK) -> None:
    """Through the page cache into existing memory, hashed there: what a verified restore cannot avoid."""
    fd = os.open(path, os.O_RDONLY)

    def take(span: Span) -> None:
        os.preadv(fd, [span[1]], span[0])
        blake3(span[1]).digest()

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(take, views(target, request)))
    finally:
        os.close(fd)


def copy(source: State, target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def writing(folder: Path, state: State) -> list[Contender]:
    """The limits of a save of `state`, as contenders."""
    path, target = folder / "limit.bytes", like(state)
    return [
        Contender("memcpy", lambda: copy(state, target)),
        Contender("BLAKE3, 2 threads", lambda: hash_all(state, 2)),
        Contender("buffered write + fsync", lambda: write_plain(path, state), before=lambda: remove(path)),
        *(
            Contender(f"O_DIRECT write, {n} threads", lambda n=n: write_direct(path, state, n),  # type: ignore[misc]
                      before=lambda: remove(path))
            for n in (2, 4)
        ),
    ]  # fmt: skip


def _on_threads(threads: int, work: Iterable[object], act: Callable[..., object]) -> None:
    """`act` on each item of `work` with a page-aligned buffer of the thread's own."""
    own = threading.local()

    def one(item: object) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, REQUEST)
            own.buffer.write(os.urandom(4096) * (REQUEST // 4096))
        act(item, own.buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, work))


