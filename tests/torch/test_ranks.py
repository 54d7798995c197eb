"""What ranks do together, with a thread for each rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from ckstore.errors import CorruptionError, FencedError, InvalidInputError, MismatchError, NotFoundError
from ckstore.member import current_owner
from ckstore_torch import ranks as ranks_module
from ckstore_torch.ranks import GroupWire, KeyValuePeers, RankFailedError, Ranks, ranks_of
from tests.torch.threaded_ranks import on_ranks

pytestmark = pytest.mark.timeout(60)


def test_each_gets_what_all_gave_by_rank() -> None:
    def act(ranks: Ranks) -> Any:
        return ranks.exchange(lambda: bytes([ranks.rank])), ranks.lead(lambda: b"%d leads" % ranks.rank), ranks.nonce

    found = on_ranks(3, act)
    assert [one[:2] for one in found] == [([b"\0", b"\1", b"\2"], b"0 leads")] * 3
    assert len({one[2] for one in found}) == 1


def test_saves_are_numbered_alike() -> None:
    def act(ranks: Ranks) -> Any:
        members = [ranks.next_member(), ranks.next_member()]
        assert [member.rank for member in members] == [ranks.rank] * 2
        assert members[0].owners == (current_owner(),) * 2
        return [(member.group, member.ordinal, member.world) for member in members]

    first, second = on_ranks(2, act)
    assert first == second
    assert [ordinal for _, ordinal, _ in first] == [1, 2]


@pytest.mark.parametrize(
    ("error", "elsewhere", "text"),
    [
        (ValueError("odd"), RankFailedError, "rank 1 failed: ValueError: odd"),
        (OSError(28, "no space"), RankFailedError, "rank 1 failed: OSError: [Errno 28] no space"),
        (InvalidInputError("odd"), InvalidInputError, "rank 1: odd"),
        (NotFoundError("nothing"), NotFoundError, "rank 1: nothing"),
        (FencedError("newer"), FencedError, "rank 1: newer"),
        (MismatchError(["a"], [], []), InvalidInputError, "rank 1: "),
        (CorruptionError("bad"), RankFailedError, "rank 1 failed: CorruptionError: bad"),
        (KeyboardInterrupt(), RankFailedError, "rank 1 failed: KeyboardInterrupt"),
        (SystemExit(3), RankFailedError, "rank 1 failed: SystemExit: 3"),
        (ValueError("\udc80" * 30_000), RankFailedError, "rank 1 failed: ValueError: \\udc80"),
    ],
)
def test_what_fails_on_one_rank_is_an_error_on_all(
    error: BaseException, elsewhere: type[Exception], text: str
) -> None:
    undone: list[int] = []

    def act(ranks: Ranks) -> Any:
        def work() -> int:
            if ranks.rank == 1:
                raise error
            return ranks.rank

        try:
            ranks.together(work, undo=undone.append)
        except BaseException as found:
            after = ranks.exchange(lambda: b"goes on")  # nobody is out of step
            return found, after

    found = on_ranks(3, act)
    assert found[1][0] is error
    for other in (found[0][0], found[2][0]):
        assert type(other) is elsewhere
        assert str(other).startswith(text)
    assert [after for _, after in found] == [[b"goes on"] * 3] * 3
    assert sorted(undone) == [0, 2]


def test_an_error_says_of_what_kinds_it_is() -> None:
    def act(ranks: Ranks) -> Any:
        class Worse(CorruptionError):
            """A kind of its own."""

        with pytest.raises((Worse, RankFailedError)) as found:
            ranks.together(lambda: _raise(Worse("bad")) if ranks.rank == 0 else None)
        return found.value

    assert "CorruptionError" in on_ranks(2, act)[1].kinds


def test_every_rank_raises_its_own_error() -> None:
    def act(ranks: Ranks) -> Any:
        with pytest.raises(ValueError, match=r"\d") as found:
            ranks.together(lambda: _raise(ValueError(str(ranks.rank))))
        return str(found.value)

    assert on_ranks(2, act) == ["0", "1"]


def test_ranks_at_different_things_are_told_so() -> None:
    def act(ranks: Ranks) -> Any:
        with ranks.during(f"step {ranks.rank // 2}"), pytest.raises(InvalidInputError) as found:
            ranks.together(lambda: None)
        with ranks.during("the same"):
            ranks.together(lambda: None)
        return str(found.value)

    found = on_ranks(4, act)
    assert len(set(found)) == 1
    assert "rank 2 is at step 1 where rank 0 is at step 0" in found[0]


def test_a_rank_that_says_something_else_is_named() -> None:
    def act(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            return ranks.gather(b"\xff plainly nothing")
        with pytest.raises(InvalidInputError, match="rank 1 says what is not expected"):
            ranks.together(lambda: None)
        return None

    on_ranks(2, act)


def test_a_rank_whose_process_is_gone_is_named() -> None:
    def act(ranks: Ranks) -> Any:
        ranks._wire.broken = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="connection closed"):  # nobody is known to be gone
            ranks.together(lambda: None)
        ranks._owners = (ranks._owners[0], _ended(ranks._owners[1]))
        with pytest.raises(RankFailedError, match="rank 1 failed: its process is gone"):
            ranks.together(lambda: None)
        with pytest.raises(ValueError, match="mine") as found:  # what this rank met itself comes first
            ranks.together(lambda: _raise(ValueError("mine")))
        return found.value.__notes__

    for notes in on_ranks(2, act):
        assert "could not be told" in notes[0]


def test_a_message_that_is_too_long_is_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "MAX_MESSAGE", 5000)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wire = GroupWire()
        assert wire.gather(b"") == [b""]
        for length in (1, 1015, 1016, 1017, 1024, 1025, 5000):  # one collective up to 1016 bytes, two above
            assert wire.gather(bytes([7]) * length) == [bytes([7]) * length]
        with pytest.raises(InvalidInputError, match="rank 0 has more than 5000 bytes"):
            wire.gather(b"\0" * 5001)
        assert ranks_of() is None
        with pytest.raises(InvalidInputError, match="does not belong"):
            ranks_of(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_who_trains_alone_is_no_group() -> None:
    assert ranks_of() is None


def test_the_first_failure_that_is_told_is_the_one_that_is_heard() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    one, other = KeyValuePeers(store), KeyValuePeers(store)
    assert other.told(1) is None
    one.tell(1, 2, "the disk \udc80 is full")
    other.tell(1, 0, "because rank 2 failed")
    assert other.told(1) == (2, "the disk \\udc80 is full")
    assert other.told(2) is None
    store.set("3", "no hex")
    assert other.told(3) is None


def _ended(owner: Any) -> Any:
    """One that has ended: no process has a start time like that."""
    return msgspec.structs.replace(owner, start=owner.start + 1)


def _raise(error: BaseException) -> Any:
    raise error
