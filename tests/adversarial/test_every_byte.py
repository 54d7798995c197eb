"""Flip every byte of every object of a store: values come back right or not at all, and verify tells.

A byte that an operation never reads cannot change what it does. So each operation is recorded once on the whole
store, and repeated for a damaged byte only if it reads that byte. What nothing reads is listed, with the reason.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ckstore import commit, floor, layout, pack_writer, rank_writer
from ckstore.announce import pinned
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreError, CorruptionError, FormatError, NotFoundError
from ckstore.format import pack as packs
from ckstore.format import records
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.pack import read_footer
from ckstore.process import current_owner
from ckstore.store import Store, open_store
from tests.crash.world import fingerprint, simulate

pytestmark = pytest.mark.timeout(900)

UNREAD = {
    "reserve": "only its size counts",
    "mark condemned": "its name says all; it is put for visibility only, so a power cut may damage it",
    "record of a removed snapshot": "its `removed` mark says all",
}
"""Classes of objects whose bytes nothing relies on."""
UNSEEN_WHEN_DELETED = {
    "commit": "a snapshot is its record: without it there is none",
    "abort": "likewise",
    "record of a removed snapshot": "it is void",
    "tag": "a name that is not there was never given",
    "epoch": "likewise", "floor": "likewise", "proposed floor": "likewise",
    "announcement": "likewise", "pin": "likewise", "reserve": "it is set aside again",
    "mark quarantined": "a fact that is not there was never told", "mark cleared": "likewise",
    "mark condemned": "likewise", "mark removed": "likewise", "mark damaged": "likewise",
}  # fmt: skip
"""Classes of objects whose absence tells nobody that they were there."""


class Recorder(MemoryBackend):
    """Objects in memory that note which bytes are read."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__()
        self._objects = dict(objects)
        self.read: dict[str, list[range]] = defaultdict(list)

    @property
    def objects(self) -> dict[str, bytes]:
        return self._objects

    def get(self, name: str, *, limit: int) -> bytes:
        found = super().get(name, limit=limit)
        self.read[name].append(range(len(found)))
        return found

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        super().get_into(name, start, view)
        self.read[name].append(range(start, start + len(view)))


@dataclass(frozen=True)
class Subject:
    """A small store of every kind of object, and what its snapshots hold."""

    objects: dict[str, bytes]
    values: dict[str, str]
    needs: dict[str, set[str]]
    """Snapshot id → the objects that it is made of."""
    refs: dict[str, str]
    kinds: dict[str, str]
    """Object → its class."""


@dataclass(frozen=True)
class Outcome:
    """What came of an operation: a fingerprint, or an error."""

    value: Any = None
    error: Exception | None = None


def opened(objects: Mapping[str, bytes]) -> tuple[Store, Recorder]:
    backend = Recorder(objects)
    return open_store(backend, cache_dir="/proc/nowhere"), backend


def state_of(step: int) -> dict[str, Any]:
    lots = np.random.default_rng(step)
    weights = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    weights *= np.float32(1 + max(step - 3, 0) * 1e-6)  # kept whole by the third save, as a delta by those after it
    return {
        "model": {"frozen": np.arange(1200, dtype=np.float64), "noise": lots.integers(0, 256, 700, dtype=np.uint8)},
        "weights": weights,
        "step": step,
        "half": np.linspace(0, step, 200, dtype=np.float16),
    }


def build(patch: pytest.MonkeyPatch) -> Subject:
    simulate(patch)
    backend = MemoryBackend()
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(pack_writer, "PACK_SIZE", 1000)
        store = open_store(backend, create=True, cache_dir="/proc/nowhere", chunk_size=4096, profile="compact")
        for step in range(1, 4):
            store.save(state_of(step), step=step)
        store.prune({"keep_last": 1})
        assert floor.raise_floor(store._context, least=1)
        store.save(state_of(4), step=4, tags=["best"])
        store.drop("step:3", force=True)
        constants.setattr(rank_writer, "INLINE_BYTES", 0)
        store.open_epoch()
        store.save(state_of(5), step=5)
        store.quarantine("step:4", "looks odd")
        store.clear("step:4")
    context = store._context
    sequence = store.resolve().order[1]
    assert commit.abort(context, SaveName(sequence + 1, "a" * 16), "given up")
    backend.put(layout.reserve(0), bytes(64))
    newest = SaveName(sequence + 2, "0" * 16)
    announcement = records.Announcement(str(newest), "main", 6, 1, [], current_owner())
    backend.put(layout.announcement(newest), records.encode(announcement))
    with pinned(context.backend, "a reader", [newest]):
        objects = dict(backend._objects)
    values, needs = {}, {}
    for save, record in read_history(context).commits():
        values[save.nonce] = fingerprint(state_of(record.step))
        needs[save.nonce] = {layout.CONFIG, layout.snapshot(save), *(pack.name for pack in record.packs)}
        needs[save.nonce] |= {layout.manifest(save, 0)} & objects.keys()
    refs = {f"id:{nonce}": nonce for nonce in values} | {"tag:best": store.tags()["best"]}
    return Subject(objects, values, needs, refs, {name: kind_of(name, objects, values) for name in objects})


def kind_of(name: str, objects: Mapping[str, bytes], values: Mapping[str, str]) -> str:
    house, _, rest = name.partition("/")
    match house:
        case "snapshots":
            nonce = rest.rpartition("-")[2]
            if f"marks/{rest}/removed" in objects:
                return "record of a removed snapshot"
            return "commit" if nonce in values else "abort"
        case "marks":
            return "mark " + rest.rpartition("/")[2].partition("-")[0]
        case "gc":
            return "floor" if rest.startswith("floor") else "proposed floor"
    return {"saves": "announcement", "pins": "pin", "tags": "tag", "epochs": "epoch", "packs": "pack",
            "manifests": "manifest"}.get(house, house)  # fmt: skip


def regions(objects: Mapping[str, bytes], name: str) -> Iterator[tuple[str, range]]:
    """The parts of a pack."""
    size = len(objects[name])
    table = read_footer(Recorder(objects), name, size)
    yield "header", range(packs.HEADER_SIZE)
    for row in range(len(table)):
        frame = table.frame(row)
        yield f"frame of codec {frame.codec}", range(frame.offset, frame.offset + frame.stored)
    yield "footer", range(table.footer_offset, table.footer_offset + table.footer_length)
    yield "padding", range(table.footer_offset + table.footer_length, size - packs.TRAILER_SIZE)
    yield "trailer", range(size - packs.TRAILER_SIZE, size)


class Trial:
    """Runs operations on damaged copies of a store."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.operations: dict[str, Callable[[Store], Any]] = {"verify": lambda store: store.verify(mark=False)}
        self.operations |= {ref: functools.partial(_restore, ref) for ref in subject.refs}
        self.operations |= {"latest": lambda store: store.restore(), "list": lambda store: store.snapshots()}
        self.reads = {name: self._record(act) for name, act in self.operations.items()}

    def _record(self, act: Callable[[Store], Any]) -> dict[str, list[range]]:
        store, backend = opened(self.subject.objects)
        act(store)
        return backend.read

    def readers(self, name: str, position: int) -> list[str]:
        """The operations that read this byte."""
        return [op for op, reads in self.reads.items() if any(position in run for run in reads.get(name, ()))]

    def run(self, operation: str, objects: Mapping[str, bytes]) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self.operations[operation](opened(objects)[0])
            except CkstoreError as error:
                return Outcome(error=error)
        return Outcome(found if operation in ("verify", "list") else fingerprint(found))

    def check_restores(self, name: str, ref: str, outcome: Outcome, *, gone: bool = False) -> None:
        """Right values, or an error that names the object; always right if the snapshot is not made of that object."""
        snapshot = self.subject.refs.get(ref)
        if ref == "list" and outcome.error is None:
            back = gone and self.subject.kinds[name] == "mark removed"  # who deletes that brings its snapshot back
            assert back or {info.id for info in outcome.value} <= self.subject.values.keys()
            return
        if outcome.error is None:
            right = {self.subject.values[snapshot]} if snapshot else set(self.subject.values.values())
            assert outcome.value in right, f"{ref} has wrong values after damage to {name}"
            return
        needed = snapshot is None or name in self.subject.needs[snapshot]
        shared = self.subject.kinds[name] in ("config", "epoch", "floor", "proposed floor", "tag")
        assert needed or shared, f"{ref} does not need {name}, but: {outcome.error!r}"
        kinds = (CorruptionError, FormatError, NotFoundError) if gone else (CorruptionError, FormatError)
        assert isinstance(outcome.error, kinds), repr(outcome.error)
        assert gone or name in str(outcome.error) or self.subject.kinds[name] == "config", str(outcome.error)

    def check_verify(self, name: str, outcome: Outcome, *, gone: bool = False) -> None:
        """The damage is reported under the object's own name (a damaged config keeps the store from opening)."""
        if outcome.error is not None:
            kinds = CorruptionError | FormatError | NotFoundError if gone else CorruptionError | FormatError
            assert isinstance(outcome.error, kinds), repr(outcome.error)
            assert name in str(outcome.error) or self.subject.kinds[name] == "config"
            return
        report: Any = outcome.value
        assert name in " ".join(finding.name for finding in report.findings), f"verify says nothing of {name}"


def _restore(ref: str, store: Store) -> Any:
    return store.restore(ref)


def flipped(data: bytes, position: int, mask: int) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    with pytest.MonkeyPatch.context() as patch:
        yield Trial(build(patch))


def damage(trial: Trial, name: str, position: int, everything: bool) -> bool:
    """Flip a byte and check whoever reads it: verify and, unless `everything`, one other in turn. Is it read at all?"""
    readers = trial.readers(name, position)
    if "verify" in readers and not everything:
        others = [reader for reader in readers if reader != "verify"]
        readers = ["verify", *others[position % len(others) :][:1]] if others else ["verify"]
    objects = dict(trial.subject.objects)
    objects[name] = flipped(objects[name], position, 1 << position % 8)
    for reader in readers:
        outcome = trial.run(reader, objects)
        if reader != "verify":
            trial.check_restores(name, reader, outcome)
        elif trial.subject.kinds[name] not in UNREAD:
            trial.check_verify(name, outcome)
    return bool(readers)


def test_every_byte_of_every_record(trial: Trial, long_run: bool, capsys: pytest.CaptureFixture[str]) -> None:
    read, unread = Counter[str](), Counter[str]()
    for name, kind in trial.subject.kinds.items():
        if kind == "pack":
            continue
        for position in range(len(trial.subject.objects[name])):
            seen = damage(trial, name, position, long_run)
            (read if seen else unread)[kind] += 1
            assert seen or kind in UNREAD, f"nothing reads byte {position} of {name}"
    print(f"records: {dict(read)} bytes flipped; not read: {dict(unread)}")
    assert unread.keys() <= UNREAD.keys()


def test_every_byte_of_every_pack(trial: Trial, long_run: bool) -> None:
    """Every byte of header, frames, footer and trailer; of the zeros between every 31st in the short run."""
    flips = Counter[str]()
    for name in [name for name, kind in trial.subject.kinds.items() if kind == "pack"]:
        for part, run in regions(trial.subject.objects, name):
            for position in run if long_run or part != "padding" else [*run[::31], run[-1]]:
                assert damage(trial, name, position, long_run), f"nothing reads byte {position} of {name}"
                flips[part] += 1
    print(f"packs: {dict(flips)} bytes flipped")
    codecs = {f"frame of codec {number}" for number in (0, 2, 3)}
    assert flips.keys() == {"header", "footer", "padding", "trailer"} | codecs


CUTS: dict[str, Callable[[bytes], bytes | None]] = {
    "cut by one byte": lambda data: data[:-1],
    "one byte appended": lambda data: data + b"\0",
    "truncated to nothing": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "deleted": lambda data: None,
}


@pytest.mark.parametrize("how", CUTS)
def test_every_object_cut(how: str, trial: Trial) -> None:
    for name, kind in trial.subject.kinds.items():
        objects = dict(trial.subject.objects)
        found = CUTS[how](objects.pop(name))
        if found is not None:
            objects[name] = found
        gone = found is None
        for reader in trial.operations:
            outcome = trial.run(reader, objects)
            if reader != "verify":
                trial.check_restores(name, reader, outcome, gone=gone)
            elif kind not in (UNSEEN_WHEN_DELETED if gone else UNREAD):
                trial.check_verify(name, outcome, gone=gone)


def test_damage_names_the_object_and_the_tensor(trial: Trial) -> None:
    """A damaged frame of a pack is told with its place and with the path of what it held."""
    paths = set()
    for name in [name for name, kind in trial.subject.kinds.items() if kind == "pack"]:
        for part, run in regions(trial.subject.objects, name):
            if not part.startswith("frame"):
                continue
            objects = dict(trial.subject.objects)
            objects[name] = flipped(objects[name], run[len(run) // 2], 1)
            errors = [trial.run(ref, objects).error for ref in trial.readers(name, run[0]) if ref.startswith("id:")]
            if not errors:
                continue  # a frame that only a removed snapshot needed
            told = set()
            for error in errors:
                assert isinstance(error, CorruptionError)
                assert (error.name, error.offset) == (name, run[0])
                assert error.path in str(error)
                told.add(error.path)
            report = trial.run("verify", objects).value
            assert {path for finding in report.findings for path in finding.paths} == told
            assert all(name == finding.name for finding in report.findings)
            paths |= told
    assert paths == {"model/frozen", "model/noise", "half", "weights"}


def test_the_newest_snapshot_cut_to_nothing_falls_back(trial: Trial) -> None:
    """A power cut left zero-length files under another program; here the one before is taken, and the user is told."""
    subject = trial.subject
    newest, older = trial.run("list", subject.objects).value
    own = subject.needs[newest.id] - subject.needs[older.id]
    assert len(own) == 4  # the record, the manifest, two packs
    for cut in [own, *({name} for name in own)]:
        objects = {name: b"" if name in cut else data for name, data in subject.objects.items()}
        store, _ = opened(objects)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert fingerprint(store.restore()) == subject.values[older.id]
        assert any(newest.id in str(warning.message) for warning in told)
