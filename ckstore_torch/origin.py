"""What a run may go on from: the newest good snapshot of its branch, or one that somebody named."""

from __future__ import annotations

import operator
from contextlib import suppress

from ckstore import Store
from ckstore.errors import InvalidInputError, NotFoundError

_CONDITIONS = {
    "fenced": "left behind by a newer run that saved nothing; resume(ref=...) with its id goes on from it",
    "quarantined": "quarantined as damaged; `ckstore clear` takes it back once it is repaired",
    "condemned": "being removed",
}
"""Why a snapshot is not `latest`, and what to do."""


def is_there(store: Store, branch: str, epoch: int | None) -> bool:
    """Whether the branch holds something to restore; `NotFoundError` if all that it holds can never be `latest`.

    `epoch` is that of the run, if it has opened one.
    """
    infos = store.snapshots(branch=branch)
    states = {info.state for info in infos}
    if infos and not states & {"ok", "condemned"}:
        newest = next((info for info in infos if info.state == "fenced"), infos[0])
        raise NotFoundError(
            f"no good snapshot on branch {branch}, though it holds {len(infos)}: the newest, step "
            f"{newest.step} (id:{newest.id}), is {_CONDITIONS[newest.state]}; another branch= starts a new run"
        )
    if not infos and epoch not in (None, 1) and (unreadable := store.status().unreadable):
        raise NotFoundError(
            f"branch {branch} was written before, but none of its snapshots is found, and the records of "
            f"{', '.join(unreadable)} cannot be read: one of them may be its own; `ckstore drop` removes them, "
            "another branch= starts a new run"
        )
    return bool(states - {"condemned"})


def named(store: Store, ref: str | int, branch: str) -> str:
    """The id of the snapshot that `ref` means, from which a run on `branch` may go on.

    A step and `latest` are looked for on `branch`, unless the ref says another. `NotFoundError` for none, and for one
    that is damaged or being removed; `InvalidInputError` for one of another branch, if this one has its own.
    """
    info = store.resolve(_within(ref, branch))
    if info.state in ("quarantined", "condemned"):
        raise NotFoundError(
            f"{ref!r} is step {info.step} of branch {info.branch} (id:{info.id}), which is {_CONDITIONS[info.state]}"
        )
    if info.branch != branch and store.snapshots(branch=branch):
        raise InvalidInputError(
            f"{ref!r} is a snapshot of branch {info.branch}, and branch {branch} has snapshots of its own: resume() "
            "goes on with those, and another branch= can begin from that one"
        )
    return info.id


def _within(ref: str | int, branch: str) -> str | int:
    """`ref`, with `branch` where it names a step or `latest` and does not say of which."""
    text = ref
    if not isinstance(text, str | bool):
        with suppress(TypeError):
            text = str(operator.index(text))
    if isinstance(text, str) and (text == "latest" or text.removeprefix("step:").isdecimal()):
        return f"{branch}@{text}"
    return ref
