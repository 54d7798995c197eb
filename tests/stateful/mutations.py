"""The rules of the protocols, each with the change of the real source that switches it off.

A rule is switched off by replacing text in the source of the functions that carry it, so that everything else stays as
it is. A text that is no longer there fails loudly: the rule was rewritten and its mutation must follow.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Edit:
    """In the source of `target` ("module:function" or "module:Class.method"), each first becomes its second."""

    target: str
    changes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, how to switch it off, and the scenario and budget (schedules) in which that must show."""

    name: str
    scenario: str
    budget: int
    edits: tuple[Edit, ...]
    preemptions: int = 0
    """0: random schedules. Otherwise all schedules with at most so many preemptions, fewest first."""


@contextmanager
def switched_off(*edits: Edit) -> Iterator[None]:
    """The engine with these edits, for the duration of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for edit in edits:
            _apply(edit, patch)
        yield


def _apply(edit: Edit, patch: pytest.MonkeyPatch) -> None:
    module_name, _, qualified = edit.target.partition(":")
    module = importlib.import_module(module_name)
    owner_name, _, name = qualified.rpartition(".")
    owner: Any = getattr(module, owner_name) if owner_name else module
    original = inspect.unwrap(vars(owner)[name])
    mutant = _compiled(original, edit, module, name)
    patch.setattr(owner, name, mutant)
    if not owner_name:
        for other in [m for key, m in list(sys.modules.items()) if key.split(".")[0] == "ckstore"]:
            if other is not module and vars(other).get(name) is not None and _same(vars(other)[name], original):
                patch.setattr(other, name, mutant)


def _same(found: object, original: object) -> bool:
    return callable(found) and inspect.unwrap(found) is original


def _compiled(original: Callable[..., Any], edit: Edit, module: ModuleType, name: str) -> Any:
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in edit.changes:
        assert source.count(old) == 1, f"{edit.target} holds {source.count(old)} times:\n{old}\n--- in\n{source}"
        source = source.replace(old, new)
    code = compile(source, f"<{edit.target} mutated>", "exec", __future__.annotations.compiler_flag)
    names: dict[str, Any] = {}
    exec(code, vars(module), names)
    return names[name]



def _edit(target: str, *changes: tuple[str, str]) -> Edit:
    return Edit(f"ckstore.{target}", changes)


def _rule(name: str, scenario: str, *edits: Edit, budget: int = 500, preemptions: int = 0) -> Rule:
    return Rule(name, scenario, budget, edits, preemptions)


_ANNOUNCED_LATE = _edit(
    "announce:announced",
    ("publish(0)\n    renewal = Renewal(publish, every)\n    try:\n        marks = read_marks(backend)\n",
     "marks = read_marks(backend)\n    publish(0)\n    renewal = Renewal(publish, every)\n    try:\n"),
)  # fmt: skip

_TRUSTING = _edit(
    "rank_writer:write",
    ("    known.check_still_there("
     "pack.name for pack in packs if layout.save_of_pack(pack.name) != share.save)\n", ""),
)  # fmt: skip
"""The last look at reused packs hides other faults but for a moment before the commit; on a storage that shows old
listings it is the rule itself."""

RULES = (
    # --- saves
    _rule("a save announces itself, then reads facts", "beside drop", _ANNOUNCED_LATE, _TRUSTING, budget=5000),
    _rule("a save builds on nothing condemned", "beside drop", _edit(
        "announce:announced", ("marks.removed | marks.quarantined | marks.condemned.keys()", "marks.removed")), _edit(
        "saver:_parents", (" | history.marks.condemned.keys()", ""))),
    _rule("an index hit counts only in the closure of an announced parent", "stale index", _edit(
        "known:Known.find",
        ("if written is not None and written.pack in self._sizes:\n            with suppress(*_LOST):\n",
         "if written is not None:\n            with suppress(*_LOST):\n"
         "                self._sizes.setdefault(written.pack, self._context.backend.stat(written.pack))\n"))),
    _rule("packs are durable before the commit record", "reuse", _edit(
        "pack_writer:PackWriter._end_stream",
        ("stream.commit()", "self._backend.__dict__.setdefault('deferred', []).append(stream)")), _edit(
        "saver:_lead",
        ("            commit(context, record)\n",
         "            commit(context, record)\n"
         "            [late.commit() for late in context.backend.__dict__.pop('deferred', [])]\n"))),
    _rule("an announcement stays until its save is decided", "reuse", _edit(
        "announce:announced",
        ("if under.decided or _is_decided(backend, SaveName.parse(record.save)):", "if True:")), _edit(
        "saver:_lead",
        ("            commit(context, record)\n            under.decided = True\n            tagged = _set_tags",
         "        commit(context, record)\n        tagged = _set_tags"))),
    _rule("a run goes on from its own last snapshot only while nothing newer was decided", "going on", _edit(
        "saver:_next_announcement",
        ("if first(context.backend, layout.SNAPSHOTS) != layout.snapshot(last):", "if False:")), budget=300),
    # --- commits
    _rule("a commit is created if absent, not put", "given up", _edit(
        "commit:_create",
        ("created = context.backend.put_if_absent(layout.snapshot(save), records.encode(record))",
         "created = context.backend.put(layout.snapshot(save), records.encode(record)) is None"))),
    _rule("who finds the name taken reads what was decided", "given up", _edit(
        "commit:_create",
        ("elif not isinstance(standing := _standing(context, save), type(record)):",
         "elif False:"))),
    _rule("nobody reports failure before trying ABORT", "network", _edit(
        "commit:_create",
        ("if not _won_after_all(context, save, error):\n            raise\n        created = True", "raise"))),
    _rule("the name of a removed snapshot is never freed", "network", _edit(
        "prune:_remove_unless_named",
        ('facts.add(context, save, "removed", {})', "context.backend.delete(layout.snapshot(save))"))),
    _rule("the name of an aborted save is never freed", "given up", _edit(
        "gc:give_up",
        ("    return result\n",
         "    for late in result.aborted:\n        context.backend.delete(layout.snapshot(late))\n"
         "    return result\n"))),
    # --- saves by several ranks
    _rule("rank 0 commits when every part is done", "ranks alone", _edit(
        "together:gather",
        ("while len(done) < member.world - 1:", "while len(watched) + len(done) < member.world - 1:"),
        ("[done[rank] for rank in range(1, member.world)]", "[done[rank] for rank in sorted(done)]"))),
    _rule("a part is done when its packs are durable", "ranks alone", _edit(
        "pack_writer:PackWriter._end_stream",
        ("stream.commit()", "self._backend.__dict__.setdefault('deferred', []).append(stream)")), _edit(
        "together:take_part",
        ("        return written, _await_commit(context, announcement, member)\n",
         "        [late.commit() for late in context.backend.__dict__.pop('deferred', [])]\n"
         "        return written, _await_commit(context, announcement, member)\n")), _edit(
        "saver:_lead",
        ("                if member is not None:\n                    parts +=",
         "                [late.commit() for late in context.backend.__dict__.pop('deferred', [])]\n"
         "                if member is not None:\n                    parts +="))),
    _rule("a part is done when its manifest is durable", "hasty ranks", _edit(
        "rank_writer:put_manifest",
        ("    if len(data) <= INLINE_BYTES // share.world:", "    if not share.rank:"),
        ("    context.backend.put(layout.manifest(share.save, share.rank), data)\n",
         "    context.backend.__dict__['deferred'] = lambda: context.backend.put(\n"
         "        layout.manifest(share.save, share.rank), data)\n")), _edit(
        "together:take_part",
        ("        return written, _await_commit(context, announcement, member)\n",
         "        found = _await_commit(context, announcement, member)\n"
         "        context.backend.__dict__.pop('deferred')()\n"
         "        return written, found\n")), _edit(
        "together:_complete", ("    if done.manifest.inline is None:", "    if False:")), budget=200),
    _rule("a rank reads facts after it has seen the announcement", "ranks beside drop", _edit(
        "saver:_follow",
        ("    passed: set[SaveName] = set()\n",
         "    passed: set[SaveName] = set()\n"
         "    context.backend.__dict__['early'] = together.read_marks_about(context.backend, ())\n")), _edit(
        "together:take_part",
        ("marks = read_marks_about(context.backend, parents)", "marks = context.backend.__dict__['early']")), _TRUSTING,
        budget=4000),
    _rule("packs of a part that is done are deleted after ABORT only", "hasty ranks", _edit(
        "together:give_up",
        ("    try:\n        aborted = abort(",
         "    try:\n        _delete_own(context, save, own)\n        aborted = abort("))),
    _rule("a rank that gives up a save finds out whether it was committed", "hasty ranks", _edit(
        "together:_committed_after_all", ("    if not aborted:\n", "    if False:\n"))),
    _rule("a rank that fails aborts the save before it says so", "hasty ranks", _edit(
        "together:_committed_after_all",
        ("aborted = give_up(context, save, member.rank, blame, done=done)", "return None"))),
    _rule("what a floor voids after it was committed was a success", "ranks beside floor", _edit(
        "commit:never_counted", (" and save not in read_marks(context.backend).removed", "")), budget=1500),
    _rule("gc clears parts of what was decided away", "ranks given up", _edit(
        "gc:_survey", ("*(name for name in parts if layout.owning_save(name) in decided),", ""))),
    # --- removal
    _rule("a remover condemns, then lists who depends", "beside drop", _edit(
        "prune:drop",
        ("    with _condemned(context, saves, result) as own:\n"
         "        announcers, tags = list_announcers(context.backend), read_tags(context.backend)\n",
         "    announcers, tags = list_announcers(context.backend), read_tags(context.backend)\n"
         "    with _condemned(context, saves, result) as own:\n")), _TRUSTING, preemptions=2, budget=1500),
    _rule("a remover spares what saves and pins name", "beside drop", _edit(
        "prune:_remove_unless_named", ("if dependant is not None:", "if False:"))),
    _rule("a remover spares what a tag names", "tagged drop", _edit(
        "prune:_remove_unless_named", ("elif save in tags.named.values():", "elif False:"))),
    _rule("a prune judges again after it condemned", "by hand", _edit(
        "prune:prune",
        ("    victims = _untried(plan_prune(context, policy, branch).drop,",
         "    plan = plan_prune(context, policy, branch)\n    victims = _untried(plan.drop,"),
        ("        plan = _plan(context, read_history(context), policy, branch, own)\n", ""))),
    _rule("a remover withdraws its own mark only", "forced drop", _edit(
        "prune:finish_condemned",
        ("context.backend.delete(own[save])",
         "[context.backend.delete(name) for name in context.backend.list(layout.marks(save)) if '/condemned' in name]"),
    ), budget=4000),
    _rule("who finishes a removal condemns anew", "withdrawn", _edit(
        "prune:finish_condemned",
        ("    with _condemned(context, waiting, result) as own:\n",
         "    own = dict.fromkeys(waiting, layout.mark(waiting[0], 'none'))\n    if own:\n")),
        budget=800),
    _rule("who finishes a removal spares the last good one", "last one", _edit(
        "prune:_best_of_branches", ("return {found[0] for found in newest if found is not None}", "return set()"))),
    _rule("a prune does not count on what others condemned", "by hand", _edit(
        "prune:facts_of", ("unsafe.add(save)", "pass"))),
    _rule("a drop does not count on what others condemned", "by hand", _edit(
        "prune:drop", ("last = set() if force else _last_of_branches(read_history(context))", "last = set()"))),
    # --- gc
    _rule("facts are read before commits are listed", "beside drop", _edit(
        "history:read_history",
        ("        marks = read_marks(context.backend)\n"
         "        decided = list_saves(context.backend, layout.SNAPSHOTS)\n",
         "        decided = list_saves(context.backend, layout.SNAPSHOTS)\n"
         "        marks = read_marks(context.backend)\n")), _TRUSTING, preemptions=2, budget=800),
    _rule("gc lists packs before saves", "reuse", _edit(
        "gc:give_up",
        ("    remains = _owners(name for house in houses for name in context.backend.list(house))\n"
         "    announcers = list_announcers(context.backend)\n",
         "    announcers = list_announcers(context.backend)\n"
         "    remains = _owners(name for house in houses for name in context.backend.list(house))\n"))),
    _rule("gc lists what is decided before it reads commits", "reuse", _edit(
        "gc:_survey",
        ("    decided = frozenset(list_saves(backend, layout.SNAPSHOTS))\n    history = read_history(context)\n",
         "    history = read_history(context)\n    decided = frozenset(list_saves(backend, layout.SNAPSHOTS))\n"))),
    _rule("gc frees no pack of an undecided save", "reuse", _edit(
        "gc:_survey", ("if layout.owning_save(name) in decided and name not in needed", "if name not in needed"))),
    _rule("what is condemned is needed until it is removed", "reuse", _edit(
        "history:History.commits",
        ("if save in self.marks.removed:", "if save in self.marks.removed or save in self.marks.condemned:"))),
    # --- the floor
    _rule("a floor is proposed before it is raised", "slow", _edit(
        "floor:_raise", ("with _proposed(context, records.Floor(before.number + 1, newest, [])):", "if True:")),
        preemptions=2),
    _rule("a floor stays below what is undecided", "slow", _edit(
        "floor:_raise",
        ("sequence = min([newest, *(save.sequence for save in undecided)])", "sequence = newest"))),
    _rule("a save below a proposed floor takes another name", "slow", _edit(
        "saver:_lead", ("if not floor.stands(context, under):", "if False:"))),
    _rule("proposals are read before the floor", "slow", _edit(
        "floor:stands",
        ("    proposed = _proposed_sequences(context)\n    current = _current(context)\n",
         "    current = _current(context)\n    proposed = _proposed_sequences(context)\n")),
        budget=12_000),
    _rule("who commits reads the floor afterwards", "floors", _edit(
        "commit:_create", ("    _check_floor(context, save, record)\n", ""))),
    _rule("a listing is read again when a floor voids something", "floors", _edit(
        "history:read_history", (" or floor.number == number", " or True")), budget=2000),
    _rule("a record that a floor cleared away is no error", "floors", _edit(
        "history:History.decision", ("if not is_void(read_floor(self.context.backend), save):", "if True:"))),
    # --- repack
    _rule("a save builds on no pack that is being moved", "beside repack", _edit(
        "known:Known._is_whole", ("if pack in self._marks.relocating:", "if False:"))),
    _rule("a repack marks, then lists who depends", "beside repack", _edit(
        "repack:_copy",
        ("    for pack in victims:\n", "    wanted = _wanted_by_others(context, save)\n    for pack in victims:\n"),
        ("    wanted = _wanted_by_others(context, save)\n    if wanted is None", "    if wanted is None")), _TRUSTING,
        budget=3000),
    _rule("two repacks leave each other's packs alone", "two repacks", _edit(
        "repack:_copy", ("    wanted |= _moved_by_others(history, save, now)\n", "")), preemptions=2),
    _rule("a moved pack is marked so before its mark of moving goes", "beside repack", _edit(
        "repack:repack",
        ("    finish(context, save, relocation)\n",
         "    withdraw(context, save, victims)\n    finish(context, save, relocation)\n")), _TRUSTING),
    # --- deltas
    _rule("a closure lists the packs of bases", "deltas", _edit(
        "rank_writer:write",
        ("chunks.closure(places.table.packs)", "chunks.closure(sorted({place.pack for place in places}))"))),
    _rule("a base counts only in the closure of an announced parent", "stale base", _edit(
        "known:Known.may_use",
        (" and all(self._is_sound(base.place) for base in place.chain())", "")), _edit(
        "known:Known.size_of", ("return self._sizes[pack]", "return self._sizes.get(pack, 4096)")), _TRUSTING),
    _rule("a repack moves bases", "deltas beside repack", _edit(
        "repack:_uses", ("range(len(table.chunks))", "range(table.chunks.count)"))),
    # --- epochs, pins, refs
    _rule("an older run is refused", "epochs", _edit(
        "saver:_lead", ("check_epoch(context, request.branch, announcement.epoch)", "pass")), _edit(
        "saver:_announcement", ("if epochs.newest > epoch:", "if False:"))),
    _rule("a record of an older epoch is never latest", "epochs", _edit(
        "history:History.is_fenced", ("return ceiling is not None and order_of(commit) > ceiling", "return False")),
        budget=1500),
    _rule("what an epoch goes on from is pinned", "going back", _edit(
        "takeover:open_epoch", ("[start] if start else []", "[]"))),
    _rule("a pin is published, then facts are read", "going back", _edit(
        "announce:pinned",
        ("    renewal = None\n", "    renewal = None\n    marks = read_marks_about(backend, snapshots)\n"),
        ("yield read_marks_about(backend, snapshots)", "yield marks"))),
    _rule("what a floor voided counts as removed", "cleared away", _edit(
        "history:read_marks_about", ("if is_void(floor, save)", "if False")), preemptions=2, budget=800),
    _rule("a tagger looks again, for condemned too", "stopped tagger", _edit(
        "tags:_put",
        ("refuse_removed(save, marks.removed | marks.condemned.keys())", "refuse_removed(save, marks.removed)")),
        preemptions=2, budget=1500),
    _rule("a restore whose choice was removed resolves anew", "readers", _edit(
        "restorer:_choices", ("removed = isinstance(failed.get(save), NotFoundError)", "removed = False"))),
)  # fmt: skip
