"""Stretches of two snapshots: cut along chunks, known from chunks, read in batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore import stretches as module
from ckstore.detail import Part, open_parts
from ckstore.store import Store, open_store
from ckstore.stretches import Span, cut, read, same_bytes, stretches

Noise = Callable[..., np.ndarray]


def part_of(store: Store, state: Any, step: int) -> Part:
    store.save(state, step=step)
    (part,) = open_parts(store._context, store._find(step)[0], frozenset())
    return part


def span(part: Part, start: int, stop: int, blob: int = 0) -> Span:
    return Span(part, blob, start, stop, "w")


@pytest.fixture(scope="module")
def ramp() -> Part:
    """A blob of nearly five chunks."""
    with open_store("memory://stretches", create=True, chunk_size=4096) as store:
        return part_of(store, np.arange(20_000, dtype="u1"), 1)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.sampled_from([1, 2, 3, 4, 12, 16, 4096, 5000, 9000]))
def test_stretches_are_whole_items_that_end_with_chunks(ramp: Part, start: int, size: int, itemsize: int) -> None:
    items = min(size, 20_000 - start) // itemsize
    whole = span(ramp, start, start + items * itemsize)
    found = list(cut(whole, itemsize))
    assert sum(map(len, found)) == len(whole)
    assert all(len(one) and len(one) % itemsize == 0 for one in found)
    assert [one.start for one in found[1:]] == [one.stop for one in found[:-1]]
    for one, _ in pairwise(found):
        # The next item begins in a later chunk, and the last of this stretch in an earlier one.
        last_chunk = (one.start // 4096 + 1) * 4096
        assert last_chunk <= one.stop < last_chunk + itemsize


def test_chunks_tell_what_is_the_same(store: Store, noise: Noise) -> None:
    one, two = noise(1, 4), noise(1, 4)
    two[4096] ^= 1
    before, after = part_of(store, {"w": one}, 1), part_of(store, {"w": two}, 2)
    same, differ = (0, 4096), (4096, 8192)
    assert same_bytes(span(before, *same), span(after, *same)) is True
    assert same_bytes(span(before, 5, 4000), span(after, 5, 4000)) is True
    assert same_bytes(span(before, *differ), span(after, *differ)) is None  # a part: other bytes of it may differ
    assert same_bytes(span(before, 0, 16384), span(after, 0, 16384)) is False
    assert same_bytes(span(before, 0, 4096), span(after, 4096, 8192)) is None
    assert same_bytes(span(before, 0, 5), span(after, 0, 4)) is False
    assert same_bytes(span(before, 0, 10), span(before, 1, 11)) is None  # not at one place of a chunk
    found = list(stretches(span(before, 0, 16384), span(after, 0, 16384), 8))
    assert [other is None for _, other in found] == [True, False, True, True]


def test_bytes_come_in_order_and_each_chunk_once_in_a_batch(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(1, 8)
    part = part_of(store, {"w": data}, 1)
    wanted = [(n, (span(part, lo, hi), span(part, 0, 9))) for n, (lo, hi) in enumerate(
        [(0, 4096), (10, 20), (4000, 9000), (8192, 8192), (32760, 32768), (1, 32767)])]  # fmt: skip
    pieces: list[list[bytes]] = []
    real = module.read_pieces

    def counting(context: Any, wanted: Any) -> None:
        wanted = list(wanted)
        pieces.append([piece.id for piece in wanted])
        real(context, wanted)

    monkeypatch.setattr(module, "read_pieces", counting)
    monkeypatch.setattr(module, "BATCH", 3 * 4096)
    found = [(n, one.tobytes(), two.tobytes()) for n, (one, two) in read(store._context, wanted)]
    assert found == [
        (n, data[lo:hi].tobytes(), data[:9].tobytes())
        for n, (lo, hi) in enumerate((one.start, one.stop) for _, (one, _) in wanted)
    ]
    assert [len(batch) for batch in pieces] == [3, 2, 8]  # the last item needs more than a batch holds
    assert all(len(set(batch)) == len(batch) for batch in pieces)


def test_nothing_is_read_for_nothing(store: Store) -> None:
    assert list(read(store._context, [])) == []
