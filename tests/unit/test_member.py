"""Who a rank is, how its saves are named, and what it tells the others."""

from __future__ import annotations

import pytest
from blake3 import blake3

from ckstore.errors import BackendError, InvalidInputError, SaveFailedError
from ckstore.member import ATTEMPTS, Member, reason_of

GROUP = "00112233445566aa"


class Heard:
    """Peers that keep what was told first."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, str]] = []

    def tell(self, ordinal: int, rank: int, reason: str) -> None:
        self.said.append((ordinal, rank, reason))

    def told(self, ordinal: int) -> tuple[int, str] | None:
        return next(((rank, reason) for number, rank, reason in self.said if number == ordinal), None)


def test_all_ranks_name_a_save_alike() -> None:
    assert Member(0, 4, GROUP, 7).nonces() == Member(3, 4, GROUP, 7).nonces()
    assert Member(0, 4, GROUP, 7).nonce(2) == blake3(b"ckstore save 00112233445566aa 7 2").hexdigest()[:16]


def test_every_save_and_attempt_has_a_name_of_its_own() -> None:
    groups = (GROUP, GROUP[::-1])
    names = [name for group in groups for ordinal in range(50) for name in Member(0, 2, group, ordinal).nonces()]
    assert len(set(names)) == len(names) == 2 * 50 * ATTEMPTS


@pytest.mark.parametrize(
    "wrong",
    [(2, 2, GROUP, 0), (-1, 2, GROUP, 0), (0, 0, GROUP, 0), (0, 2, GROUP.upper(), 0), (0, 2, GROUP + "\n", 0)],
)
def test_what_is_no_member_is_refused(wrong: tuple[int, int, str, int]) -> None:
    with pytest.raises(InvalidInputError, match="no such member"):
        Member(*wrong)


def test_what_goes_wrong_is_told_once_and_goes_on() -> None:
    heard = Heard()
    member = Member(1, 3, GROUP, 5, peers=heard)
    member.check_told(50)
    with pytest.raises(BackendError, match="gone"), member.telling():
        raise BackendError("the disk is gone")
    assert heard.said == [(5, 1, "BackendError: the disk is gone")]
    with pytest.raises(SaveFailedError, match="step 50 failed on rank 1: BackendError: the disk is gone"):
        Member(2, 3, GROUP, 5, peers=heard).check_told(50)
    Member(2, 3, GROUP, 6, peers=heard).check_told(51)


def test_what_another_rank_failed_of_is_not_told_again() -> None:
    heard = Heard()
    with pytest.raises(SaveFailedError), Member(1, 3, GROUP, 5, peers=heard).telling():
        raise SaveFailedError(2, 50, "the disk is gone")
    assert heard.said == []
    with pytest.raises(SaveFailedError), Member(2, 3, GROUP, 5, peers=heard).telling():
        raise SaveFailedError(2, 50, "the disk is gone")
    assert heard.said == [(5, 2, "the disk is gone")]


def test_an_interrupt_is_told_too() -> None:
    heard = Heard()
    with pytest.raises(KeyboardInterrupt), Member(0, 2, GROUP, 0, peers=heard).telling():
        raise KeyboardInterrupt
    assert heard.said == [(0, 0, "KeyboardInterrupt: ")]


def test_a_reason_is_one_of_bounded_length() -> None:
    assert len(reason_of(ValueError("x" * 5000))) == 1000
