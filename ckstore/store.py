"""The facade: open a store, and every operation on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from ckstore import diff as differences
from ckstore import evidence, facts, gc, layout, prune, refs, repack, restorer, saver, takeover, upkeep
from ckstore import repair as repairs
from ckstore import status as statuses
from ckstore.announce import PATIENCE_SECONDS, pinned
from ckstore.arguments import (
    WHEN_BUSY,
    name_of,
    nice_of,
    patience_of,
    patterns_of,
    staging_limit_of,
    step_of,
    tags_of,
)
from ckstore.backend.base import Backend
from ckstore.background import Background, ThreadRunner, Wishes
from ckstore.closing import Closing
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import records
from ckstore.history import read_history, read_tags
from ckstore.ids import SaveName, check_label
from ckstore.info import SnapshotInfo, snapshot_infos, state_of
from ckstore.member import Member
from ckstore.meta import encode_meta
from ckstore.opening import open_context, warn_of_single_writer
from ckstore.pending import PendingSave
from ckstore.progress import Progress, silent
from ckstore.prune import PruneReport
from ckstore.reentry import undisturbed
from ckstore.repair import RepairReport
from ckstore.replicas.group import Replicas
from ckstore.replicas.opened import open_with_replicas
from ckstore.replicas.shipping import DEADLINE_SECONDS
from ckstore.replicas.wanted import deadline_of, wanted_of
from ckstore.retention import Retention
from ckstore.snapshot import Snapshot, open_snapshot
from ckstore.state.capture import capture
from ckstore.tags import put_tag, refuse_removed
from ckstore.tiers.group import Tiers
from ckstore.verify import Verifier, VerifyReport
from ckstore.writer.client import WriterClient

T = TypeVar("T")


def open_store(
    url: str | os.PathLike[str] | Backend,
    create: bool = False,
    profile: str = "balanced",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    chunk_size: int = 4 << 20,
    staging_limit: int | None = None,
    writer_nice: int = 0,
    bandwidth_limit: int | str | None = None,
    encryption_key: str | None = None,
    replicas: Iterable[Mapping[str, Any]] | None = None,
    required: int | None = None,
    replica_deadline: float = DEADLINE_SECONDS,
) -> Store:
    """Open the store at `url`: a path, a `file://` URL or `memory://name`. With `create`, make it if there is none.

    `profile` says what saves aim at: "fast" (the speed of the device), "balanced" or "compact" (size). `cache_dir`
    holds what may be lost at any time. `chunk_size` in bytes, a multiple of 4096, is fixed when the store is made.
    `FormatError` when there is something else than a store, or a newer one; `NotFoundError` when there is nothing.

    For saves in the background: `staging_limit` is the most bytes of memory that states are copied to, by default half
    of what is available to this process (its control group) at the first such save; `writer_nice` is added to the
    niceness of the process that writes, and the kernel ranks its reads and writes by that too.

    `bandwidth_limit`, in bytes a second or as in "500MB/s", is how fast chunks are written at most: by all saves and
    repacks into the store of all processes on this machine together that have a limit and use the same `cache_dir`. The
    last opening with a limit, in any of them, sets it for all; a process none of whose openings had one has no limit.
    Where the directory cannot be written to, or its filesystem has no locks, each process keeps to the limit by itself.

    `encryption_key` says where the master key of an encrypted storage is read: "file:PATH", "env:NAME" or
    "command:WORDS" (docs/encryption.md), never the key itself. A store that is made with it is encrypted; one that is
    there must be. The process that writes reads the key there as well.

    `replicas` are other storages of the store, each `{"url": ..., "role": "copy"}`, with an `encryption_key` of its own
    if it has one: what is saved here is copied there (docs/replicas.md). The first time makes them copies; later they
    are known, and need not be named. `required` is on how many storages, this one included, a snapshot is complete
    before a save reports success (by default 1); after `replica_deadline` seconds the save raises
    `CommittedUnderReplicatedError`: the snapshot stands, and the rest follows. A copy that is opened can be read. Where
    `url` is gone, the store is opened for reading at the first replica that has it, with a `CkstoreWarning`.
    """
    limit = None if staging_limit is None else staging_limit_of(staging_limit)
    nice = nice_of(writer_nice)
    # What is given as a place can be opened by another process, unless it is in the memory of this one.
    shared = isinstance(url, str | os.PathLike)
    wanted, deadline = wanted_of(replicas, required), deadline_of(replica_deadline)

    def open_one(place: Any, create: bool, key: str | None) -> Context:
        return open_context(place, create, profile, cache_dir, chunk_size, bandwidth_limit, key)

    context, group = open_with_replicas(open_one, url, create, encryption_key, wanted, deadline)
    warn_of_single_writer(context.backend)
    shared = shared and not wanted.backends and not any(place.startswith("memory:") for place in group.urls)
    return Store(context, _Writing(shared, limit, nice), group)


@dataclass(frozen=True, slots=True)
class _Writing:
    """How saves in the background are written: by a process of its own or on a thread of this one."""

    process: bool = False
    limit: int | None = None
    nice: int = 0


class Store(Closing):
    """An open store. Every method may be called from several threads, and beside any number of other processes."""

    def __init__(self, context: Context, writing: _Writing = _Writing(), replicas: Replicas | None = None) -> None:
        self.replicas = replicas or Replicas(context)
        """The storages of the store: how far each is, and what is done with them."""
        self.tiers = Tiers(context, self.replicas)
        """The same as tiers: where each snapshot is whole, and bringing snapshots to and from lower ones."""
        self._context = context
        self._writing = writing
        self._background: Background | None = None
        self._closed = False
        self._epochs: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ckstore.Store {self.url}>"

    @property
    def url(self) -> str:
        return self._context.backend.url

    @property
    def id(self) -> str:
        """32 hex digits, the same for every copy of this store."""
        return self._context.config.store

    @property
    def encryption_key(self) -> str | None:
        """Where the master key of its storage is read, as `ckstore.open` was told; None if it was told nothing."""
        return self._context.encryption_key

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError(f"{self} was closed")

    def _check_writable(self) -> None:
        """Refuse to write on a copy, and what `_check_features` refuses; reading goes on."""
        self._check_features()
        self.replicas.check_writable()

    def _check_features(self) -> None:
        """`FormatError` where a newer version asks writers for what this one does not know."""
        if self._context.config.writer_features:
            wanted = ", ".join(self._context.config.writer_features)
            raise FormatError(
                f"{self.url} needs features of writers that this version does not know: {wanted}; it can be read, "
                "use a newer ckstore to change it"
            )

    def close(self) -> None:
        """Wait for saves in the background, and let go of files. Whatever was acknowledged is durable already.

        A closed store begins no saves in the background; whatever else is asked of it opens what it needs again.

        Raises what a save in the background failed of, if nobody was told of it yet.
        """
        with undisturbed("close"):
            self._closed = True
            try:
                if (background := self._saves_in_background()) is not None:
                    background.close()
            finally:
                self.replicas.close()
                self._context.index.close()
                self._context.backend.close()

    def save(
        self,
        state: Any,
        *,
        step: int,
        branch: str = "main",
        tags: Iterable[str] = (),
        meta: Mapping[str, Any] | None = None,
        full: bool = False,
        epoch: int | None = None,
        member: Member | None = None,
    ) -> SnapshotInfo:
        """Save `state` as the newest snapshot of `branch`; durable when this returns.

        The state must not change meanwhile, in another thread or by a device: what is saved of it may then be of
        different moments. `epoch` is one that `open_epoch` gave, by
        default the last one that this object opened on the branch; `FencedError` if there is a newer one.
        Saving the same step again makes a second snapshot, which wins. `meta` is a small mapping of plain values.
        With `full` nothing written earlier is reused: the snapshot is readable without any older pack. On any error
        no part of the snapshot remains. `UnsupportedTypeError` names what cannot be kept before anything is written.
        A tag that cannot be set is a `CkstoreWarning`: the snapshot stands, and what comes back lacks that tag.
        Saves in the background are waited for first, so that the newest snapshot is the one saved last.

        With `member`, `state` is the part of one rank of several, each of which calls this for the same step: one
        snapshot comes of it, or `SaveFailedError` on all of them.
        """
        request = self._request(step, branch, tags, meta, full, epoch, member)
        with undisturbed("save"), nullcontext() if member is None else member.telling():
            if (background := self._saves_in_background()) is not None:
                background.raise_failed()
                background.flush()
            captured = capture(state, chunk_size=self._context.config.chunk_size)
            saved = self.replicas.save(captured, request)
        return SnapshotInfo.of(saved.record, saved.tags)

    def save_async(
        self,
        state: Any,
        *,
        step: int,
        branch: str = "main",
        tags: Iterable[str] = (),
        meta: Mapping[str, Any] | None = None,
        full: bool = False,
        epoch: int | None = None,
        member: Member | None = None,
        when_busy: str = "wait",
        steady: Iterable[Any] = (),
        keep: Retention | Mapping[str, Any] | None = None,
        tidy: bool = False,
    ) -> PendingSave:
        """Save like `save`, in the background: when the call returns the state was copied, and may change.

        What cannot be kept is refused by the call; whatever else goes wrong is raised by `wait` of what comes back or,
        if nobody asked that, by the next save and by `close`. One save is under way at a time: one that comes due
        meanwhile waits for it, or with `when_busy="skip"` is not made, or with "replace" is copied and queued, in place
        of one that was queued already, if it fits into that one's memory and is not streamed; else it waits. What is
        not made is logged, and its `wait` raises `NotSavedError`.

        `steady` names tensors and arrays of the state that will not change before `PendingSave.wait_copied` returns:
        those are copied while the caller goes on. After the commit the branch is pruned by `keep`, and with `tidy`
        what earlier runs left is collected; a failure of that is logged.

        A state that does not fit into `staging_limit` is written in part before the call returns, with a
        `CkstoreWarning`. The writer is a process of its own, started by the first call and ended by `close`; for a
        store that was opened over a backend object, or in memory, it is a thread of this one.
        """
        if when_busy not in WHEN_BUSY:
            raise InvalidInputError(f"when_busy is one of {', '.join(WHEN_BUSY)}, not {when_busy!r}")
        if member is not None and when_busy != "wait":
            raise InvalidInputError(
                f"when_busy={when_busy!r} is not for a save by several ranks: each would decide by itself"
            )
        wishes = Wishes(when_busy, tuple(steady), None if keep is None else Retention.of(keep), tidy)
        request = self._request(step, branch, tags, meta, full, epoch, member)
        with undisturbed("save"), nullcontext() if member is None else member.telling():
            self._check_open()
            captured = capture(state, chunk_size=self._context.config.chunk_size)
            background = self._saves_in_background() or self._begin_background()
            return background.save(captured, request, wishes)

    def wait(self) -> None:
        """Wait until saves in the background are over, and the pruning after them; raise what nobody was told of."""
        with undisturbed("wait"):
            if (background := self._saves_in_background()) is not None:
                background.flush(pruning=True)
                background.raise_failed()

    def wait_copied(self) -> None:
        """Wait until what was given to `save_async` as `steady` was copied, by every call so far, and may change."""
        if (background := self._saves_in_background()) is not None:
            background.wait_copied()

    def _request(
        self,
        step: int,
        branch: str,
        tags: Iterable[str],
        meta: Mapping[str, Any] | None,
        full: bool,
        epoch: int | None,
        member: Member | None,
    ) -> saver.SaveRequest:
        self._check_writable()
        step, labels = step_of(step), tags_of(tags)
        name_of("branch", branch)
        packed_meta = encode_meta({} if meta is None else meta)
        return saver.SaveRequest(
            step, branch, labels, packed_meta, full, self._epochs.get(branch) if epoch is None else epoch, member
        )

    def _saves_in_background(self) -> Background | None:
        """Those of this process; what a parent began that forked is the parent's."""
        background = self._background
        return background if background is not None and background.pid == os.getpid() else None

    def _begin_background(self) -> Background:
        writing = self._writing
        context, replicas = self._context, self.replicas
        runner = WriterClient(context, writing.nice, replicas) if writing.process else ThreadRunner(context, replicas)
        made = Background(context, runner, writing.limit, replicas)
        with self._lock:  # held for no longer than that: a fork in another thread would take it along
            found = self._saves_in_background()
            if found is None and not self._closed:
                found = self._background = made
        if found is not made:
            made.release()
            if found is None:
                raise InvalidInputError(f"{self} was closed")
            return found
        # Whoever forgets to close the store leaves no process behind.
        weakref.finalize(self, made.release).atexit = False
        return made

    def restore(
        self,
        ref: str | int = "latest",
        *,
        into: Any = None,
        keys: str | Iterable[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        atomic: bool = False,
        rank: int | None = None,
    ) -> Any:
        """The state of the snapshot that `ref` names, or of the newest good one before it if `ref` floats.

        `keys` are path patterns such as "model/**" (`*` within a step of the path, `**` across); only what they need
        is read. With `into`, live tensors and containers are filled in place and a `RestoreReport` comes back:
        `MismatchError` lists what is missing, unexpected or different before anything changes; `strict=False` reports
        instead; `cast=True` allows another dtype; `atomic=True` verifies every byte before the first is put in place.
        Of a snapshot that several ranks saved, `rank` says whose part it is.
        """
        request = restorer.RestoreRequest(patterns_of(keys), strict, cast, atomic, rank)
        with undisturbed("restore"):
            if into is None:
                return restorer.restore(self._context, refs.parse(ref), request)
            return restorer.restore_into(self._context, refs.parse(ref), into, request)

    def snapshot(self, ref: str | int = "latest") -> Snapshot:
        """Open a snapshot for reading what any rank saved, whole or by rows; a context manager.

        A ref that floats means the newest whose records are good. What turns out damaged later is a `CorruptionError`
        and sets the snapshot aside: open again for the one before.
        """
        return open_snapshot(self._context, refs.parse(ref))

    def snapshots(self, branch: str | None = None) -> list[SnapshotInfo]:
        """Every live snapshot, newest first."""
        return snapshot_infos(read_history(self._context), read_tags(self._context.backend), branch)

    def resolve(self, ref: str | int = "latest") -> SnapshotInfo:
        """The snapshot that `ref` names now."""
        return self._find(ref)[1]

    def show(self, ref: str | int = "latest") -> differences.SnapshotDetail:
        """A snapshot and every leaf of its state."""
        commit, info = self._find(ref)
        return differences.describe(self._context, commit, info)

    def diff(
        self,
        before: str | int,
        after: str | int,
        *,
        values: bool = False,
        deep: bool = False,
        progress: Progress = silent,
    ) -> differences.DiffReport:
        """What changed from one snapshot to another.

        With `values` what changed is read, and each tensor compared number by number: `Change.movement` has the norm of
        the change, how many elements changed, and NaN and infinities before and after. `deep` also counts those in
        every other tensor of `after`.
        """
        found = self._find(before), self._find(after)
        return differences.compare(self._context, *found, values=values, deep=deep, progress=progress)

    def tag(self, name: str, ref: str | int = "latest") -> SnapshotInfo:
        """Name a snapshot, so that no policy drops it. A name that is taken moves to it."""
        self._check_writable()
        name_of("tag", name)
        _, info = self._find(ref)
        save = self._save_name(info)
        with pinned(self._context.backend, f"tag {name}", [save]) as marks:
            refuse_removed(save, marks.removed | marks.condemned.keys())
            put_tag(self._context, name, save)
        return self._followed(self._find(f"id:{info.id}")[1])

    def untag(self, name: str) -> None:
        """Forget a name; `NotFoundError` if there is none."""
        self._check_writable()
        if not self._context.backend.delete(layout.tag(check_label("tag", name))):
            raise NotFoundError(f"there is no tag {name!r}")
        self._context.backend.sync(layout.TAGS)
        self.replicas.look()

    def tags(self) -> dict[str, str]:
        """Every tag and the id of its snapshot."""
        return {label: save.nonce for label, save in read_tags(self._context.backend).named.items()}

    def verify(
        self, ref: str | int | None = None, *, deep: bool = True, mark: bool = True, progress: Progress = silent
    ) -> VerifyReport:
        """Read and check everything, or one snapshot; damage is reported, never raised.

        `deep` also decodes every chunk and compares it with its identity. With `mark`, damaged snapshots are
        quarantined, so that `latest` passes them over.
        """
        only = None if ref is None else self._save_name(self._find(ref)[1])
        return Verifier(self._context, deep=deep, mark=mark, progress=progress).run(only)

    def prune(
        self,
        policy: Retention | Mapping[str, Any],
        dry_run: bool = False,
        *,
        branch: str | None = None,
        progress: Progress = silent,
    ) -> PruneReport:
        """Remove the snapshots that `policy` does not keep, and free what only they needed."""
        checked = Retention.of(policy)
        if branch is not None and branch not in (there := read_history(self._context).branches()):
            raise NotFoundError(f"there is no snapshot on branch {branch!r}; branches: {', '.join(there) or 'none'}")
        if dry_run:
            return prune.report_plan(prune.plan_prune(self._context, checked, branch))
        self._check_writable()
        return self._followed(upkeep.prune_store(self._context, checked, branch, progress))

    def drop(self, ref: str | int, *, force: bool = False, progress: Progress = silent) -> PruneReport:
        """Remove one snapshot, even one whose record cannot be read; the last good one of a branch with `force`."""
        self._check_writable()
        return self._followed(upkeep.drop(self._context, self._droppable(ref, force), force, progress))

    def gc(
        self, dry_run: bool = False, *, patience: float = PATIENCE_SECONDS, progress: Progress = silent
    ) -> gc.Sweep:
        """Free what no snapshot reaches; finish removals that were cut short; give up saves whose writer is gone.

        Packs that are mostly dead are repacked. `patience`: seconds that a save of an unknown process may stand still
        before it is given up. With `dry_run` nothing changes, and what a repack would free is an estimate.
        """
        patience_of(patience)
        if dry_run:
            planned = gc.plan_sweep(self._context)
            planned.freed_bytes += repack.plan_repack(self._context)
            return planned
        self._check_writable()
        return self._followed(upkeep.collect(self._context, patience, progress))

    def repair(
        self,
        sources: Iterable[str | os.PathLike[str] | Backend] = (),
        *,
        dry_run: bool = False,
        progress: Progress = silent,
    ) -> RepairReport:
        """Read and check everything here, and put back what another storage of the store has of what is not whole.

        `sources` are places of copies of this store, asked before the members that are known anyway. What was damaged
        is kept below `evidence/`. Snapshots that were set aside for what was mended are cleared; those that stay
        damaged are set aside. With `dry_run` nothing changes.
        """
        if not dry_run:
            self._check_features()
        places = [os.fspath(place) if isinstance(place, os.PathLike) else place for place in sources]
        with undisturbed("repair"), repairs.with_sources(self._context, places) as context:
            return repairs.repair(context, dry_run=dry_run, progress=progress)

    def forget_evidence(self) -> int:
        """Delete the damaged objects that repairs have kept aside; how many bytes that frees."""
        self._check_features()
        return evidence.forget(self._context)

    def status(self) -> statuses.StatusReport:
        """Saves under way, pins, marks, sizes, and what gc would free."""
        return statuses.status(self._context)

    def quarantine(self, ref: str | int, reason: str) -> SnapshotInfo:
        """Set a snapshot aside by hand: `latest` and retention pass it over until `clear`."""
        self._check_writable()
        _, info = self._find(ref)
        facts.quarantine(self._context, self._save_name(info), {"reason": str(reason), "during": "by hand"})
        return self._followed(self._find(f"id:{info.id}")[1])

    def clear(self, ref: str | int, *, progress: Progress = silent) -> SnapshotInfo:
        """Undo the quarantine of a snapshot after a repair; `CorruptionError` if verifying finds it still damaged."""
        self._check_writable()
        _, info = self._find(ref)
        report = self.verify(f"id:{info.id}", mark=False, progress=progress)
        if not report.ok:
            found = report.findings[0]
            what = f"{found.what}: snapshot {info.id} stays quarantined"
            raise CorruptionError(what, name=found.name, offset=found.offset)
        facts.clear(self._context, self._save_name(info), {"reason": "verified whole"})
        return self._followed(self._find(f"id:{info.id}")[1])

    def open_epoch(self, branch: str = "main", *, base: str | int | None = None) -> int:
        """Take over `branch` for this process: saves of older runs are refused from now on, and are never `latest`.

        The run goes on from `base`, by default what `latest` means when older runs can add nothing any more; later
        snapshots of older epochs are left behind. A base may itself have been left behind: then it is `latest` again.
        The number of the epoch.
        """
        self._check_writable()
        name_of("branch", branch)
        number = takeover.open_epoch(
            self._context, branch, None if base is None else lambda: self._save_name(self._find(base)[1])
        )
        with self._lock:
            self._epochs[branch] = number
        return number

    def _followed(self, outcome: T) -> T:
        """`outcome` of something that copies of the store, if they are being fed, are to follow."""
        self.replicas.look()
        return outcome

    def _find(self, ref: str | int) -> tuple[records.Commit, SnapshotInfo]:
        history = read_history(self._context)
        save, commit = next(refs.candidates(history, refs.parse(ref)))
        labels = read_tags(self._context.backend).of(save)
        return commit, SnapshotInfo.of(commit, labels, state_of(history, save, commit))

    @staticmethod
    def _save_name(info: SnapshotInfo) -> SaveName:
        return SaveName(info.order[1], info.order[2])

    def _droppable(self, ref: str | int, force: bool) -> SaveName:
        history = read_history(self._context)
        parsed = refs.parse(ref)
        removed = history.marks.removed
        unread = [save for save in history.saves if save not in removed and history.decision(save) is None]
        named = parsed.kind in ("id", "bare") and len(parsed.value) >= 4
        broken = [save for save in unread if named and save.nonce.startswith(parsed.value)]
        if len(broken) == 1:
            return broken[0]
        save, commit = next(refs.candidates(history, parsed))
        good = [found for found, _ in history.candidates(commit.branch)]
        if not force and good == [save]:
            raise InvalidInputError(
                f"{ref!r} is the last good snapshot of branch {commit.branch}; force=True (--force) drops it"
            )
        return save
