"""Where bytes go depends on structure alone, and memory of a device is fetched only by ranges that are needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.state.groups import Source
from ckstore.state.placing import place
from ckstore.state.views import Bytes, Memory, View, contiguous_strides

SMALL = 1 << 10


class Device:
    """Memory in an address space of its own, at any address."""

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base = name, base
        self.bytes = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, lo: int, hi: int) -> Bytes:
        self.fetched.append((lo - self.base, hi - self.base))
        return self.bytes[lo - self.base : hi - self.base].copy()

    def source(self, offset: int, view: View) -> Source:
        memory = Memory(self.name, self.base + offset, self.fetch)
        return Source(view, memory, "int", view.itemsize, None, ("", "", ""), f"at {offset}")


def flat(count: int, itemsize: int, step: int = 1) -> View:
    return View((count,), (step * itemsize,), itemsize)


def test_a_device_is_read_when_loaded_and_only_where_needed() -> None:
    device = Device("cuda:0", 1 << 40, 1 << 20)
    dense, holes = device.source(0, flat(1 << 15, 4)), device.source(1 << 18, flat(100, 4, 50))
    placed, blobs = place([dense, holes], SMALL)
    assert device.fetched == []
    assert [blob.nbytes for blob in blobs] == [1 << 17, 400]
    assert bytes(blobs[0].load()) == device.bytes[: 1 << 17].tobytes()
    assert bytes(blobs[1].load()) == device.bytes[1 << 18 :].view("u4")[:5000:50].tobytes()
    assert device.fetched == [(0, 1 << 17), (1 << 18, (1 << 18) + 99 * 200 + 4)]
    assert [each.view.strides for each in placed] == [(4,), (4,)]


def test_equal_addresses_of_two_devices_are_not_shared_memory() -> None:
    a, b = Device("cuda:0", 4096, 64), Device("cuda:1", 4096, 64)
    placed, blobs = place([a.source(0, flat(8, 8)), b.source(0, flat(8, 8))], SMALL)
    assert [(each.blob, each.offset) for each in placed] == [(0, 0), (0, 64)]
    assert bytes(blobs[0].load()) == a.bytes.tobytes() + b.bytes.tobytes()


@st.composite
def views(draw: st.DrawFn) -> tuple[int, View]:
    """A view that lies within 256 bytes, and the offset of its first element."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 3]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    strides = tuple(draw(st.integers(-5, 5)) * itemsize for _ in shape)
    if draw(st.booleans()):
        strides = contiguous_strides(shape, itemsize)
    view = View(shape, strides, itemsize)
    lo, hi = view.extent()
    first = draw(st.integers(0, (512 - (hi - lo)) // itemsize)) * itemsize - lo
    return first, view


def touched(first: int, view: View) -> set[int]:
    """Every byte that a view touches, one by one."""
    starts = {first}
    for size, stride in zip(view.shape, view.strides, strict=True):
        starts = {start + i * stride for start in starts for i in range(size)}
    return {start + i for start in starts for i in range(view.itemsize)}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(views(), min_size=1, max_size=5), st.integers(0, 63))
def test_any_views_keep_their_values_and_share_as_before(found: list[tuple[int, View]], shift: int) -> None:
    device = Device("cuda:0", 4096 + shift, 512)
    placed, blobs = place([device.source(*each) for each in found], 4096)
    loaded = [np.frombuffer(blob.load(), np.uint8) for blob in blobs]
    for (first, view), where in zip(found, placed, strict=True):
        assert np.array_equal(where.view.over(loaded[where.blob], where.offset), view.over(device.bytes, first))
    before = [touched(*each) for each in found]
    after = [{(where.blob, byte) for byte in touched(where.offset, where.view)} for where in placed]
    for i in range(len(found)):
        for j in range(i):
            assert bool(before[i] & before[j]) == bool(after[i] & after[j])
    elsewhere = Device("cuda:0", 1 << 30, 512)
    again, copies = place([elsewhere.source(*each) for each in found], 4096)
    assert again == placed
    assert [bytes(blob.load()) for blob in copies] == [data.tobytes() for data in loaded]
    covered = {place for places in after for place in places}
    for blob, data in enumerate(loaded):
        assert all(byte == 0 for at, byte in enumerate(data.tolist()) if (blob, at) not in covered)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(views())
def test_facts_about_views(found: tuple[int, View]) -> None:
    first, view = found
    bytes_touched = touched(first, view)
    lo, hi = view.extent()
    assert (min(bytes_touched), max(bytes_touched) + 1) == (first + lo, first + hi)
    assert view.is_dense() == (len(bytes_touched) == hi - lo == view.nbytes)
    assert view.may_overlap_itself() or len(bytes_touched) == view.nbytes
