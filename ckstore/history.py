"""What a store holds: decided saves, the facts about them, epochs and tags, read in the one safe order.

Facts are read before the list of commits. A remover writes `removed` only after the last save that depends on that
snapshot has committed, so whoever has seen `removed` and lists afterwards also sees every commit that still needs
its packs.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ckstore import layout, sources
from ckstore.backend.base import Backend
from ckstore.context import Context
from ckstore.errors import CkstoreWarning, CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.ids import SaveName

ELSEWHERE = b""
"""Stands in a decision that is kept in memory for a manifest that its record holds; no manifest is empty."""

_OF_TIERS = ("evicting", "evicted", "returned", "freeing", "verified")

Order = tuple[int, int, str]
"""Epoch, sequence, nonce: what is newer on a branch. Never a clock, never a file time."""
Unreadable = CorruptionError | FormatError
"""What is wrong with a record that is there and cannot be read."""


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
    evicting: dict[SaveName, frozenset[str]] = field(default_factory=dict)
    """Snapshot → nonces of the evictions that are under way or were done: no new save may build on it."""
    evicted: dict[SaveName, frozenset[str]] = field(default_factory=dict)
    """Snapshot → nonces of the evictions that nothing has undone: its packs are on other storages."""
    freeing: dict[SaveName, frozenset[str]] = field(default_factory=dict)
    """Evicted snapshot → nonces of the sweeps that free packs of it."""
    verified: dict[SaveName, frozenset[str]] = field(default_factory=dict)
    """Snapshot → digests of the closures that were read back and found whole here."""

    @property
    def leaving(self) -> frozenset[SaveName]:
        """Snapshots that no new save may build on: their packs are, or may soon be, on other storages only."""
        return frozenset(self.evicting.keys() | self.evicted.keys())


def read_marks(backend: Backend) -> Marks:
    """Every fact in the store."""
    return parse_marks(backend.list(layout.MARKS))


def read_marks_about(backend: Backend, saves: Iterable[SaveName]) -> Marks:
    """Every fact in the store, for whoever has just announced that it depends on the snapshots `saves`.

    One that a floor has voided counts as removed: its mark may have been cleared away with its record.
    """
    marks = read_marks(backend)
    try:
        floor = read_floor(backend)  # after the marks: a floor is raised before any mark is cleared away
    except CorruptionError:
        return marks  # then it voids nothing; saves refuse to begin
    return replace(marks, removed=marks.removed | {save for save in saves if is_void(floor, save)})


def parse_marks(names: list[str]) -> Marks:
    """Facts from the names of marks; a name of no known kind is ignored, as a later version may add kinds."""
    condemned: dict[SaveName, set[str]] = defaultdict(set)
    removed, damaged = set(), defaultdict(set)
    quarantines: dict[SaveName, set[str]] = defaultdict(set)
    cleared: dict[SaveName, set[str]] = defaultdict(set)
    relocating, relocated = defaultdict(set), set()
    tiers: dict[str, dict[SaveName, set[str]]] = {kind: defaultdict(set) for kind in _OF_TIERS}
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
            case "evicting" | "evicted" | "returned" | "freeing" | "verified":
                tiers[kind][save].add(rest)
    evicted = {save: nonces - tiers["returned"].get(save, set()) for save, nonces in tiers["evicted"].items()}
    return Marks(
        {save: frozenset(by) for save, by in condemned.items()},
        frozenset(removed),
        frozenset(save for save, facts in quarantines.items() if facts - cleared[save]),
        {pack: frozenset(offsets) for pack, offsets in damaged.items()},
        {pack: frozenset(nonces) for pack, nonces in relocating.items()},
        frozenset(relocated),
        _frozen(tiers["evicting"]),
        _frozen(evicted),
        _frozen(tiers["freeing"]),
        _frozen(tiers["verified"]),
    )


def _frozen(found: Mapping[SaveName, set[str]]) -> dict[SaveName, frozenset[str]]:
    return {save: frozenset(nonces) for save, nonces in found.items() if nonces}


def read_decision(context: Context, save: SaveName) -> records.Decision:
    """What was decided about `save`: `NotFoundError` if nothing yet. Manifests within it are left out (`ELSEWHERE`)."""
    known = context.decisions.get(save)
    return remember(context, save, read_whole_decision(context, save)) if known is None else known


def remember(context: Context, save: SaveName, decision: records.Decision) -> records.Decision:
    """Keep in memory what was decided about `save`, for good; it comes back as it is kept."""
    if isinstance(decision, records.Commit):
        decision = _lean(decision, context.packs_met)
        context.packs_met = {pack.name: pack for pack in decision.packs}
    context.decisions[save] = decision
    return decision


def read_whole_decision(context: Context, save: SaveName) -> records.Decision:
    """What was decided about `save`, read anew and with the manifests within it."""
    name = layout.snapshot(save)

    def read_there(storage: Context) -> records.Decision:
        return records.decode_decision(storage.backend.get(name, limit=records.MAX_RECORD), save, name)

    return sources.first(context, name, read_there, absent=False)


def _lean(commit: records.Commit, packs_met: dict[str, records.PackRef]) -> records.Commit:
    """The same to be kept in memory for every snapshot there is: without manifests, and sharing packs with others."""
    manifests = [
        entry if entry.inline is None else msgspec.structs.replace(entry, inline=ELSEWHERE)
        for entry in commit.manifests
    ]
    packs = [met if (met := packs_met.get(pack.name)) == pack else pack for pack in commit.packs]
    return msgspec.structs.replace(commit, manifests=manifests, packs=packs)


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
    floor: records.Floor | None = None
    """Below which they are void unless listed; None where it cannot be read."""
    damaged: dict[SaveName, Unreadable] = field(default_factory=dict)
    """Decisions met so far that cannot be read."""
    _epochs: dict[str, Epochs] = field(default_factory=dict)

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

    def held(self) -> Iterator[tuple[SaveName, records.Commit]]:
        """Live snapshots whose packs are on this storage: not evicted."""
        return (found for found in self.commits() if found[0] not in self.marks.evicted)

    def relocations(self) -> Iterator[tuple[SaveName, records.Relocation]]:
        for save in self.saves:
            decision = self.decision(save)
            if isinstance(decision, records.Relocation):
                yield save, decision

    def is_fenced(self, commit: records.Commit) -> bool:
        """Whether a newer run of the branch took over from an earlier snapshot than this one."""
        ceiling = self.epochs(commit.branch).ceiling(commit.epoch)
        return ceiling is not None and order_of(commit) > ceiling

    def candidates(self, branch: str) -> Iterator[tuple[SaveName, records.Commit]]:
        """What `latest` may mean on `branch`, best first.

        Newest sequence first is newest order first among the records that are not fenced: an epoch starts above the
        sequence of its base. Where an epoch cannot be read, what it fenced may be among them, and orders are compared.
        Condemned ones come last: whoever condemned them may have died, and reading is safe.
        """
        later = []
        found = self.commits(branch)
        if self.epochs(branch).unreadable:
            found = iter(sorted(found, key=lambda one: order_of(one[1]), reverse=True))
        for save, commit in found:
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

    def left_behind(self, branch: str, base: Order, but: int = 0) -> SaveName | None:
        """The newest good snapshot above `base` that no epoch, `but` for that, leaves behind on purpose; None for none.

        It was acknowledged while other runs took over, each from what it saw then. Whoever goes on from `base` goes on
        from this instead.
        """
        chosen = self.epochs(branch).chosen(but)
        best: tuple[Order, SaveName] | None = None
        for save, commit in self.commits(branch):
            order = order_of(commit)
            unsafe = save in self.marks.quarantined or save in self.marks.condemned
            if unsafe or order <= base or (best is not None and order <= best[0]):
                continue
            ceiling = chosen.ceiling(commit.epoch)
            if ceiling is None or order <= ceiling:
                best = order, save
        return best[1] if best else None

    def refuse_unreadable_epochs(self, branch: str | None = None) -> None:
        """`CorruptionError` if what `latest` means on the branch, or on any, hangs on an epoch that cannot be read."""
        for one in self.branches() if branch is None else [branch]:
            self.epochs(one).refuse_unreadable(one)

    def epochs(self, branch: str) -> Epochs:
        """The epochs of `branch`, read once; with a warning for those that cannot be read."""
        if branch not in self._epochs:
            found = self._epochs[branch] = read_epochs(self.context.backend, branch).get(branch, Epochs())
            for number, error in sorted(found.unreadable.items()):
                hint = f"; {SUPERSEDE}" if number == found.newest else ""
                warn(f"epoch {number} of branch {branch} cannot be read and is passed over: {error}{hint}")
        return self._epochs[branch]


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs opened on one branch: by number the order of what each goes on from, and those that are damaged."""

    bases: dict[int, Order] = field(default_factory=dict)
    unreadable: dict[int, Unreadable] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    """Those whose base was named by whoever opened them."""

    @property
    def newest(self) -> int:
        """The highest number that is taken; 0 where none was opened."""
        return max([*self.bases, *self.unreadable], default=0)

    def refuse_unreadable(self, branch: str) -> None:
        """`CorruptionError` if the newest of them, which are those of `branch`, cannot be read."""
        if self.newest in self.unreadable:
            raise CorruptionError(
                f"branch {branch} can be read, but not written or pruned: {self.unreadable[self.newest]}; {SUPERSEDE}",
                name=layout.epoch(branch, self.newest),
            )

    def chosen(self, but: int = 0) -> Epochs:
        """Those alone, `but` for one, that leave behind on purpose what is above their base."""
        return Epochs({number: base for number, base in self.bases.items() if number in self.named - {but}})

    def ceiling(self, epoch: int) -> Order | None:
        """The highest order of that epoch that is not fenced; None where nothing fences it.

        From the newest epoch down: what it goes on from fences everything above, and the epochs between the two are
        left behind with all they said. So an epoch may go on from what an earlier one had fenced.
        """
        lowest: Order | None = None
        for number in sorted(self.bases, reverse=True):
            if number <= epoch:
                break
            if lowest is None or number <= lowest[0]:
                lowest = self.bases[number] if lowest is None else min(lowest, self.bases[number])
        return lowest


SUPERSEDE = "opening a new epoch supersedes it: resume the run, or call Store.open_epoch"


def read_epochs(backend: Backend, branch: str | None = None) -> dict[str, Epochs]:
    """Branch → its epochs. Foreign names are passed over."""
    opened: dict[str, Epochs] = defaultdict(Epochs)
    for name, (owner, number) in _epoch_names(backend, branch).items():
        try:
            opened[owner].bases[number], chosen = _read_base(backend, name)
            if chosen:
                opened[owner].named.add(number)
        except (CorruptionError, FormatError) as error:
            opened[owner].unreadable[number] = error
    return dict(opened)


def newest_epoch(backend: Backend, branch: str) -> int:
    """The highest number that an epoch of `branch` has, readable or not; 0 where none was opened."""
    return max([number for _, number in _epoch_names(backend, branch).values()], default=0)


def _epoch_names(backend: Backend, branch: str | None) -> dict[str, tuple[str, int]]:
    found = {}
    for name in backend.list(layout.EPOCHS if branch is None else f"{layout.EPOCHS}{branch}/"):
        owner, _, digits = name[len(layout.EPOCHS) :].partition("/")
        if digits.isdecimal() and len(digits) < 19 and layout.epoch(owner, int(digits)) == name:
            found[name] = (owner, int(digits))
    return found


def _read_base(backend: Backend, name: str) -> tuple[Order, bool]:
    """What an epoch goes on from, and whether that was named."""
    record = records.decode(backend.get(name, limit=records.MAX_RECORD), records.Epoch, name)
    if layout.epoch(record.branch, record.number) != name:
        raise FormatError(f"{name} holds the record of epoch {record.number} of {record.branch!r}")
    base = SaveName.parse(record.base) if record.base else None
    return (record.base_epoch, base.sequence, base.nonce) if base else (-1, 0, ""), record.chosen


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
            return History(context, marks, tuple(decided), None)
        listed = set(floor.live)
        saves = tuple(save for save in decided if save.sequence >= floor.sequence or str(save) in listed)
        if len(saves) == len(decided) or floor.number == number:
            return History(context, marks, saves, floor)
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


@dataclass(frozen=True, slots=True)
class Tags:
    """Every tag and the snapshot it names; and the tags that cannot be read, which may name any snapshot."""

    named: dict[str, SaveName]
    unreadable: dict[str, Unreadable]

    def of(self, save: SaveName) -> tuple[str, ...]:
        """The tags that `save` is known to have, in order."""
        return tuple(sorted(label for label, named in self.named.items() if named == save))


def read_tags(backend: Backend) -> Tags:
    """Every tag, with a warning for those that cannot be read."""
    tags = Tags({}, {})
    for name in backend.list(layout.TAGS):
        label = name[len(layout.TAGS) :]
        try:
            target = read_tag(backend, label)
        except (CorruptionError, FormatError) as error:
            tags.unreadable[label] = error
            warn(f"tag {label!r} cannot be read and is passed over: {error}; {forget_tag(label)}")
        else:
            if target is not None:
                tags.named[label] = target
    return tags


def read_tag(backend: Backend, label: str) -> SaveName | None:
    """The snapshot that a tag names; None where there is no such tag."""
    name = layout.tag(label)
    data = read_optional(backend, name)
    return None if data is None else SaveName.parse(records.decode(data, records.Tag, name).snapshot)


def forget_tag(label: str) -> str:
    """What to do about a tag that cannot be read."""
    return f"`ckstore tag STORE --delete {label}` forgets it"


def warn(message: str) -> None:
    """Tell that something was passed over."""
    warnings.warn(message, CkstoreWarning, stacklevel=3)
