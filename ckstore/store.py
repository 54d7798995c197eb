"""The facade: open a store, and every operation on it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ckstore import diff as differences
from ckstore import facts, gc, layout, prune, refs, repack, restorer, saver, upkeep
from ckstore import status as statuses
from ckstore.announce import PATIENCE_SECONDS, pinned
from ckstore.arguments import chunk_size_of, name_of, patience_of, patterns_of, step_of, tags_of
from ckstore.backend.base import Backend
from ckstore.backend.url import backend_of
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import ConflictError, CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import envelope, records
from ckstore.history import newest_epoch, read_decision, read_history, read_tags
from ckstore.ids import SaveName, check_label
from ckstore.index import ChunkIndex
from ckstore.info import SnapshotInfo, snapshot_infos, state_of
from ckstore.meta import encode_meta
from ckstore.process import current_owner
from ckstore.progress import Progress, silent
from ckstore.prune import PruneReport
from ckstore.reentry import undisturbed
from ckstore.reserve import set_aside
from ckstore.retention import Retention
from ckstore.state.capture import capture
from ckstore.tags import put_tag, refuse_removed
from ckstore.verify import Verifier, VerifyReport

DEFAULT_CACHE = Path("~/.cache/ckstore")


def open_store(
    url: str | os.PathLike[str] | Backend,
    create: bool = False,
    profile: str = "balanced",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    chunk_size: int = 4 << 20,
) -> Store:
    """Open the store at `url`: a path, a `file://` URL or `memory://name`. With `create`, make it if there is none.

    `profile` says what saves aim at: "fast" (the speed of the device), "balanced" or "compact" (size). `cache_dir`
    holds what may be lost at any time. `chunk_size` in bytes, a multiple of 4096, is fixed when the store is made.
    `FormatError` when there is something else than a store, or a newer one; `NotFoundError` when there is nothing.
    """
    chosen = profile_named(profile)
    backend = backend_of(url)
    if not backend.capabilities.put_if_absent:
        raise InvalidInputError(f"{backend.url} cannot hold a store: it cannot create an object that must not be there")
    config = _read_config(backend)
    if config is None:
        if not create:
            raise NotFoundError(f"there is no store at {backend.url}; make one with `ckstore init` or create=True")
        config = _create(backend, chunk_size)
    cache = Path(cache_dir if cache_dir is not None else DEFAULT_CACHE).expanduser() / config.store
    return Store(Context(backend, config, ChunkIndex.open(cache), cache, chosen))


def _create(backend: Backend, chunk_size: int) -> records.Config:
    chunk_size_of(chunk_size)
    houses = [layout.SNAPSHOTS, layout.PACKS, layout.MANIFESTS, layout.MARKS, layout.SAVES]
    if any(backend.list(house) for house in houses):
        raise FormatError(
            f"{backend.url} holds objects of a store but no {layout.CONFIG}: it is damaged, not new; "
            f"put {layout.CONFIG} back from a copy"
        )
    config = records.Config(store=secrets.token_hex(16), chunk_size=chunk_size)
    if not backend.put_if_absent(layout.CONFIG, records.encode(config)):
        found = _read_config(backend)
        if found is None:
            raise ConflictError(f"somebody is creating and removing the store at {backend.url}; try again")
        return found
    set_aside(backend)
    return config


def _read_config(backend: Backend) -> records.Config | None:
    try:
        data = backend.get(layout.CONFIG, limit=records.MAX_RECORD)
    except NotFoundError:
        return None
    if data[: len(envelope.MAGIC)] != envelope.MAGIC:
        raise FormatError(f"{backend.url} is no ckstore store: its file {layout.CONFIG} is something else")
    config = records.decode(data, records.Config, layout.CONFIG)
    if config.format != records.FORMAT:
        raise FormatError(f"{backend.url} has format {config.format}; this version reads format {records.FORMAT}")
    if config.reader_features:
        wanted = ", ".join(config.reader_features)
        raise FormatError(f"{backend.url} uses features that this version does not know: {wanted}; use a newer ckstore")
    if (config.hash, config.ids) != ("blake3-256", "plain"):
        raise FormatError(f"{backend.url} identifies chunks by {config.hash}/{config.ids}, which this version cannot")
    if config.chunk_size % 4096 or not 4096 <= config.chunk_size <= 64 << 20:
        raise FormatError(f"{backend.url} claims an impossible chunk size of {config.chunk_size} bytes")
    return config


class Store:
    """An open store. Every method may be called from several threads, and beside any number of other processes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._epochs: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ckstore.Store {self.url}>"

    @property
    def url(self) -> str:
        return self._context.backend.url

    @property
    def id(self) -> str:
        """32 hex digits, the same for every copy of this store."""
        return self._context.config.store

    def _check_writable(self) -> None:
        """`FormatError` where a newer version asks writers for what this one does not know; reading goes on."""
        if self._context.config.writer_features:
            wanted = ", ".join(self._context.config.writer_features)
            raise FormatError(
                f"{self.url} needs features of writers that this version does not know: {wanted}; it can be read, "
                "use a newer ckstore to change it"
            )

    def close(self) -> None:
        """Let go of files. Whatever was acknowledged is durable already."""
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
    ) -> SnapshotInfo:
        """Save `state` as the newest snapshot of `branch`; durable when this returns.

        The state must not change meanwhile; `InvalidInputError` if it did. `epoch` is one that `open_epoch` gave, by
        default the last one that this object opened on the branch; `FencedError` if there is a newer one.
        Saving the same step again makes a second snapshot, which wins. `meta` is a small mapping of plain values.
        With `full` nothing written earlier is reused: the snapshot is readable without any older pack. On any error
        no part of the snapshot remains. `UnsupportedTypeError` names what cannot be kept before anything is written.
        A tag that cannot be set is a `CkstoreWarning`: the snapshot stands, and what comes back lacks that tag.
        """
        self._check_writable()
        step, labels = step_of(step), tags_of(tags)
        name_of("branch", branch)
        packed_meta = encode_meta({} if meta is None else meta)
        if epoch is None:
            epoch = self._epochs.get(branch)
        with undisturbed("save"):
            captured = capture(state, chunk_size=self._context.config.chunk_size)
            request = saver.SaveRequest(step, branch, labels, packed_meta, full, epoch)
            saved = saver.save(self._context, captured, request)
        return SnapshotInfo.of(saved.record, saved.tags)

    def restore(
        self,
        ref: str | int = "latest",
        *,
        into: Any = None,
        keys: str | Iterable[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        atomic: bool = False,
    ) -> Any:
        """The state of the snapshot that `ref` names, or of the newest good one before it if `ref` floats.

        `keys` are path patterns such as "model/**" (`*` within a step of the path, `**` across); only what they need
        is read. With `into`, live tensors and containers are filled in place and a `RestoreReport` comes back:
        `MismatchError` lists what is missing, unexpected or different before anything changes; `strict=False` reports
        instead; `cast=True` allows another dtype; `atomic=True` verifies every byte before the first is put in place.
        """
        request = restorer.RestoreRequest(patterns_of(keys), strict, cast, atomic)
        with undisturbed("restore"):
            if into is None:
                return restorer.restore(self._context, refs.parse(ref), request)
            return restorer.restore_into(self._context, refs.parse(ref), into, request)

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

    def diff(self, before: str | int, after: str | int) -> differences.DiffReport:
        """What changed from one snapshot to another."""
        return differences.compare(self._context, self._find(before), self._find(after))

    def tag(self, name: str, ref: str | int = "latest") -> SnapshotInfo:
        """Name a snapshot, so that no policy drops it. A name that is taken moves to it."""
        self._check_writable()
        name_of("tag", name)
        _, info = self._find(ref)
        save = self._save_name(info)
        with pinned(self._context.backend, f"tag {name}", [save]) as marks:
            refuse_removed(save, marks.removed | marks.condemned.keys())
            put_tag(self._context, name, save)
        return self._find(f"id:{info.id}")[1]

    def untag(self, name: str) -> None:
        """Forget a name; `NotFoundError` if there is none."""
        self._check_writable()
        if not self._context.backend.delete(layout.tag(check_label("tag", name))):
            raise NotFoundError(f"there is no tag {name!r}")
        self._context.backend.sync(layout.TAGS)

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
        return upkeep.prune_store(self._context, checked, branch, progress)

    def drop(self, ref: str | int, *, force: bool = False, progress: Progress = silent) -> PruneReport:
        """Remove one snapshot, even one whose record cannot be read; the last good one of a branch with `force`."""
        self._check_writable()
        return upkeep.drop(self._context, self._droppable(ref, force), force, progress)

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
        return upkeep.collect(self._context, patience, progress)

    def status(self) -> statuses.StatusReport:
        """Saves under way, pins, marks, sizes, and what gc would free."""
        return statuses.status(self._context)

    def quarantine(self, ref: str | int, reason: str) -> SnapshotInfo:
        """Set a snapshot aside by hand: `latest` and retention pass it over until `clear`."""
        self._check_writable()
        _, info = self._find(ref)
        facts.quarantine(self._context, self._save_name(info), {"reason": str(reason), "during": "by hand"})
        return self._find(f"id:{info.id}")[1]

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
        return self._find(f"id:{info.id}")[1]

    def open_epoch(self, branch: str = "main", *, base: str | int | None = None) -> int:
        """Take over `branch` for this process: saves of older runs are refused from now on, and are never `latest`.

        The run goes on from `base`, by default what `latest` means when older runs can add nothing any more; later
        snapshots of older epochs are left behind. A base may itself have been left behind: then it is `latest` again.
        The number of the epoch.
        """
        self._check_writable()
        name_of("branch", branch)
        behind: SaveName | None = None
        lost: ConflictError | None = None
        for _ in range(64):
            # The number first: whoever opens an epoch after it was read makes the base be chosen anew.
            number = newest_epoch(self._context.backend, branch) + 1
            start = behind or (self._save_name(self._find(base)[1]) if base is not None else self._newest(branch))
            # A prune that does not know of the epoch yet must not remove what it goes on from.
            with pinned(self._context.backend, f"epoch of {branch}", [start] if start else []) as marks:
                gone = marks.removed | marks.condemned.keys()
                if start is not None and base is not None:
                    refuse_removed(start, gone)
                elif start in gone and (behind or start != self._newest(branch)):
                    behind = None
                    continue
                if not self._try_epoch(branch, number, start):
                    behind = None
                    continue
                removed, behind = self._meanwhile(branch, number, start)
                if removed and (base is not None or behind is None):
                    what = f"epoch {number} of {branch} is open, but what it goes on from was removed meanwhile"
                    lost, base = ConflictError(what), None
                if base is None and behind is not None:
                    continue
                if lost is not None:
                    raise lost
                with self._lock:
                    self._epochs[branch] = number
                return number
        raise ConflictError(f"other runs keep taking over branch {branch}; see which of them should stop")

    def _try_epoch(self, branch: str, number: int, start: SaveName | None) -> bool:
        """Open epoch `number`, going on from `start`; False if another run took its number."""
        record = records.Epoch(
            branch=branch,
            number=number,
            base=str(start) if start else None,
            base_epoch=self._epoch_of(start) if start else -1,
            owner=current_owner(),
        )
        return self._context.backend.put_if_absent(layout.epoch(branch, number), records.encode(record))

    def _meanwhile(self, branch: str, number: int, start: SaveName | None) -> tuple[bool, SaveName | None]:
        """Whether `start` was removed before epoch `number` was opened; and the newest that older runs saved since.

        That must not be left behind: it was acknowledged, and `start` may be gone because it was there.
        """
        history = read_history(self._context)
        superseded = history.epochs(branch).newest > number
        return start in history.marks.removed, None if superseded else history.left_behind(branch, number)

    def _newest(self, branch: str) -> SaveName | None:
        found = next(read_history(self._context).candidates(branch), None)
        return found[0] if found else None

    def _epoch_of(self, save: SaveName) -> int:
        decision = read_decision(self._context, save)
        assert isinstance(decision, records.Commit)
        return decision.epoch

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
