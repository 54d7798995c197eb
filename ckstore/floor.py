"""The floor: clearing away the records of what was removed long ago, so that a store's lists do not grow for ever.

A decided name is never freed, as a suspended writer might take it again. The floor frees many at once: below it, a
record that it does not list is void, whoever creates it and whenever. A writer that commits below it reads the floor
afterwards and fails.

    propose → list saves → list records → floor, durable, created once per number → delete what is void

A writer announces itself and then reads proposals; a floor is proposed before saves are listed: one sees the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckstore import layout, orphans
from ckstore.announce import Announced, list_announcers
from ckstore.commit import abort
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, CorruptionError, FormatError, NoSpaceError
from ckstore.format import records
from ckstore.history import History, is_void, list_saves, read_floor, read_history, read_optional
from ckstore.ids import SaveName, new_nonce
from ckstore.relocation import reachable_packs

WORTH_IT = 64
"""Void records that make it worth raising the floor."""
_ATTEMPTS = 64


def new_name(history: History, nonce: str) -> SaveName:
    """A name for a save or a repack that begins now: above every other that was seen, and above the floor."""
    seen = [*history.saves[:1], *list_saves(history.context.backend, layout.SAVES)[:1]]
    current = _current(history.context) if history.floor is None else history.floor
    return SaveName(max([save.sequence for save in seen] + [current.sequence]) + 1, nonce)


def stands(context: Context, under: Announced) -> bool:
    """Whether a save that was announced before may go on: not below the floor, or one about to be raised.

    The parents that the floor has voided are taken from `under`.
    """
    # Proposals first: one that is withdrawn meanwhile has become the floor.
    proposed = _proposed_sequences(context)
    current = _current(context)
    if SaveName.parse(under.record.save).sequence < max([current.sequence, *proposed]):
        return False
    # Marks may have been cleared away with the records that the floor voids. They were read before it.
    under.parents = tuple(save for save in under.parents if not is_void(current, save))
    return True


def _current(context: Context) -> records.Floor:
    try:
        return read_floor(context.backend)
    except CorruptionError as error:
        hint = "no save begins beside it: put it back from a copy, or delete it while nobody saves"
        raise CorruptionError(f"{error.what}; {hint}", name=error.name) from error


def _proposed_sequences(context: Context) -> list[int]:
    found, unreadable = _read_proposals(context)
    for name, error in unreadable.items():
        hint = "no save begins beside a proposed floor that cannot be read; `ckstore gc` clears it away"
        raise CorruptionError(f"{hint} ({error})", name=name) from error
    return [sequence for _, sequence in found]


def clear_unreadable(context: Context) -> None:
    """Delete proposals that cannot be read. If the author of one is alive, what it voids too much fails loudly."""
    for name in _read_proposals(context)[1]:
        context.backend.delete(name)


def _proposals(context: Context) -> list[tuple[str, int]]:
    return _read_proposals(context)[0]


def _read_proposals(context: Context) -> tuple[list[tuple[str, int]], dict[str, CkstoreError]]:
    """The names and sequences of proposals; and those that cannot be read."""
    found, unreadable = [], dict[str, CkstoreError]()
    for name in context.backend.list(layout.PROPOSED_FLOORS):
        try:
            data = read_optional(context.backend, name)
            if data is not None:
                found.append((name, records.decode(data, records.Floor, name).sequence))
        except (CorruptionError, FormatError) as error:
            unreadable[name] = error
    return found, unreadable


def raise_floor(context: Context, least: int) -> int:
    """Clear away void records if there are at least `least`; how many went. A full disk puts it off."""
    try:
        return _raise(context, least)
    except NoSpaceError:
        return 0


def _raise(context: Context, least: int) -> int:
    history = read_history(context)
    if len(history.saves) < least or len(_spent(history)) < least:
        return 0
    before = read_floor(context.backend)
    newest = max((save.sequence for save in list_saves(context.backend, layout.SNAPSHOTS)), default=0)
    with _proposed(context, records.Floor(before.number + 1, newest, [])):
        undecided = _undecided(context)
        sequence = min([newest, *(save.sequence for save in undecided)])
        history = read_history(context)
        spent = {save for save in _spent(history) if save.sequence < sequence}
        if any(save not in history.marks.removed for save in history.damaged):
            return 0  # what cannot be read may need anything
        live = [save for save in history.saves if save.sequence < sequence and save not in spent]
        floor = records.Floor(before.number + 1, sequence, sorted(map(str, live)))
        if (sequence, floor.live) == (before.sequence, before.live) or sequence < before.sequence:
            return 0  # nothing more would be void
        if not context.backend.put_if_absent(
            layout.floor(floor.number), records.encode(floor)
        ):
            return 0
        return clear_away(context, floor)


@contextmanager
def _proposed(context: Context, floor: records.Floor) -> Iterator[None]:
    """Propose `floor` while the block runs."""
    proposal = layout.proposed_floor(new_nonce())
    # Durable: a proposal torn by a power cut could be read by nobody, and no save may begin beside one of those.
    context.backend.put(proposal, records.encode(floor))
    try:
        yield
    finally:
        with suppress(CkstoreError):
            context.backend.delete(proposal)


def raise_to(context: Context, sequence: int) -> records.Floor:
    """Set a floor at `sequence` that lists everything live; what is below and not listed is void from then on.

    Saves under way below it are given up. Where a floor as high is there already, that one is the answer. Nothing is
    cleared away: that a snapshot was removed is still told to storages that hold it. `ConflictError` if others keep
    raising floors.
    """
    for _ in range(_ATTEMPTS):
        before = read_floor(context.backend)
        if before.sequence >= sequence:
            return before
        with _proposed(context, records.Floor(before.number + 1, sequence, [])):
            # Who announced a save before may not know of the proposal: then it is decided now, one way or the other.
            for save in _undecided(context):
                if save.sequence < sequence:
                    abort(context, save, "another storage became the authority")
            floor = records.Floor(before.number + 1, sequence, _listed(context, sequence))
            created = context.backend.put_if_absent(layout.floor(floor.number), records.encode(floor))
        if created:
            return floor
    raise ConflictError(f"others keep raising the floor of {context.backend.url}; try again")


def _listed(context: Context, sequence: int) -> list[str]:
    """The saves below `sequence` that a floor there has to list.

    One whose record cannot be read is among them, and then every repack, as it may need any.
    """
    history = read_history(context)
    spent = set(_spent(history))
    if any(save not in history.marks.removed for save in history.damaged):
        spent = {save for save in spent if not isinstance(history.decision(save), records.Relocation)}
    return sorted(str(save) for save in history.saves if save.sequence < sequence and save not in spent)


def _spent(history: History) -> list[SaveName]:
    """Decided saves that nothing needs and nothing ever will: aborted, removed, or a repack that leads nowhere.

    A repack of what a repack wrote leaves the first one without packs, but on the way from a manifest to its frames.
    """
    found, reached = [], reachable_packs(history) | orphans.needed_packs(history.context)
    for save in history.saves:
        decision = history.decision(save)
        leads_nowhere = isinstance(decision, records.Relocation) and not any(m.old in reached for m in decision.moved)
        if save in history.marks.removed or isinstance(decision, records.Abort) or leads_nowhere:
            found.append(save)
    return found


def _undecided(context: Context) -> list[SaveName]:
    decided = set(list_saves(context.backend, layout.SNAPSHOTS))
    return [one.save for one in list_announcers(context.backend) if one.save and one.save not in decided]


def clear_away(context: Context, floor: records.Floor) -> int:
    """Delete records that `floor`, the newest, voids, and the facts about them; how many records.

    A save that still has packs keeps its record, void as it is.
    """
    backend = context.backend
    listed = {SaveName.parse(save) for save in floor.live}
    houses = (layout.PACKS, layout.MANIFESTS, layout.PARTS)
    holding = {save for house in houses for save in list_saves(backend, house)}
    deleted = 0
    for save in list_saves(backend, layout.SNAPSHOTS):
        if save.sequence < floor.sequence and save not in listed and save not in holding:
            deleted += backend.delete(layout.snapshot(save))
            context.decisions.pop(save, None)
    kept = {*list_saves(backend, layout.SNAPSHOTS), *holding}
    # Where a pack went must be known as long as somebody may look for it at its old place.
    kept |= {layout.save_of_pack(one.old) for _, move in read_history(context).relocations() for one in move.moved}
    for save in list_saves(backend, layout.MARKS):
        if save.sequence < floor.sequence and save not in kept:
            for name in backend.list(layout.marks(save)):
                backend.delete(name)
    for older in backend.list(layout.FLOORS):
        if older < layout.floor(floor.number):
            backend.delete(older)
    for name, sequence in _proposals(context):
        if sequence <= floor.sequence:  # this floor refuses whatever that proposal would; its author may have died
            backend.delete(name)
    return deleted
