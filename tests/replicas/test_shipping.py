"""A save waits for as many copies as are required, for no more, and for no longer than its deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckstore import facts, floor, layout
from ckstore.errors import BackendError, CommittedUnderReplicatedError, ConflictError, FencedError
from ckstore.format.records import Configuration, Term
from ckstore.replicas import lag, terms
from ckstore.replicas.counting import deliver
from tests.replicas.trio import Trio, name_of


@pytest.fixture
def trio(tmp_path: Path) -> Callable[[int], Trio]:
    return lambda required: Trio(tmp_path, required)


def promoted(trio: Trio, to: str) -> Term:
    """A term under which another storage is the authority."""
    return terms.made(2, 2, to, Configuration(trio.places, trio.required))


def test_a_save_waits_for_the_fastest_copies_only(trio: Callable[[int], Trio]) -> None:
    three = trio(2)
    three.backend("s3").open.clear()
    shipping = three.shipping()
    shipping.ship(three.commit(1))
    shipping.ship(three.commit(2))
    assert (three.holds("s2"), three.holds("s3")) == ([1, 2], [])
    assert three.backend("s3").met.wait(60)
    three.backend("s3").open.set()
    shipping.close()
    assert three.holds("s3") == [1, 2]


def test_a_save_that_needs_no_copy_waits_for_none(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    for name in ("s2", "s3"):
        three.backend(name).open.clear()
    shipping = three.shipping()
    shipping.ship(three.commit(1))
    assert three.holds("s2") == three.holds("s3") == []
    for name in ("s2", "s3"):
        three.backend(name).open.set()
    shipping.close()
    assert three.holds("s2") == three.holds("s3") == [1]


def test_threads_that_save_at_once_are_all_answered(trio: Callable[[int], Trio]) -> None:
    three = trio(3)
    shipping = three.shipping()
    held = three.backend("s3")
    held.open.clear()
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(shipping.ship, record) for record in [three.commit(step) for step in (1, 2, 3, 4)]]
        assert held.met.wait(60)
        held.open.set()
        for save in saves:
            save.result(60)
    assert three.holds("s2") == three.holds("s3") == [1, 2, 3, 4]
    shipping.close()


def test_all_are_waited_for_if_all_are_required(trio: Callable[[int], Trio]) -> None:
    three = trio(3)
    shipping = three.shipping()
    shipping.ship(three.commit(1))
    assert three.holds("s2") == three.holds("s3") == [1]
    shipping.close()


def test_at_the_deadline_the_snapshot_stands_and_follows_later(trio: Callable[[int], Trio]) -> None:
    three = trio(3)
    dead = three.backend("s3")
    dead.down = True

    tries: list[float] = []

    def second_try_is_late() -> None:
        tries.append(three.clock.now)
        three.clock.now = 61.0 if len(tries) > 1 else 0.0

    dead.when_down = second_try_is_late
    shipping = three.shipping(60.0)
    record = three.commit(7)
    with pytest.raises(CommittedUnderReplicatedError) as caught:
        shipping.ship(record)
    error = caught.value
    assert (error.save, error.step, error.complete <= 2, error.required) == (name_of(record).nonce, 7, True, 3)
    assert dict(error.failed)["s3"] == "memory://s3 is down"
    assert three.holds("s1") == [7]
    dead.down = False
    shipping.close()
    assert three.holds("s3") == [7]


def test_the_error_of_a_copy_is_remembered_until_it_is_fed(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    dead = three.backend("s2")
    dead.down = True
    tries: list[None] = []
    again = threading.Event()

    def tried() -> None:  # by the second time the first is noted
        tries.append(None)
        if len(tries) > 1:
            again.set()

    dead.when_down = tried
    shipping = three.shipping()
    shipping.ship(three.commit(1))
    assert again.wait(60)
    shipping.close(0.0)
    note = lag.read_note(three.authority, three.places[1])
    assert note is not None
    assert note.error == "memory://s2 is down"
    dead.down = False
    shipping = three.shipping()
    shipping.ship(three.commit(2))
    shipping.close()
    note = lag.read_note(three.authority, three.places[1])
    assert note is not None
    assert note.error == ""
    assert three.holds("s2") == [1, 2]


def test_an_end_waits_for_no_copy_that_hangs(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    three.backend("s2").open.clear()
    shipping = three.shipping()
    shipping.ship(three.commit(1))
    assert three.backend("s2").met.wait(60)
    shipping.close(0.0)
    assert three.holds("s2") == []
    three.backend("s2").open.set()


def test_a_copy_that_believes_another_authority_stops_the_run(trio: Callable[[int], Trio]) -> None:
    three = trio(2)
    newer = promoted(three, "s3")
    for name in ("s2", "s3"):
        terms.place(three.backend(name), newer)
    shipping = three.shipping()
    with pytest.raises(FencedError, match="memory://s3 is the authority since term 2"):
        shipping.ship(three.commit(1))
    with pytest.raises(FencedError, match="memory://s3 is the authority"):
        shipping.check()
    shipping.close(0.0)


def test_an_authority_that_was_deposed_reports_nothing(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    shipping = three.shipping()
    assert shipping.check() == three.term
    record = three.commit(1)
    terms.place(three.backend("s1"), promoted(three, "s2"))
    with pytest.raises(FencedError, match="was committed at memory://s1, but counts for nothing"):
        shipping.ship(record)


def test_an_authority_that_was_wiped_takes_no_saves(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    shipping = three.shipping()
    three.backend("s1").delete(layout.term(1))
    with pytest.raises(FencedError, match=r"does not know term 1 any more.*ckstore promote"):
        shipping.check()


def test_an_authority_that_is_promoted_takes_saves_when_it_is_ready(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    again = promoted(three, "s1")
    terms.place(three.backend("s1"), again)
    shipping = three.shipping(term=again)
    with pytest.raises(ConflictError, match="is not finished"):
        shipping.check()
    terms.set_ready(three.backend("s1"), again)
    assert shipping.check() == again


def test_a_change_of_members_is_adopted_in_the_middle_of_a_save(trio: Callable[[int], Trio]) -> None:
    three = trio(2)
    shipping = three.shipping()
    shipping.check()
    record = three.commit(1)
    fewer = terms.made(2, 1, "s1", Configuration(three.places[:2], 2))
    for backend in three.backends.values():
        terms.place(backend, fewer)
    shipping.ship(record)
    assert shipping.term == fewer
    assert three.holds("s2") == [1]
    shipping.close()
    assert three.holds("s3") == []


def test_a_change_that_a_copy_knows_first_counts_again_under_it(trio: Callable[[int], Trio]) -> None:
    three = trio(2)
    shipping = three.shipping()
    fewer = terms.made(2, 1, "s1", Configuration(three.places[:2], 2))
    three.backend("s3").open.clear()
    held = three.backend("s2")
    held.open.clear()

    def placed() -> None:
        for backend in three.backends.values():
            terms.place(backend.inner, fewer)

    record = three.commit(1)
    placing = pytest.MonkeyPatch()
    real = terms.show

    def show(backend: object, term: Term) -> None:
        placing.undo()
        placed()  # after the authority's term was read, and before the copy's
        real(held, term)

    placing.setattr(terms, "show", show)
    held.open.set()
    shipping.ship(record)
    assert shipping.term == fewer
    assert three.holds("s2") == [1]
    three.backend("s3").open.set()
    shipping.close(0.0)


def test_two_terms_of_one_number_count_for_nothing(trio: Callable[[int], Trio]) -> None:
    three = trio(3)
    terms.place(three.backend("s3"), promoted(three, "s2"))
    other = promoted(three, "s1")
    terms.place(three.backend("s1"), other)
    terms.set_ready(three.backend("s1"), other)
    with pytest.raises(ConflictError, match=r"two terms have the number 2.*ckstore promote"):
        deliver(three.authority, three.contexts["memory://s3"], other, name_of(three.commit(1)))


def test_a_snapshot_that_goes_or_lies_below_the_floor_does_not_count(trio: Callable[[int], Trio]) -> None:
    three = trio(2)
    copy = three.contexts["memory://s2"]
    save = name_of(three.commit(1))
    deliver(three.authority, copy, three.term, save)
    facts.add(copy, save, "condemned-0123456789abcdef", {})
    with pytest.raises(ConflictError, match="being removed"):
        deliver(three.authority, copy, three.term, save)
    later = name_of(three.commit(2))
    floor.raise_to(three.contexts["memory://s3"], later.sequence + 10)
    with pytest.raises(ConflictError, match="below the floor"):
        deliver(three.authority, three.contexts["memory://s3"], three.term, later)


def test_an_authority_that_cannot_be_asked_after_the_commit_has_not_failed(trio: Callable[[int], Trio]) -> None:
    three = trio(1)
    shipping = three.shipping()
    record = three.commit(1)
    three.backend("s1").down = True
    with pytest.raises(CommittedUnderReplicatedError) as caught:
        shipping.ship(record)
    assert isinstance(caught.value.__cause__, BackendError)
    assert caught.value.failed == (("s1", "memory://s1 is down"),)
