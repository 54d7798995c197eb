"""The writer's side: takes saves one after the other, and ends when nobody is left to send one."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import numpy as np

from ckstore import saver, upkeep
from ckstore.commit import check_same_store
from ckstore.context import Context
from ckstore.deltas import Held
from ckstore.errors import BackendError, CommittedUnderReplicatedError, FencedError
from ckstore.format import records
from ckstore.history import read_whole_decision
from ckstore.ids import SaveName
from ckstore.member import Member
from ckstore.opening import open_context
from ckstore.replicas.group import Replicas
from ckstore.replicas.opened import rejoin
from ckstore.retention import Retention
from ckstore.state.capture import Blob, Captured
from ckstore.throttle import throttle_of
from ckstore.tiers.background import Housekeeping
from ckstore.writer import errors, sources
from ckstore.writer.messages import (
    Before,
    BlobRow,
    Bytes,
    Channel,
    ErrorRow,
    Failed,
    Hello,
    Named,
    Open,
    Opened,
    Prune,
    Pruned,
    Save,
    Saved,
    Ship,
    Want,
)


def serve(end: socket.socket) -> None:
    """Serve the trainer at the other end until it is gone; a save that was handed over whole is finished first.

    Then other storages of the store get what they lack, for as long as a save waits for them at most.
    """
    with end, suppress(EOFError):
        channel = Channel(end)
        channel.send(Hello(sources.VERSION))
        opening, _ = channel.receive_in_writer()
        assert isinstance(opening, Open)
        try:
            context = _open(opening)
            deadline, keys = opening.deadline, opening.keys
            replicas = Replicas(context) if deadline is None else rejoin(context, deadline, keys)
        except Exception as error:
            channel.send(Failed(errors.encode(error), []))
            return
        channel.send(Opened())
        service = Service(channel, context, replicas)
        try:
            service.run()
        finally:
            service.close()
            replicas.close()


def _open(opening: Open) -> Context:
    os.nice(opening.nice)  # the kernel derives the priority of its reads and writes from that
    cache, key = os.fsdecode(opening.cache), opening.encryption_key
    context = open_context(opening.url, False, opening.profile, cache, 0, encryption_key=key)
    if context.config.store != opening.store:
        raise FencedError(f"the store that was opened at {opening.url} was removed and another one was made")
    return context


class Service:
    """Answers one trainer."""

    def __init__(self, channel: Channel, context: Context, replicas: Replicas | None = None) -> None:
        self._channel = channel
        self._context = context
        self._replicas = replicas or Replicas(context)
        self._tiers = Housekeeping(context, self._replicas)
        self._asking = threading.Lock()

    def close(self) -> None:
        """Let go of what goes on beside saves."""
        self._tiers.close()

    def run(self) -> None:
        """Until `EOFError`."""
        before: tuple[Before, int] | None = None
        while True:
            message, fd = self._channel.receive_in_writer()
            match message:
                case Before():
                    before = (message, fd) if fd is not None else None
                case Save():
                    self._pace(message.bandwidth_limit)
                    with _held(before) as held:
                        self._channel.send(self._save(message, fd, held))
                    before = held = None  # memory that was mapped goes with the last that refers to it
                case Prune():
                    self._pace(message.bandwidth_limit)
                    self._channel.send(self._prune(message))
                case Ship():
                    self._channel.send(self._ship(message))

    def _pace(self, rate: int | None) -> None:
        """Write as fast as the trainer would now."""
        throttle = self._context.throttle = throttle_of(self._context.config.store)
        if rate is not None:
            throttle.keep_to(rate)

    def _save(self, message: Save, fd: int | None, held: Held | None) -> Saved | Failed:
        row = message.member
        member = None if row is None else Member(row.rank, row.world, row.group, row.ordinal, tuple(row.owners))
        request = saver.SaveRequest(
            message.step, message.branch, tuple(message.tags), message.meta, message.full, message.epoch, member
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if fd is None:  # the system drops descriptors silently that it has no room for
                    raise BackendError("the writer process has no descriptor left for the state", retryable=True)
                self._replicas.check_writable()
                with _mapped(fd, message.size) as memory:
                    captured = self._captured(message, memory)
                    saved = saver.save(self._context, captured, request, self._tell_name, held)
                short = [] if request.member is not None and request.member.rank else self._shipped(saved)
            except Exception as error:
                return Failed(errors.encode(error), _notes(caught))
        notes = _notes(caught)
        return Saved(saved.record.save, records.encode(saved.record), list(saved.tags), notes, short)

    def _ship(self, message: Ship) -> Saved | Failed:
        try:
            record = read_whole_decision(self._context, SaveName.parse(message.save))
            assert isinstance(record, records.Commit)
            short = self._shipped(saver.Saved(record, tuple(message.tags)))
        except Exception as error:
            return Failed(errors.encode(error), [])
        return Saved(message.save, records.encode(record), message.tags, [], short)

    def _shipped(self, saved: saver.Saved) -> list[ErrorRow]:
        """Have a snapshot count as required; why it is on fewer storages, if it is."""
        try:
            self._replicas.ship(saved)
        except CommittedUnderReplicatedError as error:
            return errors.encode(error)
        return []

    def _captured(self, message: Save, memory: memoryview) -> Captured:
        blobs = [self._blob(i, row, memory) for i, row in enumerate(message.blobs)]
        return Captured(message.tree, message.order, tuple(blobs))

    def _blob(self, number: int, row: BlobRow, memory: memoryview) -> Blob:
        if row.offset is None:
            load = partial(self._fetch, number, row.nbytes)
        else:
            load = partial(_slice, memory, row.offset, row.nbytes)
        return Blob(row.nbytes, row.itemsize, row.kind, row.path, load)

    def _fetch(self, number: int, nbytes: int) -> memoryview:
        """Bytes that did not fit into the staging memory; they are freed with the last reference."""
        with self._asking:
            self._channel.send(Want(number))
            message, fd = self._channel.receive_in_writer()
        assert isinstance(message, Bytes)
        if message.size is None or fd is None:
            raise BackendError("a part of the state that was not staged is needed again, and may have changed since")
        try:
            mapped = mmap.mmap(fd, message.size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return memoryview(mapped)[:nbytes]

    def _tell_name(self, name: SaveName) -> None:
        # A trainer that is gone needs no answer; what it handed over is finished.
        with suppress(EOFError):
            self._channel.send(Named(str(name)))

    def _prune(self, message: Prune) -> Pruned:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # every look at the store repeats them; the trainer's own shows them
                self._replicas.check_writable()
                prune(self._context, message.branch, Retention.of(message.policy), message.tidy)
        except Exception as error:
            return Pruned(errors.text_of(error))
        self._replicas.look()
        self._tiers.look()
        return Pruned(None)


def prune(context: Context, branch: str, policy: Retention, tidy: bool) -> None:
    """Drop what `policy` does not keep on `branch`; with `tidy` also what an earlier run left when it was killed."""
    check_same_store(context)
    upkeep.prune_store(context, policy, branch)
    if tidy:
        upkeep.collect(context)


def _notes(caught: list[warnings.WarningMessage]) -> list[str]:
    return [errors.escaped(str(one.message)) for one in caught]


@contextmanager
def _mapped(fd: int, size: int) -> Iterator[memoryview]:
    """Staging memory, read-only."""
    try:
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    try:
        yield memoryview(mapped)
    finally:
        with suppress(BufferError):  # an error that is being handled still refers to it: freed with that
            mapped.close()


@contextmanager
def _held(before: tuple[Before, int] | None) -> Iterator[Held | None]:
    """What the memory of the snapshot before holds, for bases."""
    if before is None:
        yield None
        return
    message, fd = before
    with ExitStack() as mapped:
        try:
            memory = mapped.enter_context(_mapped(fd, message.size))
            spans = zip(message.offsets, message.sizes, strict=True)
            held = Held(SaveName.parse(message.save), [_slice(memory, start, size) for start, size in spans])
        except (OSError, ValueError):  # then they are read from the store
            held = None
        yield held


def _slice(memory: memoryview, start: int, size: int) -> memoryview:
    return np.frombuffer(memory, np.uint8, size, start).data if size else memoryview(b"")
