"""Live snapshots whose packs were evicted from a storage (SPEC §14): where they are read, what need not be here, and
what is just going."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckstore import facts, layout, sources
from ckstore.announce import Announcer, Patience, pinned
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, NotFoundError
from ckstore.history import Marks, read_history, read_marks
from ckstore.ids import SaveName, digest
from ckstore.process import Owner
from ckstore.relocation import Relocations


@contextmanager
def holding(context: Context, save: SaveName, marks: Marks, purpose: str) -> Iterator[tuple[Context, Marks]]:
    """The storage from which the packs of a snapshot are read while the block runs, and its facts.

    It is `context`, with `marks`, unless the snapshot was evicted there: then the first of the others that holds it,
    where it is pinned, and what that one lacks is read from the rest. `BackendError` where none gives it.
    """
    if save not in marks.evicted:
        yield context, marks
        return
    with ExitStack() as pins:
        yield _nearest(context, save, purpose, pins)


def _nearest(context: Context, save: SaveName, purpose: str, pins: ExitStack) -> tuple[Context, Marks]:
    said, others = [], list(sources.others(context))
    for other in others:
        try:
            marks = sources.ask(other, lambda there: pins.enter_context(pinned(there.backend, purpose, [save])))
            if save in marks.evicted or save in marks.removed:
                said.append(f"it is not at {other.backend.url} either")
                continue
            other.backend.stat(layout.snapshot(save))
        except NotFoundError:
            said.append(f"it is not at {other.backend.url} either")
        except CkstoreError as error:
            said.append(f"{other.backend.url}: {error}")
        else:
            rest = [one for one in others if one is not other]
            return replace(other, others=rest, broken={}), marks
    why = "; ".join(said) or "its other storages are not known here"
    raise BackendError(f"snapshot {save.nonce} was evicted from {context.backend.url}, and cannot be read: {why}")


def unneeded_packs(context: Context) -> frozenset[str]:
    """Packs whose absence here is no damage: their frames stand in others, or only evicted snapshots need them.

    One request where nothing was evicted.
    """
    marks = read_marks(context.backend)
    if not marks.evicted:
        return marks.relocated
    history = read_history(context)
    moves = Relocations(context, history.marks.relocated)
    away = {
        pack.name
        for save, commit in history.commits()
        if save in history.marks.evicted
        for pack in (*commit.packs, *moves.packs(commit.packs))
    }
    here = {pack.name for _, commit in history.held() for pack in (*commit.packs, *moves.packs(commit.packs))}
    return history.marks.relocated | (away - here)


def being_freed(context: Context, marks: Marks) -> frozenset[SaveName]:
    """Evicted snapshots of which a sweep frees packs now: what is there of them may be gone in a moment.

    The marks of sweeps that are gone, or have stood still for long, are withdrawn. Costs nothing where there are none.
    """
    sweeps = [
        Announcer(name, save, frozenset(), author_of(context, name), 0)
        for save, nonces in marks.freeing.items()
        for name in (layout.mark(save, f"freeing-{nonce}") for nonce in nonces)
    ]
    if not sweeps:
        return frozenset()
    apart = context.cache / "freeing" / digest(context.backend.url.encode())[:8].hex()
    gone = Patience(apart, context.monotonic).exhausted(sweeps)
    for name in gone:
        context.backend.delete(name)
    return frozenset(one.save for one in sweeps if one.save is not None and one.name not in gone)


def author_of(context: Context, mark: str) -> Owner | None:
    """Who put a mark; None where it is gone, or does not say."""
    try:
        return facts.read(context, mark).by
    except (CorruptionError, FormatError, NotFoundError):
        return None
