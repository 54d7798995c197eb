"""Cutting blobs into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.chunking import cut


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, []),
        (1, [(0, 1)]),
        (16, [(0, 16)]),
        (17, [(0, 16), (16, 17)]),
        (48, [(0, 16), (16, 32), (32, 48)]),
    ],
)
def test_cuts_at_multiples_of_the_chunk_size(nbytes: int, expected: list[tuple[int, int]]) -> None:
    assert list(cut(nbytes, 16)) == expected


@given(st.integers(0, 10_000), st.integers(1, 700))
def test_chunks_tile_the_blob_and_all_but_the_last_are_full(nbytes: int, chunk_size: int) -> None:
    found = list(cut(nbytes, chunk_size))
    assert [start for start, _ in found] == list(range(0, nbytes, chunk_size))
    assert sum(stop - start for start, stop in found) == nbytes
    assert all(stop - start == chunk_size for start, stop in found[:-1])
