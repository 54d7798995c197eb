"""A snapshot into files of another format. Every byte is verified on its way, and nothing is ever overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ckstore
from ckstore import SnapshotInfo, Store
from ckstore.errors import InvalidInputError
from ckstore.ids import new_nonce
from ckstore.progress import Progress, silent
from ckstore.state.paths import Path as StatePath
from ckstore.state.paths import spell
from ckstore_torch.convert import dcp_folder, leaves, safetensors_files, shards, torch_file
from ckstore_torch.convert.contents import LeftOut
from ckstore_torch.convert.formats import FORMATS, why_not
from ckstore_torch.convert.importing import noted
from ckstore_torch.convert.leaves import Leaf, Selected
from ckstore_torch.convert.publish import check_free, published
from ckstore_torch.shards import INDEX
from ckstore_torch.whole import whole_state

MAX_SHARD_BYTES = 5_000_000_000
_FEW = 5


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written. `files` are sizes by name, `ties` names that were left to `__metadata__`, `notes` what comes
    back otherwise than it was saved."""

    snapshot: SnapshotInfo
    format: str
    out: Path
    tensors: int
    files: Mapping[str, int]
    left_out: tuple[LeftOut, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A snapshot, and of it what goes along and what does not."""

    store: Store
    source: str
    """What the state is read from: the snapshot, or of several ranks' what was put together."""
    snapshot: SnapshotInfo
    keys: tuple[str, ...] | None
    format: str
    out: Path
    selected: Selected
    taken: tuple[Leaf, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def nbytes(self) -> int:
        """About how much is written: torch.save writes memory that is shared once, the others each tensor as it is."""
        if self.format == "torch":
            return leaves.memory(self.taken)
        tied = leaves.ties(self.taken) if self.format == "safetensors" else {}
        return sum(leaf.entry.nbytes for leaf in self.taken if leaf.name not in tied)


def plan_export(
    store: Store,
    ref: str | int,
    out: Path,
    *,
    format: str,
    keys: Sequence[str] | None = None,
    skip_unsupported: bool = False,
) -> ExportPlan:
    """Decide what is written where; no tensor is read and nothing changes.

    `keys` choose by path; the container that they all lead to becomes the root of what is written. What the format
    cannot hold is `InvalidInputError`, which names it, or with `skip_unsupported` is left out.
    """
    if format not in FORMATS:
        raise InvalidInputError(f"the format is one of {', '.join(FORMATS)}, not {format!r}")
    snapshot = store.resolve(ref)
    is_parted = snapshot.ranks > 1 or _is_sharded(store, snapshot)
    if is_parted:
        store = _put_together(store, snapshot)
    source = f"id:{store.resolve().id if is_parted else snapshot.id}"
    selected = leaves.select(store.show(source).entries, keys)
    judged = [(leaf, why_not(leaf, format)) for leaf in selected.leaves]
    unsupported = _named((leaf, why) for leaf, why in judged if why is not None)
    if unsupported and not skip_unsupported:
        some = "; ".join(f"{one.name} ({one.why})" for one in unsupported[:_FEW])
        more = f" and {len(unsupported) - _FEW} more" if unsupported[_FEW:] else ""
        raise InvalidInputError(
            f"{format} cannot hold {some}{more}; choose other values with --keys, or leave these out with "
            "--skip-unsupported"
        )
    taken = tuple(leaf for leaf, why in judged if why is None and not (leaf.is_note and format != "torch"))
    notes = () if format == "torch" else _module_notes(selected.leaves)
    out = Path(out).absolute()
    plan = ExportPlan(
        store, source, snapshot, None if keys is None else tuple(keys), format, out, selected, taken,
        (*unsupported, *notes),
    )  # fmt: skip
    if not taken:
        raise InvalidInputError(f"nothing of what was chosen can be held by {format}")
    check_free(out, plan.nbytes)
    return plan


def _is_sharded(store: Store, snapshot: SnapshotInfo) -> bool:
    """Whether it is of `dcp.StorageWriter`, by one rank."""
    with store.snapshot(f"id:{snapshot.id}") as opened:
        return INDEX in opened.leaves(0)


def _put_together(store: Store, snapshot: SnapshotInfo) -> Store:
    """A store in memory with the whole state of what several ranks saved, each a part."""
    with store.snapshot(f"id:{snapshot.id}") as opened:
        whole = whole_state(opened)
    made = ckstore.open(f"memory://export-{snapshot.id}-{new_nonce()}", create=True, profile="fast")
    made.save(whole, step=snapshot.step)
    return made


def run_export(
    plan: ExportPlan, *, max_shard_bytes: int = MAX_SHARD_BYTES, progress: Progress = silent
) -> ExportReport:
    """Write what is planned. It appears under its name when all of it is durable, or not at all."""
    progress(0, plan.nbytes)
    if plan.format == "safetensors":
        return _to_safetensors(plan, max_shard_bytes, progress)
    state = _restored(plan)
    if plan.format == "dcp" and not isinstance(state, dict):
        raise InvalidInputError(f"dcp holds a dict, and what was chosen is of type {type(state).__name__}")
    if plan.format == "dcp":
        leaves.check_names(plan.taken)
    with published(plan.out) as beside:
        try:
            (torch_file.write if plan.format == "torch" else dcp_folder.write)(state, beside)
        except Exception as error:
            if not isinstance(error, RuntimeError | ValueError | TypeError) and type(error).__name__ != "PicklingError":
                raise
            raise InvalidInputError(f"{plan.format} cannot hold this: {str(error).splitlines()[0][:300]}") from error
        files = _sizes(beside, plan.out.name)
    progress(plan.nbytes, plan.nbytes)
    notes = _torch_notes(plan) if plan.format == "torch" else _dcp_notes(plan, state)
    tensors = sum(leaf.is_tensor for leaf in plan.taken)
    return ExportReport(plan.snapshot, plan.format, plan.out, tensors, files, plan.left_out, notes=notes)


def _to_safetensors(plan: ExportPlan, max_shard_bytes: int, progress: Progress) -> ExportReport:
    leaves.check_names(plan.taken)
    ties = leaves.ties(plan.taken)
    kept = [leaf for leaf in plan.taken if leaf.name not in ties]
    parts = shards.split(kept, max_shard_bytes)
    single = plan.out.suffix == safetensors_files.SUFFIX
    if single and len(parts) > 1:
        raise InvalidInputError(
            f"{len(parts)} files are needed: give the name of a folder, or a larger --max-shard-size"
        )
    reader = shards.Reader(plan.store, plan.source, plan.taken)
    said = noted(plan.snapshot).get("metadata")
    said = {str(name): str(text) for name, text in said.items()} if isinstance(said, dict) else {}
    done = 0
    with published(plan.out) as beside:
        if not single:
            beside.mkdir()
        names = {}
        for number, part in enumerate(parts, 1):
            name = "model" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}"
            path = beside if single else beside / f"{name}{safetensors_files.SUFFIX}"
            own = {leaf.name for leaf in part}
            metadata = said | safetensors_files.FORMAT | {name: of for name, of in ties.items() if of in own}
            safetensors_files.write(reader.read(part), path, metadata)
            names[path.name] = sorted(own)
            progress(done := done + sum(leaf.entry.nbytes for leaf in part), plan.nbytes)
        if len(parts) > 1:
            total = sum(leaf.entry.nbytes for leaf in kept)
            safetensors_files.write_index(beside / f"model{safetensors_files.SUFFIX}.index.json", names, total)
        files = _sizes(beside, plan.out.name)
    notes = tuple(f"{a} and {b} share memory; each is written by itself" for a, b in leaves.overlaps(kept))
    return ExportReport(plan.snapshot, plan.format, plan.out, len(kept), files, plan.left_out, ties, notes)


def _restored(plan: ExportPlan) -> Any:
    """The chosen part of the state, without what the format cannot hold."""
    root = plan.selected.root
    state = plan.store.restore(plan.source, keys=[spell(root)] if root else None)
    for step in root:  # lists hold only what was asked for, which is one element
        state = state[0] if isinstance(state, list | tuple) else state[step]
    kept = {leaf.whole for leaf in plan.taken if not leaf.is_note}
    return _only(state, root, kept, resolved=plan.format == "dcp")


_NOTHING = object()


def _only(value: Any, path: StatePath, kept: set[StatePath], resolved: bool) -> Any:
    """`value` with nothing in it but the leaves whose paths are `kept`, `_NOTHING` when none is in it.

    `resolved` turns tensors that are conjugated or negated lazily into ordinary ones. Dicts are changed.
    """
    if isinstance(value, dict) and value:
        for key in list(value):
            inner = _only(value[key], (*path, key), kept, resolved)
            if inner is _NOTHING:
                del value[key]
            else:
                value[key] = inner
        return value if len(value) else _NOTHING
    if type(value) in (list, tuple) and value:
        found = [_only(inner, (*path, index), kept, resolved) for index, inner in enumerate(value)]
        left = [inner for inner in found if inner is not _NOTHING]
        return type(value)(left) if left else _NOTHING
    if path not in kept:
        return _NOTHING
    if resolved and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return value.resolve_conj().resolve_neg()
    return value


def _named(refused: Iterable[tuple[Leaf, str]]) -> tuple[LeftOut, ...]:
    """Each value once, however many parts it has."""
    return tuple(LeftOut(name, why) for name, why in {spell(leaf.whole): why for leaf, why in refused}.items())


def _module_notes(found: Iterable[Leaf]) -> tuple[LeftOut, ...]:
    where = dict.fromkeys(spell(leaf.whole) for leaf in found if leaf.is_note)
    return tuple(LeftOut(f"{name}/.metadata", "versions of modules, for which it has no place") for name in where)


def _torch_notes(plan: ExportPlan) -> tuple[str, ...]:
    found = [leaf.entry.path for leaf in plan.taken if leaf.entry.kind.startswith("numpy")]
    return _note(found, "NumPy values, which torch.load reads with weights_only=True only when told of NumPy's types")


def _dcp_notes(plan: ExportPlan, state: Any) -> tuple[str, ...]:
    tied = leaves.ties(leaf for leaf in plan.taken if leaf.is_tensor)
    return (
        *(f"{name} shares the memory of {kept}; each is written by itself" for name, kept in tied.items()),
        *_note(list(map(spell, _other_keys(state, plan.selected.root))), "a key that is no text, and becomes it"),
    )


def _other_keys(value: Any, path: StatePath) -> Iterator[StatePath]:
    """Paths that end with the key of a dict that is no text."""
    items = value.items() if isinstance(value, dict) else enumerate(value if type(value) in (list, tuple) else ())
    for key, inner in items:
        if isinstance(value, dict) and not isinstance(key, str):
            yield (*path, key)
        yield from _other_keys(inner, (*path, key))


def _note(paths: Sequence[str], what: str) -> tuple[str, ...]:
    """One line for everything that it is true of."""
    return (f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {what}",) if paths else ()


def _sizes(made: Path, name: str) -> dict[str, int]:
    if made.is_dir():
        return {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    return {name: made.stat().st_size}
