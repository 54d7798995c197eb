"""Opening an epoch: a run takes over a branch, going on from a snapshot, and shuts out the runs before it.

    number → base, pinned → epoch, created once per number → what was saved or removed meanwhile? → again, or done

The number is read first: whoever opens an epoch after that makes the base be chosen anew. What an older run had
acknowledged before the epoch was there must not be left behind by it, and what the epoch goes on from must stay the
newest, though a prune that does not know of the epoch yet may think otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from ckstore import facts, layout
from ckstore.announce import EPOCH, pinned
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError
from ckstore.format import records
from ckstore.history import newest_epoch, read_decision, read_history
from ckstore.ids import SaveName
from ckstore.process import current_owner
from ckstore.tags import refuse_removed

_ATTEMPTS = 64


def open_epoch(context: Context, branch: str, base: Callable[[], SaveName] | None = None) -> int:
    """Open the next epoch of `branch`; its number. `base` finds what it goes on from, by default the newest."""
    behind: SaveName | None = None
    lost: ConflictError | None = None
    for _ in range(_ATTEMPTS):
        number = newest_epoch(context.backend, branch) + 1
        start = behind or (_newest(context, branch) if base is None else base())
        with pinned(context.backend, f"{EPOCH}{branch}", [start] if start else []) as marks:
            gone = marks.removed | marks.condemned.keys()
            if start is not None and base is not None:
                refuse_removed(start, gone)
            elif start in gone and (behind or start != _newest(context, branch)):
                behind = None
                continue
            if not _create(context, branch, number, start, chosen=base is not None):
                behind = None
                continue
            removed, behind = _meanwhile(context, branch, number, start)
            if removed and (base is not None or behind is None):
                what = f"epoch {number} of {branch} is open, but what it goes on from was removed meanwhile"
                lost, base = ConflictError(what), None
            if base is None and behind is not None:
                continue
            if lost is not None:
                raise lost
            return number
    raise ConflictError(f"other runs keep taking over branch {branch}; see which of them should stop")


def _create(context: Context, branch: str, number: int, start: SaveName | None, *, chosen: bool) -> bool:
    """Open epoch `number`, going on from `start`; False if another run took its number."""
    record = records.Epoch(
        branch=branch,
        number=number,
        base=str(start) if start else None,
        base_epoch=_epoch_of(context, start) if start else -1,
        owner=current_owner(),
        chosen=chosen,
    )
    return context.backend.put_if_absent(layout.epoch(branch, number), records.encode(record))


def _meanwhile(context: Context, branch: str, number: int, start: SaveName | None) -> tuple[bool, SaveName | None]:
    """Whether `start` was removed before epoch `number` was opened; and the newest that older runs saved since.

    That must not be left behind: it was acknowledged, and `start` may be gone because it was there.
    """
    history = read_history(context)
    superseded = history.epochs(branch).newest > number
    removed = start is not None and (start in history.marks.removed or start not in history.saves)
    if start is not None and not removed:
        _withdraw_of_the_dead(context, start, history.marks.condemned.get(start, frozenset()))
    base = history.epochs(branch).bases.get(number)
    return removed, None if superseded or base is None else history.left_behind(branch, base, but=number)


def _withdraw_of_the_dead(context: Context, save: SaveName, nonces: Collection[str]) -> None:
    """What they condemned is `latest` again with that. The living see the pin, or the epoch, by themselves."""
    for nonce in nonces:
        name = layout.mark(save, f"condemned-{nonce}")
        with suppress(CkstoreError):
            if facts.read(context, name).by.is_gone():
                context.backend.delete(name)


def _newest(context: Context, branch: str) -> SaveName | None:
    found = next(read_history(context).candidates(branch), None)
    return found[0] if found else None


def _epoch_of(context: Context, save: SaveName) -> int:
    decision = read_decision(context, save)
    assert isinstance(decision, records.Commit)
    return decision.epoch
