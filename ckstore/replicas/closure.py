"""What a snapshot needs on a storage, and what of that is not there yet.

A pack that was repacked on the source is needed only where it is not there as it was written. Then its frames are
reached by way of the RELOCATION and its mark, as on the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckstore import facts, layout
from ckstore.backend.base import Backend, size_of
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NotFoundError
from ckstore.format.records import PackRef, Relocation
from ckstore.history import Marks, read_decision
from ckstore.ids import SaveName
from ckstore.relocation import mark_name


class Sizes:
    """The sizes of objects on a storage, each asked once; whoever writes one says so."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sizes: dict[str, int | None] = {}

    def of(self, name: str) -> int | None:
        """None for an object that is not there."""
        if name not in self._sizes:
            self._sizes[name] = size_of(self._backend, name)
        return self._sizes[name]

    def put(self, name: str, size: int) -> None:
        """It is there now."""
        self._sizes[name] = size

    def forget(self) -> None:
        """Ask anew from now on."""
        self._sizes = {}


@dataclass(slots=True)
class Lack:
    """What is to be done on a target before a snapshot can stand there."""

    packs: dict[str, PackRef] = field(default_factory=dict)
    """To be copied."""
    reused: set[str] = field(default_factory=set)
    """There already; perhaps not durable, if somebody else is just writing them."""
    moves: dict[SaveName, set[str]] = field(default_factory=dict)
    """RELOCATIONs of the source, and the packs that are to be marked as moved by each."""
    unmoved: set[str] = field(default_factory=set)
    """Packs that the source does not say were moved, or not so: marks on the target that are not to count."""

    def deepest_first(self) -> list[tuple[SaveName, set[str]]]:
        """The moves, in an order in which a mark never leads to what is neither there nor moved itself."""
        return sorted(self.moves.items(), reverse=True)


def lacking(
    source: Context, moved: Marks, sizes: Sizes, target: Context, moved_there: Marks, packs: Iterable[PackRef],
    *, follow: bool = False,
) -> Lack:  # fmt: skip
    """What `target` lacks of `packs`, which a snapshot on `source` needs.

    With `follow`, packs that were repacked on the source are followed even where they are there as they were written.
    """
    lack = Lack()
    waiting, seen = list(packs), set[str]()
    while waiting:
        pack = waiting.pop()
        if pack.name in seen:
            continue
        seen.add(pack.name)
        is_moved = pack.name in moved_there.relocated
        if is_moved and pack.name in moved.relocated and mover(source, pack.name) == mover(target, pack.name):
            waiting += targets(_move(source, pack.name)[1], pack.name)
        elif not is_moved and sizes.of(pack.name) == pack.size and not (follow and pack.name in moved.relocated):
            lack.reused.add(pack.name)
        elif pack.name in moved.relocated:
            save, record = _move(source, pack.name)
            lack.moves.setdefault(save, set()).add(pack.name)
            waiting += targets(record, pack.name)
        else:
            if sizes.of(pack.name) == pack.size:
                lack.reused.add(pack.name)
            else:
                lack.packs[pack.name] = pack
            if is_moved:
                lack.unmoved.add(pack.name)
    return lack


def mover(context: Context, pack: str) -> str | None:
    """The spelled name of the repack that moved a pack, as its mark says; None where that cannot be told."""
    try:
        return facts.read(context, mark_name(pack)).evidence.get("by")
    except (CorruptionError, FormatError, NotFoundError):
        return None


def targets(record: Relocation, pack: str) -> list[PackRef]:
    """The packs into which the frames of `pack` were moved."""
    names = {moved.new for moved in record.moved if moved.old == pack}
    return [new for new in record.packs if new.name in names]


def _move(context: Context, pack: str) -> tuple[SaveName, Relocation]:
    """Who moved the frames of `pack`, and the record of that. `NotFoundError` if a floor has cleared it away since."""
    save = SaveName.parse(facts.read(context, mark_name(pack)).evidence.get("by", ""))
    record = read_decision(context, save)
    if not isinstance(record, Relocation):
        raise CorruptionError(f"{layout.snapshot(save)}, which is said to have moved it, moved nothing", name=pack)
    return save, record
