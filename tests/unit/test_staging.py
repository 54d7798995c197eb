"""Staging memory: what is copied is what would be read, and it is bounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore import staging
from ckstore.staging import PAGE, Area, Areas, lay_out
from ckstore.state.capture import capture


def staged(state: object, chunk_size: int = 4096) -> tuple[list[bytes], list[bytes]]:
    """The bytes of every blob as they are read, and as they are copied into memory that held something else."""
    blobs = capture(state, chunk_size=chunk_size).blobs
    plan = lay_out([blob.nbytes for blob in blobs], 1 << 30)
    assert plan is not None and plan.is_whole
    memory = np.full(plan.size, 0xAB, np.uint8)
    places = [memory[at : at + blob.nbytes] for blob, at in zip(blobs, plan.offsets, strict=True) if at is not None]
    staging.copy(zip(blobs, places, strict=True))
    return [bytes(blob.load()) for blob in blobs], [place.tobytes() for place in places]


VIEWS: list[Callable[[Any], Any]] = [
    lambda base: base,
    lambda base: base.T,
    lambda base: base[::-1],
    lambda base: base[1:, ::2],
    lambda base: base[:, :0],
    lambda base: base[..., None],
    lambda base: np.broadcast_to(base[:, :1], (3, 9)),
]


@given(
    st.lists(st.tuples(st.sampled_from("?bhiqefdgFDSUV"), st.sampled_from(VIEWS), st.integers(0, 2)), max_size=8),
    st.integers(0, 9),
)
def test_a_copy_is_what_would_have_been_read(kinds: list[tuple[str, Any, int]], seed: int) -> None:
    lots = np.random.default_rng(seed)
    bases = []
    for kind, _, _ in kinds:
        dtype = np.dtype(f"{kind}9" if kind in "SUV" else kind)
        raw = lots.integers(0, 2 if kind in "?U" else 128, 12 * dtype.itemsize, dtype=np.uint8)
        bases.append(np.frombuffer(raw.tobytes(), dtype).reshape(3, 4) if kind != "U" else np.full((3, 4), "ab", dtype))
    state = [view(bases[min(n, number)]) for number, (_, view, n) in enumerate(kinds)]
    read, copied = staged([state, b"x" * 5000, "y" * 70_000])
    assert copied == read


def test_copies_of_many_pieces_and_threads_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE", 5000)
    monkeypatch.setattr(staging, "THREADS", 3)
    lots = np.random.default_rng(1)
    base = lots.integers(0, 256, (300, 500), dtype=np.uint8)
    state = {"a": base, "t": base.T, "part": base[3:50, ::7], "other": lots.normal(size=70_000), "few": [base[0, :3]]}
    read, copied = staged(state)
    assert copied == read


def needed(padded: list[int], streamed: int, held: int) -> int:
    """The most bytes that are in memory at a time when so many of the first blobs are streamed."""
    first = padded[:streamed]
    return sum(padded[streamed:]) + min(sum(first), 2 * max(first, default=0) + held)


@given(st.lists(st.integers(0, 50_000), max_size=12), st.integers(0, 300_000), st.sampled_from([0, 20_000, 1 << 30]))
def test_a_layout_keeps_to_its_limit(sizes: list[int], limit: int, held: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "HELD", held)
        plan = lay_out(sizes, limit)
    padded = [-(-size // PAGE) * PAGE for size in sizes]
    if plan is None:
        assert all(needed(padded, n, held) > limit for n in range(len(sizes) + 1))
        return
    assert needed(padded, len(plan.missing()), held) <= limit
    assert plan.largest == max(padded[: len(plan.missing())], default=0)
    assert plan.is_whole == (sum(padded) <= limit)
    first = len(plan.missing())
    assert plan.missing() == set(range(first))
    end = 0
    for offset, size in zip(plan.offsets[first:], padded[first:], strict=True):
        assert offset == end
        end += size
    assert end == plan.size


def test_memory_is_reused_and_grows_rarely() -> None:
    areas = Areas(100 * PAGE)
    first = areas.lend(10 * PAGE)
    areas.take_back(first)
    for pages in (1, 10, 11):
        again = areas.lend(pages * PAGE)
        assert again is first
        areas.take_back(again)
    larger = areas.lend(40 * PAGE)
    assert larger is not first
    assert areas.total == larger.size == 45 * PAGE
    areas.take_back(larger)
    areas.clear()
    assert areas.total == 0


def test_no_more_is_lent_than_the_limit() -> None:
    areas = Areas(100 * PAGE)
    assert not areas.may_lend(101 * PAGE)
    one = areas.lend(60 * PAGE)
    assert one.size == 68 * PAGE  # with room to grow
    assert (areas.may_lend(32 * PAGE), areas.may_lend(33 * PAGE)) == (True, False)
    two = areas.lend(32 * PAGE)
    assert areas.total == 100 * PAGE
    assert not areas.may_lend(PAGE)  # two are the most
    areas.drop(two)
    assert areas.may_lend(PAGE)
    areas.take_back(one)
    areas.clear()


@pytest.mark.parametrize("limit", [0, 1, PAGE - 1, PAGE])
def test_a_state_without_arrays_fits_into_any_limit(limit: int) -> None:
    areas = Areas(limit)
    assert areas.may_lend(PAGE)
    area = areas.lend(PAGE)
    assert (area.size, areas.limit) == (PAGE, PAGE)
    areas.take_back(area)
    areas.clear()


def test_memory_that_is_dropped_while_it_is_copied_to_is_not_unmapped() -> None:
    area = Area(PAGE)
    place = area.memory[:10]
    area.close()
    place[:] = 7
    assert place.tolist() == [7] * 10


def test_without_memfd_a_file_without_a_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    area = Area(3 * PAGE)
    area.memory[:] = 5
    assert os.pread(area.fd, 3 * PAGE, 0) == b"\x05" * 3 * PAGE
    assert os.readlink(f"/proc/self/fd/{area.fd}").endswith("(deleted)")
    area.close()


GIB = 1 << 30


def fake_root(folder: Path, groups: str, files: dict[str, str]) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 4 * GIB),
        ("0::/job/step\n", {"job/memory.max": f"{6 * GIB}", "job/memory.current": f"{2 * GIB}",
                            "job/step/memory.max": "max", "job/step/memory.current": "5"}, 2 * GIB),
        ("0::/job\n", {"job/memory.max": f"{6 * GIB}", "job/memory.current": f"{7 * GIB}"}, PAGE),
        ("0::/job\n", {"job/memory.max": f"{6 * GIB}", "job/memory.current": f"{6 * GIB}",
                       "job/memory.stat": f"anon {GIB}\nfile {5 * GIB}\nshmem {GIB}\n"
                                          f"inactive_file {GIB}\nactive_file {3 * GIB}"}, 2 * GIB),
        ("0::/job\n", {"job/memory.max": f"{6 * GIB}", "job/memory.current": f"{GIB}",
                       "job/memory.stat": f"inactive_file {2 * GIB}"}, 3 * GIB),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": f"{3 * GIB}",
                             "memory/job/memory.usage_in_bytes": f"{3 * GIB}",
                             "memory/job/memory.stat": f"inactive_file 1\nactive_file 2\n"
                                                       f"total_inactive_file {GIB}\ntotal_active_file {GIB}"}, GIB),
        ("5:cpu:/x\n4:memory,pids:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{3 * GIB}",
                                                 "memory/job/memory.usage_in_bytes": f"{GIB}"}, GIB),
        ("4:memory:/gone\n", {"memory/memory.limit_in_bytes": f"{1 << 63}",
                              "memory/memory.usage_in_bytes": "1"}, 4 * GIB),
    ],
)  # fmt: skip
def test_the_default_limit_is_half_of_what_is_available(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert staging.default_limit(fake_root(tmp_path, groups, files)) == expected


def test_this_machine_has_a_limit() -> None:
    assert 0 < staging.default_limit() < 1 << 50


def test_an_area_may_be_left_as_it_is_while_another_one_is_lent() -> None:
    areas = Areas(100 * PAGE)
    one = areas.lend(40 * PAGE)
    areas.take_back(one)
    two = areas.lend(40 * PAGE, sparing=one)
    assert two is not one
    assert areas.hold(one)
    assert not areas.may_lend(100 * PAGE - areas.total + PAGE)
    areas.take_back(two)
    assert areas.lend(20 * PAGE, sparing=two) is two  # what is held is not lent, and there is no room for a third
    areas.let_go(one)
    areas.take_back(two)
    assert areas.lend(20 * PAGE, sparing=two) is one
    assert areas.total <= 100 * PAGE


def test_where_there_is_no_room_beside_it_nothing_is_spared() -> None:
    areas = Areas(100 * PAGE)
    one = areas.lend(60 * PAGE)
    areas.take_back(one)
    assert areas.lend(50 * PAGE, sparing=one) is one
    assert not areas.hold(one)
    areas.take_back(one)
    assert not areas.hold(one, beside=60 * PAGE)
    larger = areas.lend(80 * PAGE, sparing=one)  # the smaller one goes
    assert (areas.total, areas.hold(one)) == (larger.size, False)
