"""Recorded runs, each of which does one thing to a store: what the crash states are enumerated of."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from ckstore import pack_writer, rank_writer
from ckstore.backend.fs import Fs
from ckstore.errors import BackendError, SaveFailedError
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.testing.faults import Fault, FaultyFs
from tests.crash.ranks import Outcome, save_together
from tests.crash.world import Died, Host, MortalFs, Run, state_of

Scenario = Callable[[Host], Run]
Operation = Callable[[Run, Fs], None]


def _stored(host: Host, steps: range) -> Run:
    """A store with a snapshot of each of `steps`, all durable."""
    run = Run(host)
    run.init()
    for step in steps:
        run.save(step)
    return run.settled()


def init(host: Host) -> Run:
    run = Run(host)
    run.init()
    return run


def first_save(host: Host) -> Run:
    run = _stored(host, range(0))
    run.save(1)
    return run


def second_save(host: Host) -> Run:
    run = _stored(host, range(1, 2))
    run.save(2)
    return run


def tenth_save(host: Host) -> Run:
    """With a manifest of its own, tags, and another branch to build on."""
    run = Run(host)
    run.init()
    for step in range(1, 9):
        run.save(step)
    run.save(9, branch="trial", tags=["best"])
    for old in list(run.infos)[:6]:
        run.drop(old)
    run.gc()
    run = run.settled()
    with limits(INLINE_BYTES=0):
        run.save(10, tags=["best", "tenth"], meta={"loss": 0.5})
    return run


def same_step_again(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.save(2, state=state_of(2, salt=7))
    return run


def full_save(host: Host) -> Run:
    """Two packs and a manifest of its own."""
    run = _stored(host, range(1, 2))
    with limits(INLINE_BYTES=0, PACK_SIZE=1000):
        run.save(2, full=True)
    return run


def failed_save(host: Host) -> Run:
    """The commit record cannot be linked: the save leaves an ABORT and takes its packs back."""
    run = _stored(host, range(1, 2))
    fs = FaultyFs(run.fs, Fault("link", 1, OSError(errno.EIO, "injected")))
    run.begin_process(fs)
    with pytest.raises(BackendError), limits(INLINE_BYTES=0):
        run.save(2)
    fs.faults.assert_fired()
    return run


def repack(host: Host) -> Run:
    """gc gives what is left of a pack to a new one."""
    run = _stored(host, range(0))
    with limits(PACK_SIZE=64 << 10):
        run.save(1, state={"left": _noise(1, 1000), "gone": _noise(2, 30_000)})
    run.save(2, state={"left": _noise(1, 1000), "new": _noise(3, 3000)})
    run.save(3, state={"left": _noise(1, 1000), "new": _noise(4, 3000)})
    run.drop(run.nth(0))
    run = run.settled()
    run.gc()
    assert "relocated-" in "".join(run.fs.tree())
    return run


def delta_save(host: Host) -> Run:
    """Deltas on top of each other, two packs and a manifest of its own; one base is needed by no other snapshot."""
    run = _deltas(host)
    with limits(INLINE_BYTES=0, PACK_SIZE=1000):
        run.save(4, state=_moved(4))
    commit, _ = run.store._find(4)
    table = read_manifest(run.store._context, SaveName.parse(commit.save), commit.manifests[0])
    assert [place.depth for place in table.locations] == [2, 2]
    return run


def prune_of_bases(host: Host) -> Run:
    """What is left needs packs of what is removed, and no more of it than that."""
    run = _deltas(host)
    run.prune(keep_last=1)
    return run


def repack_of_bases(host: Host) -> Run:
    """gc gives the bases that are left of a pack to a new one."""
    run = _deltas(host)
    run.drop(run.nth(0))
    run = run.settled()
    run.gc()
    assert "relocated-" in "".join(run.fs.tree())
    return run


def _deltas(host: Host) -> Run:
    run = Run(host)
    run.profile = "compact"
    run.init()
    with limits(PACK_SIZE=64 << 10):
        run.save(1, state={**_moved(1), "gone": _noise(2, 30_000)})
    run.save(2, state=_moved(2))
    return run.settled()


def _moved(step: int) -> dict[str, Any]:
    """Two tensors of noise that each step moves by little."""
    return {"w": _noise(1, 3000) ^ np.uint8(step), "v": np.random.default_rng(3).integers(0, 2**60, 500) + step}


def _noise(seed: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def prune(host: Host) -> Run:
    run = _stored(host, range(1, 5))
    run.tag("kept", run.nth(0))
    run = run.settled()
    run.prune(keep_last=2)
    return run


def drop(host: Host) -> Run:
    run = _stored(host, range(1, 4))
    run.drop(run.nth(1))
    return run


def gc_after_kill(host: Host) -> Run:
    """gc gives up a save that was killed after its packs were written, and finishes a prune that was killed."""
    run = _stored(host, range(1, 3))
    with limits(INLINE_BYTES=0):
        _killed_when(run, "/snapshots/", lambda: run.save(3))
    _killed_when(run, "/removed", lambda: run.prune(keep_last=1))
    run = run.settled()
    run.gc()
    return run


def floor(host: Host) -> Run:
    run = _stored(host, range(1, 5))
    run.prune(keep_last=2)
    run = run.settled()
    run.raise_floor()
    return run


def tag(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.tag("best", run.nth(0))
    return run


def tag_moved(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.tag("best", run.nth(0))
    run = run.settled()
    run.tag("best", run.nth(1))
    return run


def untag(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.tag("best", run.nth(0))
    run.tag("other", run.nth(0))
    run = run.settled()
    run.untag("best")
    return run


def open_epoch(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.open_epoch()
    return run


def next_epoch(host: Host) -> Run:
    """A run takes over from a snapshot before the newest, and saves."""
    run = _stored(host, range(1, 4))
    run.open_epoch()
    run = run.settled()
    run.open_epoch(base=run.nth(1))
    run.save(3, state=state_of(3, salt=1))
    return run


def quarantine(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.quarantine(run.nth(1))
    return run


def clear(host: Host) -> Run:
    run = _stored(host, range(1, 3))
    run.quarantine(run.nth(1))
    run = run.settled()
    run.clear(run.nth(1))
    return run


def prune_beside_unsynced_commit(host: Host) -> Run:
    """A writer was stopped just after it made its commit visible; prune takes that for the newest snapshot."""
    run = _stored(host, range(1, 3))
    _killed_when(run, "/snapshots", lambda: run.save(3), verb="fsync", at=1)
    run.adopt_listed()
    run.prune(keep_last=1)
    return run


def untag_beside_unsynced_tag(host: Host) -> Run:
    """A tag was made visible by a process that was stopped before it was durable; another forgets it."""
    run = _stored(host, range(1, 3))
    _killed_when(run, "/tags", lambda: run.tag("best", run.nth(0)), verb="fsync")
    run.untag("best")
    return run


def save_by_two(host: Host) -> Run:
    """Two ranks, with a manifest each and packs of their own, build on what they saved before."""
    run = _stored(host, range(0))
    save_together(run, 1)
    run = run.settled()
    with limits(INLINE_BYTES=0):
        assert _told(save_together(run, 2)) == ["saved", "saved"]
    return run


def first_save_by_two(host: Host) -> Run:
    run = _stored(host, range(1, 2))
    assert _told(save_together(run, 2)) == ["saved", "saved"]
    return run


def save_by_two_whose_first_dies_before(host: Host) -> Run:
    """Rank 0 is killed just before its commit: rank 1 gives the save up."""
    run = _stored(host, range(1, 2))
    with limits(INLINE_BYTES=0):
        assert _told(save_together(run, 2, {0: MortalFs(run.fs, 1, verb="link", where="/snapshots/")})) == ["died", "0"]
    return run


def save_by_two_whose_first_dies_after(host: Host) -> Run:
    """Rank 0 is killed when its commit is visible and not durable: rank 1, who sees it, reports a success."""
    run = _stored(host, range(1, 2))
    assert _told(save_together(run, 2, {0: MortalFs(run.fs, 1, verb="link", where="/snapshots/", after=True)})) == [
        "died", "saved",
    ]  # fmt: skip
    return run


def save_by_two_whose_second_dies(host: Host) -> Run:
    """Rank 1 is killed just before its part is done: rank 0 gives the save up."""
    run = _stored(host, range(1, 2))
    with limits(INLINE_BYTES=0):
        assert _told(save_together(run, 2, {1: MortalFs(run.fs, 2, verb="rename", where="/parts/")})) == ["1", "died"]
    return run


def _told(outcomes: list[Outcome]) -> list[str]:
    """In a word each: whether a rank saved, died, or was told which one failed."""
    return ["died" if isinstance(one, Died) else str(one.rank) if isinstance(one, SaveFailedError) else "saved"
            for one in outcomes]  # fmt: skip


@contextmanager
def limits(**changed: int) -> Iterator[None]:
    """Within it, constants of the writer are these."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(rank_writer if hasattr(rank_writer, name) else pack_writer, name, value)
        yield


def save_beside_unsynced_top(host: Host) -> Run:
    """A process made the first directory on the way to the root and was killed before its fsync; another goes on."""
    return _save_after_killed_init(host, at=1)


def save_beside_unsynced_root(host: Host) -> Run:
    """Likewise, when it had made the root."""
    return _save_after_killed_init(host, at=3)


def _save_after_killed_init(host: Host, at: int) -> Run:
    run = Run(host)
    fs = MortalFs(run.fs, at, verb="fsync")
    with pytest.raises(Died):
        run.init(fs)
    run.host.kill()
    run.end_process()
    run.init()
    run.save(1)
    return run


def save_beside_unsynced_houses(host: Host) -> Run:
    """A first save was killed before it had made the store's directories durable; another save finds them there."""
    run = _stored(host, range(0))
    _killed_when(run, "", lambda: run.save(1), verb="fsync", at=4)
    run.save(2)
    return run


def gc_beside_unsynced_removal(host: Host) -> Run:
    """A prune was killed when its `removed` mark was visible and not durable; gc frees what that lets go."""
    run = _stored(host, range(1, 4))
    _killed_when(run, "/removed", lambda: run.prune(keep_last=2), verb="rename", after=True)
    run.gc()
    return run


def gc_beside_late_writer(host: Host) -> Run:
    """gc gives up a writer on another host just before its commit; the disk's host loses power; the writer goes on."""
    run = _stored(host, range(1, 2))
    _killed_when(run, "/snapshots/", lambda: run.save(2), verb="link")
    (data,) = [data for path, data in run.fs.tree().items() if "/tmp/" in path and data]
    (save,) = [path.rpartition("/")[2] for path in run.fs.tree() if "/saves/" in path]
    run.late = (f"snapshots/{save}", data)
    run = run.settled()
    run.gc(patience=0)
    return run


def _killed_when(
    run: Run, where: str, act: Callable[[], object], *, verb: str = "", at: int = 1, after: bool = False
) -> None:
    """Let a process of its own do `act`, and kill it just before (or after) its call `at` of `verb` on `where`."""
    fs = MortalFs(run.fs, where=where, verb=verb, at=at, after=after)
    run.begin_process(fs)
    with suppress(Died):
        act()
    assert fs.is_dead
    run.host.kill()
    run.end_process()


def killed_then(host: Host, first: Operation, then: Operation, *, verb: str, step: int) -> Iterator[Run]:
    """`first`, killed just before each `step`-th call of `verb` in turn, and then `then` by another process."""
    for at in itertools.count(1, step):
        run = Run(host) if first is init_store else _stored(host, range(1, 2))
        fs = MortalFs(run.fs, at, verb=verb)
        if first is not init_store:
            run.begin_process(fs)
        with suppress(Died):
            first(run, fs)
        if not fs.is_dead:
            return
        run.host.kill()
        run.end_process()
        then(run, run.fs)
        yield run


def init_store(run: Run, fs: Fs) -> None:
    run.init(fs)


def init_and_save(run: Run, fs: Fs) -> None:
    """Who finds a store that is being made takes it as it is; what is acknowledged in it is durable with it."""
    run.init(fs)
    run.save(1)


def save_once(run: Run, fs: Fs) -> None:
    with limits(INLINE_BYTES=0):
        run.save(2 + len(run.attempted), tags=["best"])


def prune_once(run: Run, fs: Fs) -> None:
    if len(run.infos) < 2:
        run.save(1 + len(run.attempted))
    run.adopt_listed()
    run.prune(keep_last=1)


def gc_once(run: Run, fs: Fs) -> None:
    run.gc()


def epoch_once(run: Run, fs: Fs) -> None:
    run.open_epoch()


PAIRS: dict[str, tuple[Operation, Operation]] = {
    "init, save": (init_store, init_and_save),
    "save, save": (save_once, save_once),
    "save, prune": (save_once, prune_once),
    "prune, save": (prune_once, save_once),
    "prune, gc": (prune_once, gc_once),
    "epoch, epoch": (epoch_once, epoch_once),
}

LENGTHY = {"first_save_by_two", "save_by_two", "save_by_two_whose_first_dies_before", "save_by_two_whose_second_dies"}
"""Runs of which the short run takes only the states after the last call: the first calls are those of another run."""

SCENARIOS: dict[str, Scenario] = {
    act.__name__: act
    for act in (
        init, first_save, second_save, tenth_save, same_step_again, full_save, failed_save, repack, prune, drop,
        gc_after_kill, floor, tag, tag_moved, untag, open_epoch, next_epoch, quarantine, clear,
        prune_beside_unsynced_commit, untag_beside_unsynced_tag, save_beside_unsynced_top,
        save_beside_unsynced_root, save_beside_unsynced_houses,
        gc_beside_unsynced_removal, gc_beside_late_writer, delta_save, prune_of_bases, repack_of_bases,
        first_save_by_two, save_by_two, save_by_two_whose_first_dies_before, save_by_two_whose_first_dies_after,
        save_by_two_whose_second_dies,
    )
}  # fmt: skip
