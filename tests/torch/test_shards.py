"""Parts of ranks: geometry, what is read of which bytes, and parts that lie. What others made is never trusted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import ckstore
from ckstore.errors import FormatError, InvalidInputError, MismatchError
from ckstore_torch import shards, wanted
from ckstore_torch.shards import Sharded, check_plans, part_of

GROUP = "00112233445566aa"
WHOLE: list[Any] = [[4, 3], "strided", "contiguous", False, False]


def write_item(fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...], size: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def read_item(fqn: str, piece: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index = MetadataIndex(fqn, piece)
    return ReadItem(LoadItemType.TENSOR, index, torch.Size(offsets), index, torch.Size(offsets), torch.Size(lengths))


@contextmanager
def saved(path: Path, *parts: Any) -> Iterator[ckstore.Snapshot]:
    """The snapshot whose ranks saved `parts`."""
    with ckstore.open(path / "s", create=True) as store:

        def save(rank: int) -> None:
            store.save(parts[rank], step=1, member=ckstore.Member(rank, len(parts), GROUP, 0))

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(save, range(len(parts))))
        with store.snapshot() as snapshot:
            yield snapshot


def index(tensors: Any, objects: Any = (), paths: Any = (), layout: Any = 1) -> Any:
    """Whatever somebody may have put there."""
    return np.frombuffer(msgspec.msgpack.encode([layout, tensors, list(objects), dict(paths)]), np.uint8)


def part(offsets: Any, pieces: dict[str, Any], about: list[Any] | None = None, **more: Any) -> Any:
    described = [*(WHOLE if about is None else about), offsets]
    return {"shards": {"w": pieces}, "index": index({"w": described}, **more), "objects": {}}


def only(found: Any, **objects: Any) -> Any:
    return {"shards": {}, "index": found, "objects": objects}


ROWS = torch.arange(12.0).reshape(4, 3)
HALVES = part([[0, 0]], {"[0,0]": ROWS[:2]}), part([[2, 0]], {"[2,0]": ROWS[2:]})


def test_parts_that_fit_are_read(tmp_path: Path) -> None:
    with saved(tmp_path, *HALVES) as snapshot:
        sharded = Sharded(snapshot)
        target = torch.zeros(3, 2)
        items = [read_item("w", (0, 0), (1, 1), (1, 2)), read_item("w", (2, 0), (0, 1), (2, 2))]
        assert sharded.read([(items[0], target[:1]), (items[1], target[1:])]) == []
        assert torch.equal(target, ROWS[1:, 1:])


LIES: dict[str, tuple[Any, ...]] = {
    "a gap": (part([[0, 0]], {"[0,0]": ROWS[:2]}), part([[3, 0]], {"[3,0]": ROWS[3:]})),
    "an overlap": (part([[0, 0]], {"[0,0]": ROWS[:3]}), part([[2, 0]], {"[2,0]": ROWS[2:]})),
    "an overlap of the right volume": (part([[0, 0], [1, 0]], {"[0,0]": ROWS[:2], "[1,0]": ROWS[2:]}),),
    "a piece outside": (part([[0, 0]], {"[0,0]": ROWS[:2]}), part([[3, 0]], {"[3,0]": ROWS[2:]})),
    "the same piece twice": (HALVES[0], HALVES[0], HALVES[1]),
    "the same piece twice on one rank": (part([[0, 0], [0, 0]], {"[0,0]": ROWS[:2]}), HALVES[1]),
    "a piece that is not there": (part([[0, 0], [2, 0]], {"[0,0]": ROWS[:2]}),),
    "no piece at all": (part([], {}),),
    "another size on another rank": (HALVES[0], part([[2, 0]], {"[2,0]": ROWS[2:]}, [[5, 3], *WHOLE[1:]])),
    "another dtype on another rank": (HALVES[0], part([[2, 0]], {"[2,0]": ROWS[2:].double()})),
    "another number of dimensions": (part([[0, 0]], {"[0,0]": ROWS.reshape(-1)}),),
    "fewer offsets": (part([[0]], {"[0]": ROWS}),),
    "columns that are not row by row": (part([[0, 0]], {"[0,0]": ROWS.reshape(3, 4).t()}),),
    "a sparse piece": (part([[0, 0]], {"[0,0]": ROWS.to_sparse()}),),
    "a piece that is a number": (part([[0, 0]], {"[0,0]": 3.0}),),
    "a piece that is a record array": (part([[0, 0]], {"[0,0]": np.zeros((4, 3), [("a", "<i2"), ("b", "<i2")])}),),
    "offsets that are texts": (part([["0", "0"]], {"[0,0]": ROWS}),),
    "offsets that are truth values": (part([[False, False]], {"[False,False]": ROWS}),),
    "negative offsets": (part([[-1, 0]], {"[-1,0]": ROWS}),),
    "enormous offsets": (part([[1 << 62, 0]], {f"[{1 << 62},0]": ROWS}),),
    "too many dimensions": (part([[0] * 65], {"x": ROWS}),),
    "offsets that are no list": (part("[0,0]", {"[0,0]": ROWS}),),
    "a size that is none": (part([[0, 0]], {"[0,0]": ROWS}, ["big", *WHOLE[1:]]),),
    "an enormous size": (part([[0, 0]], {"[0,0]": ROWS}, [[1 << 61, 1 << 61], *WHOLE[1:]]),),
    "a layout that is none": (part([[0, 0]], {"[0,0]": ROWS}, [[4, 3], ["strided"], *WHOLE[2:]]),),
    "an unknown memory format": (part([[0, 0]], {"[0,0]": ROWS}, [[4, 3], "strided", "os.system", False, False]),),
    "too little about a tensor": (part([[0, 0]], {"[0,0]": ROWS}, [[4, 3]]),),
    "too much about a tensor": (part([[0, 0]], {"[0,0]": ROWS}, [*WHOLE, 1]),),
    "a text about a tensor": (only(index({"w": "x"})),),
    "a name that is a number": (only(index({3: [*WHOLE, [[0, 0]]]})),),
    "an object that is a number": (only(index({}, [3])),),
    "a layout of tomorrow": (only(index({}, layout=2)),),
    "no index at all": (only(np.zeros(0, np.uint8)),),
    "half an index": (only(index({"w": [*WHOLE, [[0, 0]]]})[:-9]),),
    "an index that is nested without end": (only(np.full(100_000, 0x91, np.uint8)),),
    "an index that is a text": (only("x"),),
    "an index of numbers": (only(np.zeros(3)),),
    "an index of rows": (only(np.zeros((2, 2), np.uint8)),),
    "a tensor that is an object elsewhere": (
        part([[0, 0]], {"[0,0]": ROWS}),
        only(index({}, ["w"]), w=1),
    ),
    "a path that is a text": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": "w"}),),
    "a path of nothing": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": []}),),
    "a path that begins with a number": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": [0, "w"]}),),
    "a path into an enormous list": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": ["w", 1 << 40]}),),
    "a path into a list from behind": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": ["w", -1]}),),
    "a path of fractions": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": ["w", 0.5]}),),
    "an endless path": (part([[0, 0]], {"[0,0]": ROWS}, paths={"w": ["w"] * 1001}),),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_lie_are_refused(tmp_path: Path, lie: str) -> None:
    with saved(tmp_path, *LIES[lie]) as snapshot:
        with pytest.raises(FormatError):
            Sharded(snapshot)
    with ckstore.open(tmp_path / "s") as store:
        assert [info.state for info in store.snapshots()] == ["ok"]  # strange, but not damaged


@pytest.mark.parametrize(
    "state",
    [
        {"w": ROWS},
        [1, 2],
        ROWS,
        {"shards": {"w": {"[0,0]": ROWS}}, "objects": {}},
    ],
    ids=str,
)
def test_snapshots_of_other_kinds_are_named_as_such(tmp_path: Path, state: Any) -> None:
    with saved(tmp_path, state) as snapshot:
        with pytest.raises(InvalidInputError, match="was not saved as shards; read it with"):
            Sharded(snapshot)


def test_objects_that_are_not_there_or_not_plain(tmp_path: Path) -> None:
    with saved(tmp_path, only(index({}, ["n", "m"]), m={"ckstore:container": "x"})) as snapshot:
        sharded = Sharded(snapshot)
        assert isinstance(sharded.metadata.state_dict_metadata["n"], BytesStorageMetadata)
        with pytest.raises(FormatError, match="did not save n, though it says so"):
            sharded.object("n")
        with pytest.raises(FormatError):
            sharded.object("m")
        with pytest.raises(InvalidInputError, match="nobody saved as one"):
            sharded.object("other")


def test_plans_that_want_what_is_not_there(tmp_path: Path) -> None:
    with saved(tmp_path, *HALVES) as snapshot:
        sharded = Sharded(snapshot)
        target = torch.full((2, 3), 7.0)
        for item in [
            read_item("w", (1, 0), (0, 0), (2, 3)),
            read_item("x", (0, 0), (0, 0), (2, 3)),
            read_item("w", (0, 0), (1, 0), (2, 3)),
            read_item("w", (0, 0), (0, 1), (2, 3)),
            read_item("w", (0, 0), (0,), (2,)),
            read_item("w", (0, 0), (0, 0), (1, 3)),
        ]:
            with pytest.raises(InvalidInputError, match="the plan wants"):
                sharded.read([(read_item("w", (2, 0), (0, 0), (2, 3)), target.clone()), (item, target)])
        assert target.eq(7).all()


def test_dtypes_are_converted_only_when_asked_to(tmp_path: Path) -> None:
    with saved(tmp_path, *HALVES) as snapshot:
        sharded = Sharded(snapshot)
        item = read_item("w", (0, 0), (0, 0), (2, 3))
        half, whole = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(MismatchError, match=r"w \(dtype float32 in the snapshot, bfloat16 here; cast=True conv"):
            sharded.read([(item, half)])
        with pytest.raises(MismatchError, match="cannot be cast"):
            sharded.read([(item, half), (item, whole)], cast=True)
        assert not half.any()
        assert sharded.read([(item, half)], cast=True) == [("w", "float32", "bfloat16")]
        assert torch.equal(half, ROWS[:2].bfloat16())


def test_any_box_into_any_memory_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against slicing; aside go pieces of at most some bytes, or a row."""
    lots = random.Random(1)
    tensors = {
        f"t{number}": torch.randn([lots.randrange(1, 9) for _ in range(dimensions)])
        for number, dimensions in enumerate([0, 1, 2, 2, 3, 3, 4])
    }
    items = [write_item(name, (0,) * t.dim(), tuple(t.shape), tuple(t.shape)) for name, t in tensors.items()]
    seen: list[tuple[int, int]] = []
    memory = wanted.Wanted.memory

    def watched(one: wanted.Wanted) -> torch.Tensor:
        row = one.nbytes // max(1, one.lengths[0]) if one.shape else one.nbytes
        seen.append((one.aside, row))
        return memory(one)

    monkeypatch.setattr(wanted, "ASIDE_BYTES", 100)
    monkeypatch.setattr(wanted.Wanted, "memory", watched)
    with saved(tmp_path, part_of(items, lambda item: tensors[item.index.fqn], None)) as snapshot:
        sharded = Sharded(snapshot)
        for _ in range(60):
            reads, expected = [], []
            for name in lots.sample(sorted(tensors), 4):
                tensor = tensors[name]
                starts = [lots.randrange(n) for n in tensor.shape]
                ends = [lots.randrange(start, n) + 1 for start, n in zip(starts, tensor.shape, strict=True)]
                box = tensor[tuple(itertools.starmap(slice, zip(starts, ends, strict=True)))]
                spare = torch.full((*box.shape[:-1], 2 * box.shape[-1]) if box.dim() else (), 9.0)
                target = [torch.full(box.shape, 9.0), spare[..., ::2] if box.dim() else spare][lots.randrange(2)]
                reads.append((read_item(name, (0,) * tensor.dim(), tuple(starts), tuple(box.shape)), target))
                expected.append(box)
            sharded.read(reads)
            assert all(torch.equal(target, box) for (_, target), box in zip(reads, expected, strict=True))
    assert any(aside for aside, _ in seen)
    assert all(aside <= max(100, row) for aside, row in seen)


@pytest.mark.parametrize("seed", range(4))
def test_boxes_are_whole_when_counting_says_so(seed: int) -> None:
    lots = random.Random(seed)
    found = {True: 0, False: 0}
    while min(found.values()) < 60:
        size = tuple(lots.randrange(4) for _ in range(lots.randrange(4)))
        boxes = cut(lots, (tuple(0 for _ in size), size))
        if lots.random() < 0.6 and boxes:
            number = lots.randrange(len(boxes))
            start, end = boxes[number]
            moved = [lots.choice([0, 0, 1]) for _ in size]
            shifted = tuple(map(sum, zip(start, moved, strict=True))), tuple(map(sum, zip(end, moved, strict=True)))
            boxes[number] = lots.choice([shifted, boxes[lots.randrange(len(boxes))]])
        count = np.zeros([n + 1 for n in size], int)
        for start, end in boxes:
            count[tuple(itertools.starmap(slice, zip(start, end, strict=True)))] += 1
        inside = all(e <= n for _, end in boxes for e, n in zip(end, size, strict=True))
        whole = inside and bool((count[tuple(map(slice, size))] == 1).all())
        lots.shuffle(boxes)
        assert (shards._why_not_whole(size, boxes, set()) is None) == whole, (size, boxes)
        found[whole] += 1


def cut(lots: random.Random, box: Any) -> list[Any]:
    """A box in pieces, some of them empty."""
    start, end = box
    if not start or lots.random() < 0.3:
        return [box]
    along = lots.randrange(len(start))
    at = lots.randint(start[along], end[along])
    low = start, (*end[:along], at, *end[along + 1 :])
    high = (*start[:along], at, *start[along + 1 :]), end
    return [*cut(lots, low), *cut(lots, high)] if lots.random() < 0.7 else [low, high]


def test_a_thousand_columns_are_checked_in_no_time() -> None:
    columns: list[shards.Box] = [((0, i), (8, i + 1)) for i in range(20_000)]
    assert shards._why_not_whole((8, 20_000), columns, set()) is None


def test_plans_must_make_up_whole_tensors() -> None:
    check_plans([[write_item("w", (0,), (2,), (4,))], [write_item("w", (2,), (2,), (4,))]])
    with pytest.raises(InvalidInputError, match="the pieces of w do not make up the whole tensor: all ranks"):
        check_plans([[write_item("w", (0,), (2,), (4,))], []])
    with pytest.raises(InvalidInputError, match="a piece of w lies outside"):
        check_plans([[write_item("w", (0,), (5,), (4,))]])


def test_what_a_part_cannot_hold_is_named() -> None:
    item = write_item("w", (0,), (2,), (2,))
    for value, text in [
        (torch.zeros(3), r"the piece of w has shape \(3,\) where the plan has \(2,\)"),
        ("text", "w is of type str where the plan has a tensor"),
        (torch.zeros(2).to_sparse(), "w is a tensor of layout torch.sparse_coo"),
    ]:
        with pytest.raises(InvalidInputError, match=text):
            part_of([item], lambda _: value, None)  # noqa: B023
    with pytest.raises(InvalidInputError, match=r"the plan has the piece of w at \[0\] twice"):
        part_of([item, item], lambda _: torch.zeros(2), None)
    both = WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)
    with pytest.raises(InvalidInputError, match="w is a tensor and none at once"):
        part_of([both, item], lambda one: torch.zeros(2) if one is item else 1, None)
