"""Bringing the packs of an evicted snapshot back (SPEC §14.3).

    pin → announce and copy, as from any storage → read all of it back → `returned`, durable
    → read marks: is a sweep at work? → look at the sizes → withdraw `evicting`

A sweep marks `freeing`, then looks who wants the packs; this says that they are back, then looks for `freeing`, and at
last whether everything is still there. So either the sweep spares them, or this sees that it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckstore import facts
from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, ConflictError, CorruptionError, NotFoundError
from ckstore.format.records import Commit
from ckstore.history import History, read_history, read_marks
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.replicas.copying import Copier
from ckstore.tiers.settling import settle, unbar
from ckstore.tiers.thawing import thaw
from ckstore.tiers.verifying import Verifying


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a pull: where from, and how many bytes. `thawing` objects are asked for and not ready yet: then
    nothing was pulled."""

    save: SaveName
    source: str = ""
    bytes: int = 0
    thawing: tuple[str, ...] = ()


def pull(
    here: Context, others: Sequence[Context], save: SaveName, progress: Progress = silent, *, thawed: bool = False
) -> Pulled:
    """Bring the packs of an evicted snapshot back to `here`, from the first of `others` that holds it; all are checked.

    With `thawed` objects in an archive class are asked for first. `NotFoundError` if the snapshot is not live or on no
    other tier, `ConflictError` while a sweep is at work here or took some of it meanwhile.
    """
    settle(here)
    history = read_history(here)
    commit = _live(here, history, save)
    if save not in history.marks.evicted:
        return Pulled(save)
    source, rest = _holder(others, save)
    if thawed and (asked := thaw(source, commit)):
        return Pulled(save, source.backend.url, thawing=asked)
    with pinned(here.backend, "pull", [save]):  # whoever frees, or evicts, from now on spares it
        copied = Copier(source, here, rest).copy(save, progress, again=True)
        _read_back(here, save, progress)
        bring_back(here, save)
    return Pulled(save, source.backend.url, copied.bytes)


def bring_back(here: Context, save: SaveName) -> None:
    """Say that all of an evicted snapshot is here again. `ConflictError` if a sweep took some of it meanwhile."""
    for nonce in read_marks(here.backend).evicted.get(save, ()):
        facts.add(here, save, f"returned-{nonce}", {})
    if not unbar(here, save):
        raise ConflictError(
            f"packs of snapshot {save.nonce} were freed from {here.backend.url} while they came back; pull it again"
        )


def _live(here: Context, history: History, save: SaveName) -> Commit:
    commit = history.decision(save) if save in history.saves and save not in history.marks.removed else None
    if not isinstance(commit, Commit):
        raise NotFoundError(f"{save.nonce} is no live snapshot at {here.backend.url}")
    return commit


def _holder(others: Sequence[Context], save: SaveName) -> tuple[Context, list[Context]]:
    """The first storage that holds the snapshot, and the rest."""
    said: list[str] = []
    silent_one: BackendError | None = None
    for tier in others:
        try:
            history = read_history(tier)
            _live(tier, history, save)
        except NotFoundError:
            said.append(f"it is not at {tier.backend.url}")
        except CkstoreError as error:
            said.append(f"{tier.backend.url}: {error}")
            silent_one = error if isinstance(error, BackendError) else silent_one
        else:
            if save not in history.marks.evicted:
                return tier, [one for one in others if one is not tier]
            said.append(f"it was evicted from {tier.backend.url}")
    what = f"no tier that answers holds snapshot {save.nonce}: {'; '.join(said) or 'there is no other'}"
    raise BackendError(what, retryable=silent_one.retryable) if silent_one else NotFoundError(what)


def _read_back(here: Context, save: SaveName, progress: Progress) -> None:
    """Check all of it, also what had not gone yet. The snapshot is still evicted here: its marks do not matter."""
    try:
        Verifying(here, despite_eviction=True).verify(save, progress)
    except CorruptionError as error:
        what = f"{error.what}; it stays evicted: `ckstore gc` frees what is there of it, then pull it again"
        raise CorruptionError(what, name=error.name, offset=error.offset) from error
