"""A tree against a live target: a plan that fills the target in place, or a refusal before anything changed.

Arrays and tensors keep their identity and memory and take the snapshot's values. Scalars are replaced in the dict or
list that holds them, whatever scalar stood there; a tuple that holds one is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckstore.errors import MismatchError
from ckstore.state import scalars, targets
from ckstore.state.build import Builder
from ckstore.state.nodes import METADATA, Array, Composite, Foreign, Run, Sequence
from ckstore.state.nodes import Mapping as MappingNode
from ckstore.state.paths import Path, Selection, spell
from ckstore.state.plugin import plugin, plugin_if_loaded
from ckstore.state.selection import Keys, blobs_of, keep
from ckstore.state.targets import Fill, Target
from ckstore.state.tree import MAX_DEPTH, Tree, decode_order


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore into a target did not fill, and what it converted.

    `missing` are paths that the target has and the snapshot lacks, `unexpected` the reverse, `mismatched` pairs of
    path and reason, all of them left as they were; `cast` are (path, dtype in the snapshot, dtype in the target).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str], ...] = ()
    cast: tuple[tuple[str, str, str], ...] = ()


Maker = Callable[[Builder], object]
"""Makes a value once the buffers are full."""


@dataclass(frozen=True, slots=True)
class IntoPlan:
    """How a target will be filled. Read each of `blobs` into `direct(blob)`, or memory of its size; then `finish`."""

    report: RestoreReport
    blobs: tuple[int, ...]
    _tree: Tree
    _order: dict[int, list[int]]
    _fills: tuple[Fill, ...]
    _direct: Mapping[int, Fill]
    _composites: tuple[tuple[int, object], ...]
    _settings: tuple[tuple[object, object, Maker], ...]

    def direct(self, blob: int) -> memoryview | None:
        """Writable memory of a target that is to hold exactly this blob, or None."""
        fill = self._direct.get(blob)
        return None if fill is None else fill.target.open()[0].data

    def finish(self, buffers: Mapping[int, memoryview]) -> None:
        """Put everything into place. `buffers` holds every blob of `blobs`, those of `direct` too."""
        builder = Builder(self._tree, buffers, bytearray(b"\1") * len(self._tree.nodes), self._order)
        # Values that may still turn out impossible to make come first, before any target of `finish` changes.
        made = [(holder, key, make(builder)) for holder, key, make in self._settings]
        composed = [(builder.value(index), target) for index, target in self._composites]
        for fill in self._fills:
            if not fill.view.nbytes:
                continue
            if fill.raw:
                fill.copy(np.frombuffer(buffers[fill.leaf.blob], np.uint8))  # type: ignore[index]
            else:
                targets.convert(fill, builder.value(fill.index))
        for source, target in composed:
            plugin().copy(source, target)
        targets.touched(self._fills)
        for holder, key, value in made:
            holder[key] = value  # type: ignore[index]


def plan_into(  # keyword arguments are those of Store.restore
    tree: Tree, order: bytes, target: object, *, keys: Keys = None, strict: bool = True, cast: bool = False
) -> IntoPlan:
    """Match `tree` with `target`; the target is only looked at.

    `MismatchError` when they differ in structure, shape or dtype, unless `strict` is false: then what does not fit is
    reported and left alone. `cast` lets arrays be converted to the dtype of the target. With `keys`, only what they
    select is compared.
    """
    matching = _Matching(tree, keep(tree, keys), cast, Selection(keys))
    make = matching.node(0, (), target, holds=False)
    assert make is None  # a root that cannot be changed in place is a mismatch
    for i, reason in reversed(targets.conflicts(matching.fills)):
        matching.mismatched.append((matching.fills.pop(i).path, reason))
    report = matching.report()
    if strict and (report.missing or report.unexpected or report.mismatched):
        raise MismatchError(report.missing, report.unexpected, report.mismatched)
    fills = tuple(matching.fills)
    needed = matching.needed | {fill.index for fill in fills}
    marked = bytearray(i in needed for i in range(len(tree.nodes)))
    return IntoPlan(
        report,
        tuple(sorted(blobs_of(tree, marked))),
        tree,
        decode_order(order, tree),
        fills,
        targets.direct(fills, tree.blob_sizes),
        tuple(matching.composites),
        tuple(matching.settings),
    )


@dataclass(slots=True)
class _Matching:
    """One walk over a tree and a target side by side. Recursion is bounded by `tree.MAX_DEPTH`."""

    tree: Tree
    kept: bytearray
    cast: bool
    selection: Selection
    fills: list[Fill] = field(default_factory=list)
    composites: list[tuple[int, object]] = field(default_factory=list)
    settings: list[tuple[object, object, Maker]] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> RestoreReport:
        cast = tuple(
            (fill.path, str(fill.leaf.dtype), str(fill.target.dtype))
            for fill in self.fills
            if fill.leaf.dtype != fill.target.dtype
        )
        return RestoreReport(tuple(self.missing), tuple(self.unexpected), tuple(self.mismatched), cast)

    def node(self, index: int, path: Path, target: object, holds: bool) -> Maker | None:
        """Match one node; what makes the value that must take the target's place, or None if it can stay.

        `holds` says whether a dict or list above can hold another value in its place.
        """
        node = self.tree.nodes[index]
        if isinstance(node, MappingNode):
            return self._mapping(index, path, target)
        if isinstance(node, Sequence):
            return self._sequence(index, node, path, target, holds)
        if isinstance(node, Composite):
            return self._composite(index, node, path, target)
        if isinstance(node, Array):
            return self._array(index, node, path, target)
        return self._scalar(index, node, path, target, holds)

    def _differ(self, path: Path, reason: str) -> Maker | None:
        self.mismatched.append((spell(path), reason))
        return None

    def _mapping(self, index: int, path: Path, target: object) -> Maker | None:
        if not isinstance(target, dict):
            return self._differ(path, f"a dict in the snapshot, {_kind(target)} in the target")
        theirs = {_identity(key): key for key in target}
        for step, child in self.tree.children(index):
            if step is METADATA or not self.kept[child]:
                theirs.pop(_identity(step), None)
                continue
            below = (*path, step)
            if _identity(step) not in theirs:
                self.unexpected.append(spell(below))
                continue
            key = theirs.pop(_identity(step))
            make = self.node(child, below, target[key], holds=True)
            if make is not None:
                self.settings.append((target, key, make))
        for key in theirs.values():
            self._lacking((*path, key), target[key])
        return None

    def _sequence(self, index: int, node: Sequence, path: Path, target: object, holds: bool) -> Maker | None:
        kind = tuple if node.is_tuple else list
        if not (type(target) is tuple if node.is_tuple else isinstance(target, list)):
            return self._differ(path, f"a {kind.__name__} in the snapshot, {_kind(target)} in the target")
        assert isinstance(target, tuple | list)
        replaced: dict[int, Maker] = {}
        for place, (step, child) in enumerate(self.tree.children(index)):
            if not self.kept[child]:
                continue
            if place >= len(target):
                self.unexpected.append(spell((*path, step)))
                continue
            make = self.node(child, (*path, step), target[place], holds or not node.is_tuple)
            if make is not None:
                replaced[place] = make
        for place in range(node.size, len(target)):
            self._lacking((*path, place), target[place])
        if node.is_tuple and replaced:
            return lambda builder: tuple(
                replaced[place](builder) if place in replaced else value for place, value in enumerate(target)
            )
        self.settings += [(target, place, make) for place, make in replaced.items()]
        return None

    def _lacking(self, path: Path, target: object, depth: int = 0) -> None:
        """Report what the target has and the snapshot lacks, as far as it is selected."""
        state = self.selection.start()
        for step in path:
            state = self.selection.advance(state, step)
        if state is Selection.ALL:
            self.missing.append(spell(path))
        elif state and depth < MAX_DEPTH:
            children = target.items() if isinstance(target, dict) else ()
            if isinstance(target, list | tuple):
                children = enumerate(target)  # type: ignore[assignment]
            for step, child in children:
                self._lacking((*path, step), child, depth + 1)

    def _array(self, index: int, leaf: Array, path: Path, target: object) -> Maker | None:
        found = targets.describe(target)
        if found is None:
            kind = "torch tensor" if leaf.torch else "NumPy array"
            return self._differ(path, f"a {kind} in the snapshot, {_kind(target)} in the target")
        fill = targets.fit(spell(path), index, leaf, found, self.cast) if isinstance(found, Target) else found
        if isinstance(fill, str):
            return self._differ(path, fill)
        self.fills.append(fill)
        return None

    def _composite(self, index: int, node: Composite, path: Path, target: object) -> Maker | None:
        framework = plugin_if_loaded()
        children = dict(self.tree.children(index))
        leaves = {str(step): self.tree.nodes[child] for step, child in children.items()}
        parts = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Array)}
        if framework is None or len(parts) != len(leaves):
            return self._differ(path, f"a {node.kind} tensor in the snapshot, {_kind(target)} in the target")
        reason = framework.why_not_fill(node, parts, target)
        if reason is not None:
            return self._differ(path, reason)
        self.composites.append((index, target))
        self.needed.update(children.values())
        return None

    def _scalar(self, index: int, node: object, path: Path, target: object, holds: bool) -> Maker | None:
        if not _is_scalar(target):
            return self._differ(path, f"a {_spoken(node)} in the snapshot, {_kind(target)} in the target")
        if not isinstance(node, Run) and _same_scalar(node, target):
            return None
        if not holds:
            return self._differ(path, "the target is not in a dict or list that could take another value")
        self.needed.add(index)
        return lambda builder: builder.value(index)


def _identity(key: object) -> object:
    """What tells keys apart: `0`, `0.0`, `False` are one key to a dict, but not to a snapshot."""
    return scalars.sort_key(key) if type(key) in scalars.RANK else (type(key), key)  # type: ignore[arg-type]


def _is_scalar(value: object) -> bool:
    if type(value) in scalars.RANK or isinstance(value, np.generic):
        return True
    framework = plugin_if_loaded()
    return framework is not None and framework.is_value(value)


def _same_scalar(node: object, target: object) -> bool:
    if isinstance(node, Foreign):
        made = plugin().value(node)
        return type(made) is type(target) and made == target
    if isinstance(node, np.generic):
        return type(node) is type(target) and (node.dtype, node.tobytes()) == (target.dtype, target.tobytes())
    return scalars.same(node, target)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"


def _spoken(node: object) -> str:
    if isinstance(node, Run):
        return "str" if node.text else "bytes"
    return f"torch {node.kind}" if isinstance(node, Foreign) else type(node).__name__
