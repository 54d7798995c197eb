"""Evicting: a storage lets go of the packs of snapshots that a lower tier holds, verified (SPEC §14.2).

    mark `evicting`, durable → list saves and pins, spare what they name → read the history here, above and below
    → look at the sizes below → mark `evicted`, durable → gc frees the packs

Who builds on a snapshot announces that and then reads its marks; this marks and then lists: one of them sees the other.
`evicting` stands for as long as the eviction holds, so that no listing misses both marks. Two evictions that rely on
each other's storage are no danger either: each marks its own and then reads the marks of the other, and one of them
sees it. A repack marks `relocating` and then reads marks; this marks and then looks for that.

Whoever dies leaves `evicting` behind, which costs nothing but reuse; `settling` takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckstore import facts, layout
from ckstore.announce import list_announcers
from ckstore.context import Context
from ckstore.history import History, read_marks
from ckstore.ids import SaveName, new_nonce
from ckstore.tiers.judging import Judge
from ckstore.tiers.settling import settle

Keep = Callable[[History], Mapping[SaveName, str]]
"""From the history of the storage to the snapshots that must stay on it, each with the reason."""


@dataclass(slots=True)
class Eviction:
    """What was evicted, and what was not, each with the reason."""

    evicted: list[SaveName] = field(default_factory=list)
    spared: dict[SaveName, str] = field(default_factory=dict)


def evict(
    here: Context, above: Sequence[Context], below: Sequence[Context], saves: Collection[SaveName], keep: Keep
) -> Eviction:
    """Evict `saves` from `here`; `above` and `below` are the other tiers, the nearest first.

    A snapshot is spared, with the reason, unless every tier above has let go of it and the first one below that has not
    holds it verified. Its packs are freed by gc.
    """
    settle(here)
    result, own = Eviction(), dict[SaveName, str]()
    for save in saves:
        own[save] = new_nonce()
        facts.add(here, save, f"evicting-{own[save]}", {})
    announcers = list_announcers(here.backend)
    judge = Judge(here, above, below, announcers)
    kept = keep(judge.history)
    for save in saves:
        why = kept.get(save) or judge.objection(save)
        if why:
            here.backend.delete(layout.mark(save, f"evicting-{own[save]}"))
            result.spared[save] = why
        else:
            facts.add(here, save, f"evicted-{own[save]}", {})
            result.evicted.append(save)
    _check_stands(here, own, result)
    return result


def _check_stands(here: Context, own: Mapping[SaveName, str], result: Eviction) -> None:
    """Whoever takes this process for dead takes back what it began: then nothing was evicted."""
    open_now = read_marks(here.backend).evicted if result.evicted else {}
    for save in list(result.evicted):
        if own[save] not in open_now.get(save, ()):
            result.evicted.remove(save)
            result.spared[save] = "somebody took it back meanwhile"
