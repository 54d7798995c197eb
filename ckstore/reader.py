"""Reading chunks: plan, read in parallel, decode, check the identity, put into place.

Nothing unverified is ever given out. Frames that stand side by side are read together (`runs`). One that fails is read
again by itself; if it still fails, it is looked for `elsewhere` before `CorruptionError`. What another storage gave is
put back (`mender`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

from ckstore import sources
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.elsewhere import Chunks, Elsewhere
from ckstore.errors import BackendError, CkstoreError, CorruptionError, NotFoundError
from ckstore.format.manifest import Base, Manifest
from ckstore.format.records import Commit, PackRef
from ckstore.history import Marks, read_marks
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.mender import Mender
from ckstore.relocation import Relocations
from ckstore.runs import Piece, Run, plan
from ckstore.threads import submit

WORKERS = max(4, min(8, os.cpu_count() or 1))
"""Threads that read: some wait for the disk while others hash."""


def read_manifests(context: Context, commit: Commit) -> list[Manifest]:
    """Every rank's manifest of a snapshot, checked against its commit record."""
    save = SaveName.parse(commit.save)
    return [read_manifest(context, save, entry) for entry in commit.manifests]


def check_packs(context: Context, commit: Commit, marks: Marks) -> None:
    """`CorruptionError` unless every pack of the closure, or what stands for it now, is there at its recorded size.

    One that is not may be whole on another storage of the store: that will do.
    """
    try:
        amiss = _amiss(context, commit, marks.relocated)
    except CorruptionError:
        amiss = None
    if amiss != {}:
        # It may have been repacked since the marks were read.
        amiss = _amiss(context, commit, read_marks(context.backend).relocated)
    for pack, error in amiss.items():
        sources.instead(context, pack.name, partial(_check_size, pack=pack), error)


def _amiss(context: Context, commit: Commit, relocated: Collection[str]) -> dict[PackRef, CkstoreError]:
    """The packs that are not as they were recorded, and why. Once this storage does not answer, no more are asked."""
    found: dict[PackRef, CkstoreError] = {}
    for pack in Relocations(context, relocated).packs(commit.packs):
        try:
            _check_size(context, pack)
        except CorruptionError as error:
            found[pack] = error
        except BackendError as error:
            found[pack] = error
            break
    return found


def _check_size(context: Context, pack: PackRef) -> None:
    try:
        size = context.backend.stat(pack.name)
    except NotFoundError as error:
        raise CorruptionError("the pack is missing", name=pack.name) from error
    if size != pack.size:
        raise CorruptionError(f"is {size} bytes long where {pack.size} were written", name=pack.name)


def pieces(manifest: Manifest, buffers: Mapping[int, memoryview], paths: Mapping[int, str]) -> Iterator[Piece]:
    """The chunks of the blobs in `buffers`, each with its part of the blob's memory."""
    rows = manifest.chunks_of_blob()
    for blob, buffer in buffers.items():
        for index, row in enumerate(rows[blob]):
            start = index * manifest.chunk_size
            part = buffer[start : start + manifest.plain_size(blob, index)]
            yield Piece(manifest.ids[row], manifest.locations[row], part, paths.get(blob, ""))


def check_blobs(
    context: Context, manifest: Manifest, blobs: Iterable[int], paths: Mapping[int, str], *, put_back: bool = True
) -> None:
    """Read and check every chunk of `blobs`, keeping none. `paths` says, for each blob, what of the state it holds."""
    rows = manifest.chunks_of_blob()
    read_pieces(
        context,
        (
            Piece(manifest.ids[row], manifest.locations[row], manifest.plain_size(blob, index), paths.get(blob, ""))
            for blob in blobs
            for index, row in enumerate(rows[blob])
        ),
        put_back=put_back,
    )


def read_pieces(context: Context, wanted: Iterable[Piece], *, put_back: bool = True) -> None:
    """Fill every piece, verified. On the first failure nothing more is started and the error is raised; likewise if it
    is interrupted. What was started is waited for: nothing is written to the pieces after that.

    With `put_back`, what is damaged here and whole on another storage is put back meanwhile; that it could not be is
    only a warning.
    """
    wanted = tuple(wanted)
    mender = Mender(context, Chunks(wanted), idle=not put_back or bool(context.config.writer_features))
    mender.add_broken()
    elsewhere = Elsewhere(context, wanted, mender)
    runs = plan(wanted, WORKERS)
    stop = threading.Event()
    try:
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-read") as pool:
            try:
                futures: list[Future[None]] = [submit(pool, _fill_run, run, elsewhere, stop) for run in runs]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = next((future for future in futures if future in done and future.exception()), None)
            except BaseException:
                stop.set()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
    except BaseException:
        mender.close(hurry=True)
        raise
    mender.close(hurry=False)
    # A store that cannot be written is still read; the marks only spare others the look.
    with suppress(CkstoreError):
        elsewhere.mark_damage()
    if failed is not None:
        failed.result()
    mender.tell()


def _fill_run(run: Run, elsewhere: Elsewhere, stop: threading.Event) -> None:
    """Fill the pieces of a run, as long as `stop` is not set."""
    for piece in elsewhere.read_run(run):
        if stop.is_set():
            break
        _fill(piece, elsewhere)


def _fill(piece: Piece, elsewhere: Elsewhere) -> None:
    into = scratch("checked", piece.into) if isinstance(piece.into, int) else piece.into
    try:
        elsewhere.obtain(Base(piece.id, piece.place), into)
    except CorruptionError as error:
        raise CorruptionError(error.what, name=error.name, offset=error.offset, path=piece.path) from error
