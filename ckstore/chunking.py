"""Where a blob is cut: at multiples of the chunk size, so that equal bytes at equal places are equal chunks."""

from __future__ import annotations

from collections.abc import Iterator


def cut(nbytes: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each chunk of a blob of `nbytes`; the last may be shorter, an empty blob has none."""
    for start in range(0, nbytes, chunk_size):
        yield start, min(start + chunk_size, nbytes)
