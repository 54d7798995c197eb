"""Removing snapshots, beside writers and readers, without a lock.

    condemn → list saves and pins, spare what they or tags name → list commit records, make them durable
    → `removed`, durable

Whoever depends on a snapshot publishes that and then reads its marks; a remover publishes `condemned` and then lists:
one of them sees the other. Tests switch off each arrow in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from ckstore import facts, layout, retention
from ckstore.announce import EPOCH, PATIENCE_SECONDS, Announcer, Patience, list_announcers
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, NoSpaceError, NotFoundError
from ckstore.format import records
from ckstore.history import History, Order, Tags, order_of, read_history, read_marks, read_tags
from ckstore.ids import SaveName, new_nonce
from ckstore.meta import decode_meta
from ckstore.process import Owner, current_owner
from ckstore.retention import Facts, Retention

TAGGED = "tagged"
PERHAPS_TAGGED = "a tag that cannot be read may name it"
LAST = "the last good snapshot of its branch"
_NAMED = (TAGGED, PERHAPS_TAGGED)


@dataclass(slots=True)
class Removal:
    """What prune did: which snapshots stay and by which rules, which went, which are spared for now and for whom."""

    keep: dict[SaveName, tuple[str, ...]] = field(default_factory=dict)
    removed: list[SaveName] = field(default_factory=list)
    spared: dict[SaveName, str] = field(default_factory=dict)
    tried: set[SaveName] = field(default_factory=set)


def plan_prune(context: Context, policy: Retention, branch: str | None = None) -> retention.Plan:
    """What `policy` keeps and drops as things stand now. Changes nothing."""
    return _plan(context, read_history(context), policy, branch)


def prune(
    context: Context,
    policy: Retention,
    branch: str | None = None,
    most: int | None = None,
    so_far: Removal | None = None,
) -> Removal:
    """Remove what `policy` does not keep, at most so many of them. Their bytes are freed by gc.

    With `so_far`, go on from there: what was tried is left alone, and all that is done is added to it, also when this
    raises for want of space; what was not done then is as if it had not been tried.
    """
    result = Removal() if so_far is None else so_far
    victims = _untried(plan_prune(context, policy, branch).drop, most, result)
    with _condemned(context, victims, result) as own:
        announcers, tags = list_announcers(context.backend), read_tags(context.backend)
        plan = _plan(context, read_history(context), policy, branch, own)
        result.keep = dict(plan.keep)
        _make_durable(context)
        for save in victims:
            wanted = save not in plan.drop
            spared = "" if wanted else _remove_unless_named(context, save, announcers, tags, result)
            # One spared for a save or a reader stays condemned: the policy does not want it, and gc takes it later.
            # Not where there is too little room for that, nor what an epoch may make the newest of its branch.
            if wanted or spared in _NAMED or spared.startswith(EPOCH) or (spared and most is not None):
                context.backend.delete(own[save])
    result.spared = {save: why for save, why in result.spared.items() if save not in plan.keep}
    return result


def drop(context: Context, saves: Collection[SaveName], force: bool = False) -> Removal:
    """Remove these snapshots, whatever any policy says, unless somebody depends on them or a tag names them.

    The last good one of a branch only with `force`. Others that are condemned are as good as gone: two removers at
    once must not each rely on what the other one takes.
    """
    result = Removal()
    with _condemned(context, saves, result) as own:
        announcers, tags = list_announcers(context.backend), read_tags(context.backend)
        last = set() if force else _last_of_branches(read_history(context))
        _make_durable(context)
        for save in saves:
            if save in last:
                result.spared[save] = LAST
            if save in last or _remove_unless_named(context, save, announcers, tags, result):
                context.backend.delete(own[save])
    return result


def finish_condemned(
    context: Context,
    patience: float = PATIENCE_SECONDS,
    most: int | None = None,
    so_far: Removal | None = None,
) -> Removal:
    """Go on where a prune stopped: remove what is condemned, unless it is named or its branch has nothing better.

    What a remover condemned that still works is its own affair. Each remover publishes a mark of its own, as another's
    may be withdrawn at any time. `most` and `so_far` as in `prune`.
    """
    result = Removal() if so_far is None else so_far
    abandoned = _abandoned(context, patience)
    waiting = _untried(abandoned, most, result)
    if not waiting:
        return result
    with _condemned(context, waiting, result) as own:
        announcers, tags = list_announcers(context.backend), read_tags(context.backend)
        history = read_history(context)
        last = _best_of_branches(history, {save: [own[save], *abandoned[save]] for save in waiting})
        _make_durable(context)
        for save in waiting:
            if save in last:
                result.spared[save] = LAST
            absent = save not in history.saves
            if save in last or absent or _remove_unless_named(context, save, announcers, tags, result):
                context.backend.delete(own[save])
            if result.spared.get(save) in (*_NAMED, LAST):
                # Nobody relies any more on what the dead condemned.
                for name in abandoned[save]:
                    context.backend.delete(name)
    return result


def _untried(saves: Iterable[SaveName], most: int | None, so_far: Removal) -> list[SaveName]:
    """The next of `saves` to be tried, at most so many; from now on they count as tried."""
    found = [save for save in saves if save not in so_far.tried][:most]
    so_far.tried.update(found)
    return found


def _abandoned(context: Context, patience: float) -> dict[SaveName, list[str]]:
    """Condemned snapshots that nobody removes any more, each with the marks of authors that are certainly gone.

    A mark is abandoned when its author is gone, is this process, cannot be read (a power cut may leave it so), or has
    left it standing for `patience` seconds.
    """
    marks = read_marks(context.backend)
    authors = []
    for save, nonces in marks.condemned.items():
        for nonce in nonces if save not in marks.removed else ():
            name = layout.mark(save, f"condemned-{nonce}")
            authors.append(Announcer(name, save, frozenset(), _author(context, name), 0))
    given_up = Patience(context.cache / "condemned", context.monotonic, patience).exhausted(authors)
    found: dict[SaveName, list[str]] = {}
    for one in authors:
        if one.save is not None and (one.owner in (None, current_owner()) or one.name in given_up):
            gone = found.setdefault(one.save, [])
            gone += [one.name] if one.owner is not None and one.owner.is_gone() else []
    return found


def _author(context: Context, mark: str) -> Owner | None:
    try:
        return facts.read(context, mark).by
    except (CorruptionError, FormatError, NotFoundError):
        return None


def _make_durable(context: Context) -> None:
    """A commit, epoch or fact that was listed may not be durable yet, and others are about to be removed because of it.

    After the listing, not before it: one that became visible in between would be relied on and could still be lost.
    """
    for house in (layout.SNAPSHOTS, layout.EPOCHS, layout.MARKS):
        context.backend.sync(house)


@contextmanager
def _condemned(context: Context, saves: Iterable[SaveName], result: Removal) -> Iterator[dict[SaveName, str]]:
    """Condemn `saves` and yield the marks' names.

    Where there is no room to go on, those of what is not settled yet are withdrawn. In the end withdrawals are made
    durable: a mark that a power cut brought back would have gc finish a removal.
    """
    own: dict[SaveName, str] = {}
    try:
        condemn(context, saves, own)
        yield own
    except NoSpaceError:
        with suppress(BackendError):
            for save in own.keys() - set(result.removed) - result.spared.keys():
                context.backend.delete(own[save])
            context.backend.sync(layout.MARKS)
        result.tried = {*result.removed, *result.spared}
        raise
    if not own.keys() <= set(result.removed):
        context.backend.sync(layout.MARKS)


def condemn(context: Context, saves: Iterable[SaveName], own: dict[SaveName, str]) -> None:
    """Publish that `saves` are about to be removed: no save may build on them from now on.

    The marks' names are added to `own`, also when this raises half-way.
    """
    nonce = new_nonce()
    for save in saves:
        own[save] = facts.add(context, save, f"condemned-{nonce}", {}, durable=False)


def _remove_unless_named(
    context: Context, save: SaveName, announcers: list[Announcer], tags: Tags, result: Removal
) -> str:
    """Remove a condemned snapshot unless somebody depends on it or it is tagged; then the reason, else nothing."""
    dependant = next((announcer for announcer in announcers if announcer.depends_on(save)), None)
    if dependant is not None:
        result.spared[save] = dependant.purpose
    elif save in tags.named.values():
        result.spared[save] = TAGGED
    elif tags.unreadable:
        result.spared[save] = PERHAPS_TAGGED
    else:
        facts.add(context, save, "removed", {})
        result.removed.append(save)
    return result.spared.get(save, "")


def _best_of_branches(history: History, without: Mapping[SaveName, list[str]]) -> set[SaveName]:
    """For each branch the snapshot that `latest` means `without` these marks.

    The dead may have condemned what an epoch then went on from. Where all good ones are condemned it is one of them.
    """
    gone = {save: {name.rpartition("-")[2] for name in names} for save, names in without.items()}
    left = {save: nonces - gone.get(save, set()) for save, nonces in history.marks.condemned.items()}
    marks = replace(history.marks, condemned={save: nonces for save, nonces in left.items() if nonces})
    alive = History(history.context, marks, history.saves)
    newest = (next(alive.candidates(branch), None) for branch in alive.branches())
    return {found[0] for found in newest if found is not None}


def _last_of_branches(history: History) -> set[SaveName]:
    """The good snapshots of branches of which all good ones are condemned."""
    last: set[SaveName] = set()
    for branch in history.branches():
        good = {save for save, _ in history.candidates(branch)}
        if good <= history.marks.condemned.keys():
            last |= good
    return last


def _plan(
    context: Context,
    history: History,
    policy: Retention,
    branch: str | None,
    own: Mapping[SaveName, str] | None = None,
) -> retention.Plan:
    history.refuse_unreadable_epochs(branch)
    known = facts_of(history, read_tags(context.backend).named, own or {})
    return retention.plan([one for one in known if branch in (None, one.branch)], policy, context.now())


def facts_of(history: History, tags: dict[str, SaveName], own: Mapping[SaveName, str]) -> list[Facts]:
    """What retention needs to know of every live snapshot. What is condemned by others than `own` marks (snapshot →
    name of the mark) does not count as whole: nothing may be removed for its sake."""
    unsafe = set(history.marks.quarantined)
    for save, nonces in history.marks.condemned.items():
        if nonces - {own[save].rpartition("-")[2] if save in own else ""}:
            unsafe.add(save)
    awaited = {history.left_behind(branch, base) for branch, base in _newest_orders(history).items()}
    labels: dict[SaveName, list[str]] = {}
    for label, save in tags.items():
        labels.setdefault(save, []).append(label)
    return [
        Facts(
            save=save,
            branch=commit.branch,
            order=order_of(commit),
            step=commit.step,
            created=commit.created,
            whole=save not in unsafe,
            fenced=history.is_fenced(commit),
            awaited=save in awaited,
            tags=tuple(sorted(labels.get(save, ()))),
            metrics=_numbers(commit),
        )
        for save, commit in history.commits()
    ]


def _newest_orders(history: History) -> dict[str, Order]:
    """Branch → the order of what `latest` means there."""
    found = {branch: next(history.candidates(branch), None) for branch in history.branches()}
    return {branch: order_of(newest[1]) if newest else (-1, 0, "") for branch, newest in found.items()}


def _numbers(commit: records.Commit) -> dict[str, float]:
    try:
        meta = decode_meta(commit.meta)
    except CkstoreError:
        return {}
    return {key: float(value) for key, value in meta.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune did, or with `dry_run` would do: snapshot ids, why each stays or is spared, and bytes freed."""

    kept: dict[str, tuple[str, ...]]
    removed: tuple[str, ...]
    spared: dict[str, str]
    freed_bytes: int = 0
    dry_run: bool = False


def report(removal: Removal, freed_bytes: int) -> PruneReport:
    """A removal in the words of people."""
    return PruneReport(
        {save.nonce: reasons for save, reasons in removal.keep.items()},
        tuple(save.nonce for save in removal.removed),
        {save.nonce: why for save, why in removal.spared.items()},
        freed_bytes,
    )


def report_plan(plan: retention.Plan) -> PruneReport:
    """What would be removed if nobody depended on it."""
    kept = {save.nonce: reasons for save, reasons in plan.keep.items()}
    return PruneReport(kept, tuple(save.nonce for save in plan.drop), {}, dry_run=True)
