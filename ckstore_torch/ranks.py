"""The ranks of one training run: what they agree on in the foreground, over the process group of the training.

Only short texts and numbers are exchanged, as bytes in tensors; nothing is pickled. Saves that are under way need no
collective: their ranks meet in the store, and tell each other of failures through the key-value store of the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ckstore import Member
from ckstore.errors import CkstoreError, FencedError, InvalidInputError, MismatchError, NotFoundError
from ckstore.ids import new_nonce
from ckstore.member import Owner, Peers, current_owner

MAX_MESSAGE = 256 << 20
"""Bytes of the largest message of one rank: a plan of some hundred thousand tensors is below it."""
FRAME = 1024
"""Bytes that a message of any length takes of the first collective."""
_LENGTH = 8
_log = logging.getLogger(__name__)
T = TypeVar("T")


class RankFailedError(CkstoreError):
    """Something that all ranks do together failed on another one; nothing of it was done here.

    `rank` is where, `reason` what was raised there, `kinds` the names of the classes of that.
    """

    def __init__(self, rank: int, reason: str, kinds: Sequence[str] = ()) -> None:
        self.rank = rank
        self.reason = reason
        self.kinds = tuple(kinds)
        super().__init__(f"rank {rank} failed: {reason}")


_ALIKE = {kind.__name__: kind for kind in (FencedError, InvalidInputError, NotFoundError)}
"""Errors that mean the same on every rank, and are raised as what they are."""


class _Outcome(msgspec.Struct):
    """What a rank has to say: a value, or the error that it met; and during what."""

    during: str
    value: bytes = b""
    error: str | None = None
    kinds: list[str] = []


class _Hello(msgspec.Struct):
    nonce: str
    owner: Owner


class Wire(Protocol):
    """How the ranks of a group reach each other."""

    rank: int
    world: int

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank; `RuntimeError` if one is gone or does not come."""

    def peers(self, nonce: str) -> Peers | None:
        """A way to tell the others of failures in the background, for the group that agreed on `nonce`."""


class Ranks:
    """The group of processes that train together. Every rank makes one at the same time.

    Whatever is done together ends with an exchange on every rank, whatever went wrong on one of them before it, an
    interrupt too: so none waits for one that will not come. Only a rank that is not running any more, or does not call,
    is waited for as long as the process group waits.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.rank, self.world = wire.rank, wire.world
        self._during = ""
        self._owners: tuple[Owner, ...] = ()
        hello = msgspec.msgpack.encode(_Hello(new_nonce(), current_owner()))
        everybody = [_decoded(rank, said, _Hello) for rank, said in enumerate(self.gather(hello))]
        self.nonce = everybody[0].nonce
        self._owners = tuple(one.owner for one in everybody)
        self._peers = wire.peers(self.nonce)
        self._ordinal = 0

    def next_member(self) -> Member:
        """This rank in the next save. Every rank has to ask as often as the others, for the same saves."""
        self._ordinal += 1
        return Member(self.rank, self.world, self.nonce, self._ordinal, self._owners, self._peers)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say during what is exchanged in it: if ranks are at different things, that is an error on all of them."""
        before, self._during = self._during, what
        try:
            yield
        finally:
            self._during = before

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank. `RankFailedError` names a rank whose process is found to be gone."""
        try:
            return self._wire.gather(data)
        except RuntimeError as error:  # of the backend: a peer is gone, or did not come in time
            for rank, owner in enumerate(self._owners):
                if owner.is_gone():
                    raise RankFailedError(rank, "its process is gone") from error
            raise

    def together(self, act: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Do `act` on every rank; if it fails on any, an error on all of them, and `undo` where it had succeeded.

        The rank that failed raises what it met, the others `RankFailedError`, or the same kind of error where that
        means the same everywhere.
        """
        result, error = _attempt(act)
        try:
            self._settle(b"", error)
        except BaseException:
            if error is None and undo is not None:
                undo(result)  # type: ignore[arg-type]
            raise
        return result  # type: ignore[return-value]

    def exchange(self, act: Callable[[], bytes]) -> list[bytes]:
        """Do `act` on every rank, as `together` does; what it gave on each, by rank."""
        return self._settle(*_attempt(act))

    def lead(self, act: Callable[[], bytes]) -> bytes:
        """Do `act` on rank 0 alone, and give what it gave, or its error, to all."""
        return self._settle(*(_attempt(act) if self.rank == 0 else (b"", None)))[0]

    def _settle(self, value: bytes | None, error: BaseException | None) -> list[bytes]:
        try:
            said = self.gather(msgspec.msgpack.encode(_outcome(self._during, value or b"", error)))
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"and the other ranks could not be told: {second!r}")
        if error is not None:
            raise error
        outcomes = [_decoded(rank, one, _Outcome) for rank, one in enumerate(said)]
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise _error_of(rank, outcome)
        for rank, outcome in enumerate(outcomes):
            if outcome.during != outcomes[0].during:
                raise InvalidInputError(
                    f"rank {rank} is at {outcome.during} where rank 0 is at {outcomes[0].during}: every rank has to "
                    "call the Checkpointer at the same steps, in the same order"
                )
        return [outcome.value for outcome in outcomes]


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except BaseException as error:  # an interrupt too: the others wait for this rank
        return None, error


def _outcome(during: str, value: bytes, error: BaseException | None) -> _Outcome:
    if error is None:
        return _Outcome(during, value)
    text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind is not object]
    return _Outcome(during, b"", text[:10_000], kinds)


def _decoded(rank: int, said: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(said, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidInputError(
            f"rank {rank} says what is not expected now: every rank has to make its Checkpointer, and to call it, in "
            "the same order"
        ) from error


def _error_of(rank: int, outcome: _Outcome) -> CkstoreError:
    assert outcome.error is not None
    kind = outcome.kinds[0] if outcome.kinds else ""
    if kind in _ALIKE:
        return _ALIKE[kind](f"rank {rank}: {outcome.error.partition(': ')[2]}")
    if kind == MismatchError.__name__:
        return InvalidInputError(f"rank {rank}: {outcome.error.partition(': ')[2]}")
    return RankFailedError(rank, outcome.error, outcome.kinds)


class GroupWire:
    """Ranks that a process group of torch.distributed connects."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidInputError("this process does not belong to the process group that it was given")

    def gather(self, data: bytes) -> list[bytes]:
        # Most messages are short: those take one collective, longer ones a second.
        first = self._gather(len(data).to_bytes(_LENGTH, "little") + data[: FRAME - _LENGTH], FRAME)
        lengths = [int.from_bytes(one[:_LENGTH], "little") for one in first]
        if max(lengths) > MAX_MESSAGE:
            raise InvalidInputError(f"rank {lengths.index(max(lengths))} has more than {MAX_MESSAGE} bytes to say")
        if max(lengths) <= FRAME - _LENGTH:
            return [one[_LENGTH : _LENGTH + length] for one, length in zip(first, lengths, strict=True)]
        return [one[:length] for one, length in zip(self._gather(data, max(lengths)), lengths, strict=True)]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """What every rank gave, padded to `size` bytes."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self._device())
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own, group=self._group)
        return [one.cpu().numpy().tobytes() for one in found]

    def peers(self, nonce: str) -> Peers | None:
        return KeyValuePeers.of(nonce, self._group)

    def _device(self) -> torch.device:
        """Where the process group takes tensors from: the CPU if it has a backend for that."""
        group: Any = self._group or dist.distributed_c10d._get_default_group()
        kinds = [device.type for device in group._device_types]
        if not kinds or "cpu" in kinds:
            return torch.device("cpu")
        if kinds[0] == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(kinds[0])


class KeyValuePeers:
    """`ckstore.member.Peers` over the key-value store by which the process group was formed."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def of(cls, nonce: str, group: dist.ProcessGroup | None) -> KeyValuePeers | None:
        """On a connection of its own, as the training may wait on the other; None where there is no such store."""
        with suppress(Exception):  # of any kind of store; without one failures are still seen in ckstore's own
            store = dist.distributed_c10d._get_process_group_store(group or dist.distributed_c10d._get_default_group())
            with suppress(Exception):
                store = store.clone()  # type: ignore[attr-defined]
            return cls(dist.distributed_c10d.PrefixStore(f"ckstore-{nonce}", store))
        return None

    def tell(self, ordinal: int, rank: int, reason: str) -> None:
        """Put it where the others look. The first who fails is named."""
        try:
            said = msgspec.msgpack.encode((rank, reason.encode("utf-8", "backslashreplace").decode()))
            # Only where nothing stands: what fails because another did must not hide it.
            self._store.compare_set(str(ordinal), "", said.hex())
        except Exception as error:
            _log.debug("the other ranks could not be told: %s", error)

    def told(self, ordinal: int) -> tuple[int, str] | None:
        try:
            if not self._store.check([str(ordinal)]):
                return None
            rank, reason = msgspec.msgpack.decode(bytes.fromhex(self._store.get(str(ordinal)).decode()),
                                                  type=tuple[int, str])  # fmt: skip
        except Exception as error:
            _log.debug("what other ranks say could not be read: %s", error)
            return None
        return rank, reason


def ranks_of(group: dist.ProcessGroup | None = None) -> Ranks | None:
    """The ranks of this run; None where one process trains alone. `InvalidInputError` for what is no process group."""
    if group is not None:
        _check_group(group)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    return Ranks(GroupWire(group))


def _check_group(group: object) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInputError(
            "process_group= is for several ranks, and torch.distributed is not initialized: call init_process_group "
            "before, or leave it out"
        )
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInputError(
            f"process_group= takes what torch.distributed.new_group gave (of a DeviceMesh its get_group()), not "
            f"{group!r:.80}"
        )
