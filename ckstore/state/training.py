"""What a training run is made of, as people think of it: read off a tree that `ckstore_torch.Checkpointer` saved.

The layout is known by its shape alone: nothing is imported and no blob is read. A state of any other shape is no run.
What the layout does not name is listed with its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckstore.state.branch import Branch, Plain, memory_of, plain_leaf, spelled
from ckstore.state.describe import leaf_at
from ckstore.state.nodes import Array, Sequence
from ckstore.state.paths import Step
from ckstore.state.tree import Tree, decode_order

_MEMBERS = ("model", "optimizer", "scheduler", "scaler", "dataloader")
_FRAME = ("layout", "save", "step", "metrics", "mappings", "frozen", "rng", "extra")


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, or whatever else has a name in it. Bytes are those of its elements.

    `use` is `trained` (in a group of an optimizer), `frozen`, or "" (buffers, for one). `tied_to` names an earlier
    tensor with the same memory, where its elements are counted.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int
    use: str
    tied_to: str | None


@dataclass(frozen=True, slots=True)
class Model:
    """A model; `name` is empty where the run has one that was given without a name."""

    name: str
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimizer: how many parameters it has, and its hyper-parameters."""

    parameters: int
    options: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer. `tensors` and `nbytes` are those of its state, kept for `with_state` of its parameters."""

    name: str
    kind: str
    groups: tuple[Group, ...]
    with_state: int
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stateful:
    """A scheduler, a loader: the type that it had, and what of its state are a few plain values."""

    name: str
    kind: str
    values: dict[str, Plain]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Anything else that a run holds: what it is, and how many leaves of what size are in it."""

    name: str
    kind: str
    leaves: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training run as it was saved. `generators` are the random number generators whose state is there; `others` is
    what was given as extra, and whatever else is in it."""

    layout: int
    step: int
    metrics: dict[str, Plain]
    models: tuple[Model, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Stateful, ...]
    scalers: tuple[Stateful, ...]
    dataloaders: tuple[Stateful, ...]
    others: tuple[Holding, ...]
    frozen: tuple[str, ...]
    generators: tuple[str, ...]


def training_run(tree: Tree, order: bytes) -> TrainingRun | None:
    """The run that a tree is the state of, in the order in which things were given; None if it is something else."""
    root = Branch(tree, decode_order(order, tree), 0)
    layout, step, metrics, mappings = (root.at(name) for name in ("layout", "step", "metrics", "mappings"))
    if metrics is None or mappings is None or not isinstance(mappings.node, Sequence):
        return None
    if layout is None or step is None or type(layout.node) is not int or type(step.node) is not int:
        return None
    mapped = set(_texts(mappings))
    roles = {role: list(_members(root, role, role in mapped)) for role in _MEMBERS}
    frozen = tuple(_texts(root.at("frozen")))
    uses = dict.fromkeys((text for _, part in roles["optimizer"] for text in _trained(part)), "trained")
    uses |= dict.fromkeys(frozen, "frozen")
    others = [(spelled(step), part) for step, part in root.children() if step not in (*_MEMBERS, *_FRAME)]
    extra = [(spelled(step), part) for step, part in _children(root.at("extra"))]
    return TrainingRun(
        layout.node,
        step.node,
        {spelled(name): part.plain() for name, part in metrics.children()},
        tuple(Model(name, tuple(_weights(name, part, uses))) for name, part in roles["model"]),
        tuple(_optimizer(name, part) for name, part in roles["optimizer"]),
        tuple(_stateful(name, part) for name, part in roles["scheduler"]),
        tuple(_stateful(name, part) for name, part in roles["scaler"]),
        tuple(_stateful(name, part) for name, part in roles["dataloader"]),
        tuple(Holding(name, part.kind, *part.size()) for name, part in (*extra, *others)),
        frozen,
        tuple(_generators(root.at("rng"))),
    )


def _children(branch: Branch | None) -> Iterator[tuple[Step, Branch]]:
    return branch.children() if branch is not None else iter(())


def _texts(branch: Branch | None) -> Iterator[str]:
    return (child.node for _, child in _children(branch) if isinstance(child.node, str))


def _members(root: Branch, role: str, is_mapping: bool) -> Iterator[tuple[str, Branch]]:
    """The objects of a role by name; one that was given alone has the empty name."""
    branch = root.at(role)
    if branch is not None and is_mapping:
        yield from ((spelled(step), child) for step, child in branch.children())
    elif branch is not None:
        yield "", branch


def _trained(optimizer: Branch) -> Iterator[str]:
    for _, group in _children(optimizer.at("groups")):
        yield from _texts(group.at("params"))


def _weights(model: str, branch: Branch, uses: dict[str, str]) -> Iterator[Weight]:
    """What a model holds. The optimizer knows tied tensors by the name of one of them."""
    members = [(spelled(step), child) for step, child in branch.children()]
    first: dict[object, str] = {}
    use_of: dict[object, str] = {}
    for name, child in members:
        place = _memory(child)
        first.setdefault(place, name)
        if use := uses.get(f"{model}/{name}" if model else name):
            use_of[place] = use
    for name, child in members:
        place, node = _memory(child), child.node
        tied_to = None if first[place] == name else first[place]
        use = use_of.get(place, "")
        if isinstance(node, Array):
            leaf = leaf_at(node)
            yield Weight(name, leaf.kind, leaf.dtype, node.view.shape, prod(node.view.shape), leaf.nbytes, use, tied_to)
        else:
            elements = sum(prod(one.view.shape) for one in child.leaves() if isinstance(one, Array))
            yield Weight(name, child.kind, "", (), elements, child.size()[1], use, tied_to)


def _memory(branch: Branch) -> object:
    """Equal for those that are tied to each other."""
    node = branch.node
    return memory_of(node) if isinstance(node, Array) and node.blob is not None else branch.index


def _optimizer(name: str, branch: Branch) -> Optimizer:
    kind, state = branch.at("kind"), branch.at("state")
    groups = tuple(
        Group(
            sum(1 for _ in _texts(group.at("params"))),
            {spelled(step): option.plain() for step, option in group.children() if step != "params"},
        )
        for _, group in _children(branch.at("groups"))
    )
    tensors = sum(isinstance(node, Array) for node in branch.leaves())
    return Optimizer(
        name,
        str(plain_leaf(kind.node)) if kind else "",
        groups,
        sum(1 for _ in _children(state)),
        tensors,
        branch.size()[1],
    )


def _stateful(name: str, branch: Branch) -> Stateful:
    kind, state = branch.at("kind"), branch.at("state")
    values = {spelled(step): child.plain() for step, child in _children(state)}
    return Stateful(name, str(plain_leaf(kind.node)) if kind else branch.kind, values, branch.size()[1])


def _generators(branch: Branch | None) -> Iterator[str]:
    """`python`, `numpy (MT19937)`, `torch`, `cuda × 2`; private ones by name and kind."""
    for step, child in _children(branch):
        if step == "named":
            for name, one in child.children():
                kind = one.at("kind")
                yield f"{spelled(name)} ({plain_leaf(kind.node) if kind else one.kind})"
        elif isinstance(child.node, Sequence):
            if child.node.size:
                yield f"{spelled(step)} × {child.node.size}"
        else:
            kind = child.at("bit_generator")
            yield f"{spelled(step)} ({plain_leaf(kind.node)})" if kind else spelled(step)
