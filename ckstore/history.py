"""What a store holds: decided saves, the facts about them, epochs and tags, read in the one safe order.

Facts are read before the list of commits. A remover writes `removed` only after the last save that depends on that
snapshot has committed, so whoever has seen `removed` and lists afterwards also sees every commit that still needs
its packs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.ids import SaveName

Order = tuple[int, int, str]
"""Epoch, sequence, nonce: what is newer on a branch. Never a clock, never a file time."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The facts about saves, from their names alone."""

    condemned: dict[SaveName, frozenset[str]] = field(default_factory=dict)
    removed: frozenset[SaveName] = frozenset()
    quarantined: frozenset[SaveName] = frozenset()
    damaged: dict[str, frozenset[int]] = field(default_factory=dict)
    """Pack name → offsets of frames known to be damaged."""
    relocating: dict[str, frozenset[str]] = field(default_factory=dict)
    """Pack name → nonces of the repacks that are about to move it: no new save may build on it."""
    relocated: frozenset[str] = frozenset()
    """Packs whose live frames stand in other packs."""


def read_marks(backend: Backend) -> Marks:
    """Every fact in the store."""
    return parse_marks(backend.list(layout.MARKS))


def parse_marks(names: list[str]) -> Marks:
    """Facts from the names of marks; a name of no known kind is ignored, as a later version may add kinds."""
    condemned: dict[SaveName, set[str]] = defaultdict(set)
    removed, damaged = set(), defaultdict(set)
    quarantines: dict[SaveName, set[str]] = defaultdict(set)
    cleared: dict[SaveName, set[str]] = defaultdict(set)
    relocating, relocated = defaultdict(set), set()
    for name in names:
        try:
            _, spelled, fact = name.split("/", 2)
            save = SaveName.parse(spelled)
        except (FormatError, ValueError):
            continue
        kind, _, rest = fact.partition("-")
        match kind:
            case "condemned":
                condemned[save].add(rest)
            case "removed":
                removed.add(save)
            case "quarantined":
                quarantines[save].add(rest)
            case "cleared":
                cleared[save].add(rest)
            case "damaged":
                number, _, offset = rest.rpartition("-")
                if offset.isdecimal():
                    damaged[f"{layout.PACKS}{save}/{number}"].add(int(offset))
            case "relocating":
                number, _, nonce = rest.rpartition("-")
                relocating[f"{layout.PACKS}{save}/{number}"].add(nonce)
            case "relocated":
                relocated.add(f"{layout.PACKS}{save}/{rest}")
    return Marks(
        {save: frozenset(by) for save, by in condemned.items()},
        frozenset(removed),
        frozenset(save for save, facts in quarantines.items() if facts - cleared[save]),
        {pack: frozenset(offsets) for pack, offsets in damaged.items()},
        {pack: frozenset(nonces) for pack, nonces in relocating.items()},
        frozenset(relocated),
    )


def read_decision(context: Context, save: SaveName) -> records.Decision:
    """What was decided about `save`: `NotFoundError` if nothing yet."""
    known = context.decisions.get(save)
    if known is None:
        name = layout.snapshot(save)
        known = records.decode_decision(context.backend.get(name, limit=records.MAX_RECORD), save, name)
        context.decisions[save] = known
    return known


def read_optional(backend: Backend, name: str, limit: int = records.MAX_RECORD) -> bytes | None:
    """The object, or None where it is absent."""
    try:
        return backend.get(name, limit=limit)
    except NotFoundError:
        return None


def order_of(commit: records.Commit) -> Order:
    """Where `commit` stands among those of its branch."""
    save = SaveName.parse(commit.save)
    return commit.epoch, save.sequence, save.nonce


@dataclass(slots=True)
class History:
    """One reading of a store's records. Commits are read from the backend when they are asked for."""

    context: Context
    marks: Marks
    saves: tuple[SaveName, ...]
    """Every decided save that is not void, newest first."""
    damaged: dict[SaveName, CorruptionError | FormatError] = field(default_factory=dict)
    """Decisions met so far that cannot be read."""
    _ceilings: dict[tuple[str, int], Order | None] = field(default_factory=dict)
    _epochs: dict[str, dict[int, Order]] = field(default_factory=dict)

    def decision(self, save: SaveName) -> records.Decision | None:
        """What was decided, or None where the record is damaged (then `damaged` tells)."""
        try:
            return read_decision(self.context, save)
        except (CorruptionError, FormatError) as error:
            self.damaged[save] = error
            return None
        except NotFoundError:
            # A floor raised since the listing clears void records away; nothing else may.
            if not is_void(read_floor(self.context.backend), save):
                raise
            return None

    def commits(self, branch: str | None = None) -> Iterator[tuple[SaveName, records.Commit]]:
        """Live snapshots, newest sequence first: neither removed nor void; quarantined ones are among them."""
        for save in self.saves:
            if save in self.marks.removed:
                continue
            decision = self.decision(save)
            if isinstance(decision, records.Commit) and branch in (None, decision.branch):
                yield save, decision

    def relocations(self) -> Iterator[tuple[SaveName, records.Relocation]]:
        for save in self.saves:
            decision = self.decision(save)
            if isinstance(decision, records.Relocation):
                yield save, decision

    def is_fenced(self, commit: records.Commit) -> bool:
        """Whether a newer run of the branch took over from an earlier snapshot than this one."""
        ceiling = self._ceiling(commit.branch, commit.epoch)
        return ceiling is not None and order_of(commit) > ceiling

    def candidates(self, branch: str) -> Iterator[tuple[SaveName, records.Commit]]:
        """What `latest` may mean on `branch`, best first.

        Newest sequence first is newest order first among the records that are not fenced: an epoch starts above the
        sequence of its base. Condemned ones come last: whoever condemned them may have died, and reading is safe.
        """
        later = []
        for save, commit in self.commits(branch):
            if save in self.marks.quarantined or self.is_fenced(commit):
                continue
            if save in self.marks.condemned:
                later.append((save, commit))
            else:
                yield save, commit
        yield from later

    def branches(self) -> list[str]:
        """Branches that hold a live snapshot, in order of name."""
        return sorted({commit.branch for _, commit in self.commits()})

    def newest_epoch(self, branch: str) -> int:
        """The newest opened epoch of `branch`; 0 where none was opened."""
        return max(self._opened(branch), default=0)

    def _ceiling(self, branch: str, epoch: int) -> Order | None:
        """The lowest base of all epochs newer than `epoch`; None where there is no newer one."""
        key = (branch, epoch)
        if key not in self._ceilings:
            newer = [base for number, base in self._opened(branch).items() if number > epoch]
            self._ceilings[key] = min(newer, default=None)
        return self._ceilings[key]

    def _opened(self, branch: str) -> dict[int, Order]:
        if branch not in self._epochs:
            self._epochs[branch] = read_epochs(self.context.backend, branch).get(branch, {})
        return self._epochs[branch]


def read_epochs(backend: Backend, branch: str | None = None) -> dict[str, dict[int, Order]]:
    """Branch → epoch number → the order of the snapshot that the epoch goes on from."""
    opened: dict[str, dict[int, Order]] = defaultdict(dict)
    for name in backend.list(layout.EPOCHS if branch is None else f"{layout.EPOCHS}{branch}/"):
        record = records.decode(backend.get(name, limit=records.MAX_RECORD), records.Epoch, name)
        if layout.epoch(record.branch, record.number) != name:
            raise FormatError(f"{name} holds the record of epoch {record.number} of {record.branch!r}")
        base = SaveName.parse(record.base) if record.base else None
        opened[record.branch][record.number] = (record.base_epoch, base.sequence, base.nonce) if base else (-1, 0, "")
    return opened


def read_history(context: Context) -> History:
    """Read facts, then the list of decisions, then the floor below which unlisted decisions are void.

    Where the floor voids something, all is read again: it may have been raised after the listing, which then lacks
    what was committed in place of what is void.
    """
    number = -1
    while True:
        marks = read_marks(context.backend)
        decided = list_saves(context.backend, layout.SNAPSHOTS)
        try:
            floor = read_floor(context.backend)
        except CorruptionError:
            # It voids nothing then. That brings nothing back that a reader could take for good: what a removed or
            # aborted save wrote is gone. Saves and a new floor need to read it, and refuse.
            floor = records.Floor(number=0, sequence=0, live=[])
        listed = set(floor.live)
        saves = tuple(save for save in decided if save.sequence >= floor.sequence or str(save) in listed)
        if len(saves) == len(decided) or floor.number == number:
            return History(context, marks, saves)
        number = floor.number


def is_void(floor: records.Floor, save: SaveName) -> bool:
    """Whether whatever was decided about `save` counts for nothing."""
    return save.sequence < floor.sequence and str(save) not in floor.live


def list_saves(backend: Backend, prefix: str) -> list[SaveName]:
    """The saves that name objects below `prefix`, newest first; foreign names are passed over."""
    found = set()
    for name in backend.list(prefix):
        try:
            found.add(SaveName.parse(name[len(prefix) :].split("/")[0]))
        except FormatError:
            continue
    return sorted(found, reverse=True)


def read_floor(backend: Backend) -> records.Floor:
    """The newest floor; one of sequence 0 where none was ever set."""
    while names := backend.list(layout.FLOORS):
        data = read_optional(backend, names[-1])
        if data is None:
            continue  # superseded and deleted since it was listed: there is a newer one
        found = records.decode(data, records.Floor, names[-1])
        if layout.floor(found.number) != names[-1]:
            raise FormatError(f"{names[-1]} holds floor {found.number}")
        return found
    return records.Floor(number=0, sequence=0, live=[])


def read_tags(backend: Backend) -> dict[str, SaveName]:
    """Every tag and the snapshot it names."""
    tags = {}
    for name in backend.list(layout.TAGS):
        data = read_optional(backend, name)
        if data is not None:
            tags[name[len(layout.TAGS) :]] = SaveName.parse(records.decode(data, records.Tag, name).snapshot)
    return tags
