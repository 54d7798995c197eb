"""Refs: how people name a snapshot.

    latest              the newest of branch main (or of the only branch there is)
    123, step:123       the newest of that step
    9f3c, id:9f3c       an id or the first four or more digits of it
    best, tag:best      a tag
    exp, branch:exp     the newest of a branch
    exp@latest, exp@123 within a branch
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckstore.errors import InvalidInputError, NotFoundError
from ckstore.format.records import Commit
from ckstore.history import History, order_of, read_tags
from ckstore.ids import SaveName, check_label

Found = tuple[SaveName, Commit]
MAIN = "main"
BESIDE = ".metadata"
"""How the name of a branch ends that holds notes about another one."""
_HEX = re.compile(r"[0-9a-f]{4,16}\Z")
_STEP = re.compile(r"\d{1,19}\Z")


@dataclass(frozen=True, slots=True)
class Ref:
    """A parsed ref: `kind` is latest, step, id, tag, branch or bare; `branch` narrows it."""

    kind: str
    value: str = ""
    branch: str | None = None

    @property
    def floats(self) -> bool:
        """Whether it means "the newest good one", so that an older snapshot may stand in for a damaged one."""
        return self.kind in ("latest", "branch")


def parse(text: str | int) -> Ref:
    """Read a ref; `InvalidInputError` for what can be none."""
    if not isinstance(text, str | bool):
        with suppress(TypeError):
            text = f"step:{operator.index(text)}"
    if not isinstance(text, str) or not text or len(text) > 220:
        raise InvalidInputError(f"{text!r} is not a ref: use latest, a step, an id, a tag or a branch")
    branch, at, rest = text.rpartition("@")
    within = check_label("branch", branch) if at else None
    if rest == "latest":
        return Ref("latest", branch=within)
    kind, colon, value = rest.partition(":")
    if colon and kind in ("step", "id", "tag", "branch") and value:
        if kind == "step" and not _STEP.match(value):
            raise InvalidInputError(f"{text!r}: a step is a whole number, 0 or more")
        return Ref(kind, check_label(kind, value) if kind in ("tag", "branch") else value, within)
    if colon:
        raise InvalidInputError(f"{text!r} is not a ref: the kinds are step: id: tag: and branch:")
    return Ref("step", rest, within) if _STEP.match(rest) else Ref("bare", rest, within)


def candidates(history: History, ref: Ref) -> Iterator[Found]:
    """The snapshots that `ref` may mean, best first; only a floating ref has more than one. Never empty-handed.

    `NotFoundError` when there is none, `InvalidInputError` when a name is ambiguous.
    """
    ref = settle(history, ref)
    if ref.floats:
        yield from _floating(history, ref)
        return
    yield _one(history, ref)


def settle(history: History, ref: Ref) -> Ref:
    """`ref`, or `branch:` of it if it is a bare name that nothing but a branch has: then it floats."""
    if ref.kind != "bare" or ref.branch or ref.value not in history.branches():
        return ref
    others = _by_tag(history, ref) or (_HEX.match(ref.value) and _by_id(history, ref))
    return ref if others else Ref("branch", ref.value)


def _floating(history: History, ref: Ref) -> Iterator[Found]:
    branch = ref.value or ref.branch or MAIN
    empty = True
    for found in history.candidates(branch):
        empty = False
        yield found
    if not empty:
        return
    branches = history.branches()
    # What is noted beside a branch is none that anybody means by the only one.
    runs = [name for name in branches if not (name.endswith(BESIDE) and name.removesuffix(BESIDE) in branches)]
    if not ref.value and not ref.branch and len(runs) == 1 and runs != [MAIN]:
        yield from _floating(history, Ref("branch", runs[0]))
        return
    aside = sum(1 for save, _ in history.commits(branch) if save in history.marks.quarantined)
    if aside:
        raise NotFoundError(
            f"no good snapshot on branch {branch}: {aside} of its snapshots are quarantined, as they were found "
            "damaged; `ckstore ls` shows them, `ckstore clear` takes one back once it is whole again"
        )
    others = f"; branches with snapshots: {', '.join(branches)}" if branches else "; the store holds no snapshot"
    raise NotFoundError(f"no good snapshot on branch {branch}{others}")


def _one(history: History, ref: Ref) -> Found:
    found = {
        "step": lambda: _by_step(history, ref),
        "id": lambda: _by_id(history, ref),
        "tag": lambda: _by_tag(history, ref),
        "bare": lambda: _by_any_name(history, ref),
    }[ref.kind]()
    if not found:
        _refuse_damaged(history, ref)
        raise NotFoundError(f"no snapshot {ref.value!r}; `ckstore ls` shows what there is")
    if len(found) > 1:
        shown = ", ".join(f"id:{save.nonce} (step {commit.step}, {commit.branch})" for save, commit in found[:8])
        raise InvalidInputError(f"{ref.value!r} is ambiguous; say which: {shown}")
    return found[0]


def _refuse_damaged(history: History, ref: Ref) -> None:
    """Whoever names a snapshot or tag whose record cannot be read is told what is wrong, not that there is none."""
    if ref.kind in ("id", "bare") and _HEX.match(ref.value):
        for save, error in history.damaged.items():
            if save.nonce.startswith(ref.value):
                raise error
    if ref.kind in ("tag", "bare"):
        tags = read_tags(history.context.backend)
        if ref.value in tags.unreadable:
            raise tags.unreadable[ref.value]
        named = tags.named.get(ref.value)
        if named is not None and named in history.damaged:
            raise history.damaged[named]


def _by_step(history: History, ref: Ref) -> list[Found]:
    """The newest of that step that is not fenced or quarantined, else the newest; main comes before other branches."""
    best: dict[str, Found] = {}
    rank: dict[str, tuple[bool, tuple[int, int, str]]] = {}
    for save, commit in history.commits(ref.branch):
        if commit.step != int(ref.value):
            continue
        sound = save not in history.marks.quarantined and not history.is_fenced(commit)
        key = (sound, order_of(commit))
        if commit.branch not in best or key > rank[commit.branch]:
            best[commit.branch], rank[commit.branch] = (save, commit), key
    return [best[MAIN]] if MAIN in best else list(best.values())


def _by_id(history: History, ref: Ref) -> list[Found]:
    if not _HEX.match(ref.value):
        raise InvalidInputError(f"{ref.value!r} is not an id: 4 to 16 hex digits")
    return [found for found in history.commits(ref.branch) if found[0].nonce.startswith(ref.value)]


def _by_tag(history: History, ref: Ref) -> list[Found]:
    named = read_tags(history.context.backend).named.get(ref.value)
    return [found for found in history.commits(ref.branch) if found[0] == named]


def _by_any_name(history: History, ref: Ref) -> list[Found]:
    found = dict(_by_tag(history, ref))
    if not ref.branch and ref.value in history.branches():
        newest = next(history.candidates(ref.value), None)
        found |= [newest] if newest else []
    if _HEX.match(ref.value):
        found |= dict(_by_id(history, ref))
    return list(found.items())
