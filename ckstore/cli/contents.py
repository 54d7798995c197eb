"""What is in a snapshot, for people: a run by its modules and optimizers, any other state by its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckstore.cli.tables import add, cut, facts, line, table, word
from ckstore.cli.text import clipped, count, duration, number, plain, ratio, shape, size
from ckstore.state.modules import Module, depth_for, module_tree
from ckstore.state.paths import parse, spell_step

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.detail import SnapshotDetail
    from ckstore.state.branch import Plain
    from ckstore.state.describe import Entry
    from ckstore.state.training import Model, Optimizer, Stateful, TrainingRun

_VALUE = 60
"""Characters of a value that are shown."""
_NAME = 40
"""The same of the name of a thing."""
_ROWS = 40
"""Rows of modules or keys, of which the depth is chosen where none is given."""
_FIRST = ("epoch", "batch", "consumed", "last_epoch", "_last_lr")
"""What of a scheduler's or a loader's state is told first."""


def detail(out: Console, found: SnapshotDetail, depth: int | None, limit: int | None) -> None:
    """All of a snapshot, down to `depth`."""
    _header(out, found)
    line(out, "")
    if not found.runs:
        _keys(out, found.entries, depth, limit)
        return
    rank, run = min(found.runs.items())
    if len(found.ranks) > 1:
        line(out, f"rank {rank} of {len(found.ranks)}; show --keys 'rank1/**' lists what another one saved")
    for model in run.models:
        _model(out, model, bool(run.optimizers), depth, limit)
    _rest(out, run)


def selected(out: Console, found: SnapshotDetail, entries: Sequence[Entry], limit: int | None) -> None:
    """Some leaves of a snapshot, by path."""
    _header(out, found)
    line(out, "")
    listing = table("PATH", "KIND", "DTYPE", "SHAPE", ">BYTES", "VALUE")
    shown = entries if limit is None else entries[:limit]
    for leaf in shown:
        sized = size(leaf.nbytes) if leaf.nbytes or leaf.shape is not None else ""
        path, dtype = leaf.path or "(the state itself)", clipped(leaf.dtype, _VALUE)
        add(listing, path, leaf.kind, dtype, shape(leaf.shape), sized, clipped(leaf.value, _VALUE))
    out.print(listing)
    cut(out, len(shown), len(entries), "entry", "show all with --limit 0")


def _header(out: Console, found: SnapshotDetail) -> None:
    info = found.info
    metrics = min(found.runs.items())[1].metrics if found.runs else {}
    facts(
        out,
        [
            ("snapshot", info.id),
            ("step", info.step),
            *((clipped(name, _NAME), told(value)) for name, value in metrics.items()),
            ("branch", f"{info.branch} (epoch {info.epoch})"),
            ("created", f"{info.created:%Y-%m-%d %H:%M:%S} UTC"),
            ("tags", ", ".join(info.tags)),
            ("state", word(info.state)),
            ("parent", info.parent),
            ("full", "yes: no earlier pack is needed" if info.full else ""),
            ("logical", size(info.logical_bytes)),
            ("stored", f"{size(info.stored_bytes)} ({ratio(info.logical_bytes, info.stored_bytes)})"),
            ("needs", f"{count(found.chunks, 'chunk')} in {count(found.packs, 'pack')} of {size(found.pack_bytes)}"),
            ("took", duration(info.seconds)),
            ("ranks", len(found.ranks) if len(found.ranks) > 1 else ""),
            ("content", info.content),
            *(
                (f"meta {clipped(key, _NAME)}", clipped(json.dumps(value, ensure_ascii=False), _VALUE))
                for key, value in info.meta.items()
                if key not in metrics
            ),
        ],
    )


def told(value: Plain) -> str:
    """A value in a few characters; numbers to six digits."""
    if isinstance(value, list):
        return clipped(f"[{', '.join(map(told, value))}]", _VALUE)
    return number(value) if isinstance(value, float) else clipped(value, _VALUE)


def _model(out: Console, model: Model, has_optimizer: bool, depth: int | None, limit: int | None) -> None:
    root = module_tree(model.weights)
    name = f"model {clipped(model.name, _NAME)}" if model.name else "model"
    tensors = count(len(model.weights), "tensor")
    line(out, f"{name}: {root.elements:,} elements in {tensors}, {size(root.nbytes)}{_uses(root)}", "bold")
    listing = table("MODULE", ">ELEMENTS", ">BYTES", "DTYPE", "")
    modules = list(root.walk(depth_for(root, _ROWS) if depth is None else depth))
    for one in modules[:limit]:
        counted = f"{one.elements:,}" if one.elements or one.weight is None or one.weight.tied_to is None else ""
        indented = "  " * (one.depth - 1) + clipped(one.name, _NAME)
        dtypes = clipped(", ".join(sorted(one.dtypes)), _NAME)
        add(listing, indented, counted, size(one.nbytes) if counted else "", dtypes, _note(one, has_optimizer))
    out.print(listing)
    cut(out, len(modules[:limit]), len(modules), "module", "show all with --limit 0, or fewer with --depth")
    line(out, "")


def _uses(root: Module) -> str:
    """`: all trained`, or how many elements are trained, frozen and neither."""
    names = {"trained": "trained", "frozen": "frozen", "": "neither (buffers)"}
    used = [f"{root.uses[use]:,} {name}" for use, name in names.items() if root.uses.get(use)]
    if len(root.uses) == 1:
        used = [] if "" in root.uses else [f"all {next(iter(root.uses))}"]
    return f": {', '.join(used)}" if used else ""


def _note(module: Module, has_optimizer: bool) -> str:
    """Shape, frozen or not, and what it is tied to."""
    weight = module.weight
    if weight is None:
        frozen = module.uses.get("frozen", 0)
        return "" if not frozen else "frozen" if frozen == module.elements else f"{frozen:,} frozen"
    words = [shape(weight.shape) if weight.dtype else "", "frozen" if weight.use == "frozen" else ""]
    words += [f"tied to {clipped(weight.tied_to, _NAME)}"] if weight.tied_to else []
    words += ["not trained"] if has_optimizer and not weight.use else []
    return ", ".join(filter(None, words))


def _rest(out: Console, run: TrainingRun) -> None:
    """All of a run but its models."""
    rows: list[tuple[str, object]] = []
    for optimizer in run.optimizers:
        rows += _optimizer(optimizer)
    for role, members in (("scheduler", run.schedulers), ("scaler", run.scalers), ("dataloader", run.dataloaders)):
        rows += [(_named(role, one.name), _stateful(one)) for one in members]
    rows += [
        (clipped(one.name, _NAME), f"{plain(one.kind)}, {count(one.leaves, 'value')}, {size(one.nbytes)}")
        for one in run.others
    ]
    rows.append(("rng", clipped(", ".join(run.generators), 200)))
    facts(out, rows)


def _named(role: str, name: str) -> str:
    return f"{role} {clipped(name, _NAME)}" if name else role


def _optimizer(one: Optimizer) -> Iterable[tuple[str, object]]:
    parameters = sum(group.parameters for group in one.groups)
    state = f"state of {one.with_state} in {count(one.tensors, 'tensor')}, {size(one.nbytes)}"
    yield _named("optimizer", one.name), f"{clipped(one.kind, _NAME)} of {count(parameters, 'parameter')}; {state}"
    for index, group in enumerate(one.groups):
        yield f"  group {index}", f"{count(group.parameters, 'parameter')}: {options(group.options)}"


def _stateful(one: Stateful) -> str:
    first = {name: one.values[name] for name in _FIRST if name in one.values}
    values = options({**first, **one.values})
    return f"{clipped(one.kind, _NAME)}: {values}" if values else f"{clipped(one.kind, _NAME)}, {size(one.nbytes)}"


def options(values: Mapping[str, Plain]) -> str:
    """`lr 0.001, betas [0.9, 0.95]`: without what is off, and what is too much to tell."""
    shown = [
        f"{clipped(name, _NAME)} {told(value)}"
        for name, value in values.items()
        if value is not None and value is not False and not (isinstance(value, str) and value.startswith("("))
    ]
    return clipped(", ".join(shown), 600)


@dataclass(slots=True)
class _Key:
    """A key of a state with all that is in it."""

    name: str
    depth: int
    leaves: int = 0
    nbytes: int = 0
    entry: Entry | None = None
    inner: dict[str, _Key] = field(default_factory=dict)

    def walk(self, depth: int) -> Iterable[_Key]:
        for one in self.inner.values():
            if one.depth <= depth:
                yield one
                yield from one.walk(depth)


def _key_tree(entries: Iterable[Entry]) -> _Key:
    root = _Key("", 0)
    for entry in entries:
        key = root
        for depth, step in enumerate(map(spell_step, parse(entry.path)), 1):
            key = key.inner.setdefault(step, _Key(step, depth))
            key.leaves += 1
            key.nbytes += entry.nbytes
        key.entry = entry
    return root


def _keys(out: Console, entries: Sequence[Entry], depth: int | None, limit: int | None) -> None:
    root = _key_tree(entries)
    deepest = max((len(parse(entry.path)) for entry in entries), default=1)
    keys = [root] if root.entry else list(root.walk(deepest if depth is None else depth))
    listing = table("KEY", "WHAT", ">BYTES", "VALUE")
    shown = keys[:limit]
    for one in shown:
        name = "  " * (one.depth - 1) + (clipped(one.name, _NAME) if one.depth else "(the state itself)")
        leaf = one.entry
        if leaf is None:
            what = count(one.leaves, "value")
            add(listing, f"{name}/", what, size(one.nbytes) if one.nbytes else "", "")
        else:
            what = " ".join(filter(None, [leaf.kind, clipped(leaf.dtype, _VALUE), shape(leaf.shape)]))
            sized = size(leaf.nbytes) if leaf.nbytes or leaf.shape is not None else ""
            add(listing, name, what, sized, clipped(leaf.value, _VALUE))
    out.print(listing)
    cut(out, len(shown), len(keys), "key", "show all with --limit 0, fewer with --depth, some with --keys 'model/**'")
