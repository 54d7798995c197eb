"""Promotion and changes of members that are cut short at any call: the next one finishes, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore import floor, layout, saver
from ckstore.errors import BackendError, CkstoreError, ConflictError, InvalidInputError
from ckstore.format.records import Configuration
from ckstore.replicas import membership, terms
from ckstore.replicas.counting import deliver
from ckstore.replicas.promotion import promote
from ckstore.saver import SaveRequest
from ckstore.state.capture import capture
from tests.replicas.trio import Trio, name_of

pytestmark = pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")


class Cut:
    """Fails every call of all storages from the n-th on, until it is mended."""

    def __init__(self, three: Trio, number: int) -> None:
        self.left = number
        self.fired = False
        self.backends = three.backends.values()
        for backend in self.backends:
            backend.before = self._count

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.fired = True
            raise BackendError("cut short", retryable=True)

    def mend(self) -> None:
        for backend in self.backends:
            backend.before = lambda: None


@pytest.fixture
def three(tmp_path: Path) -> Trio:
    """Two snapshots that count on `s2`, one of them also on `s3`; all were complete before."""
    made = Trio(tmp_path, 2)
    for backend in made.backends.values():
        terms.set_filled(backend, made.term)
    for step, names in ((1, ("s2", "s3")), (2, ("s2",))):
        save = name_of(made.commit(step))
        for name in names:
            deliver(made.authority, made.at(terms.place_of(made.term, name)), made.term, save)
    return made


@pytest.mark.parametrize("number", range(0, 120, 3))
def test_a_promotion_that_was_cut_short_is_finished_by_the_next(three: Trio, number: int) -> None:
    cut = Cut(three, number)
    try:
        promote(three, [three.term], "s3")
    except CkstoreError:
        assert cut.fired
    cut.mend()
    try:
        done = promote(three, [three.term], "s3")
    except InvalidInputError as error:
        assert "is the authority already" in str(error)
    else:
        assert done.term.authority == "s3"
    assert three.holds("s3") == [1, 2]
    newest = terms.read_newest(three.backend("s3"))
    assert newest is not None
    assert terms.own_term(three.backend("s3"), newest).promoted == newest.promoted
    after = saver.save(three.at(three.places[2]), capture({"step": 3}, chunk_size=4096), SaveRequest(3)).record
    assert name_of(after).sequence > terms.first_sequence(newest.promoted)


def test_the_cuts_reach_the_end(three: Trio) -> None:
    cut = Cut(three, 10**6)
    promote(three, [three.term], "s3")
    assert 10**6 - cut.left <= 120


def test_what_the_former_authority_still_decides_is_void_at_the_next(three: Trio) -> None:
    promote(three, [three.term], "s3")
    late = three.commit(3)  # by a run that does not know yet
    with pytest.raises(CkstoreError):
        deliver(three.authority, three.at(three.places[2]), three.term, name_of(late))
    assert three.holds("s3") == [1, 2]


def test_a_member_that_fails_to_be_taken_over_from_is_done_without_if_it_may(three: Trio) -> None:
    three.backend("s1").down = True
    done = promote(three, [three.term], "s3")
    assert list(done.silent) == ["memory://s1"]
    assert three.holds("s3") == [1, 2]


def test_too_few_members_are_refused_before_anything_is_placed(three: Trio) -> None:
    three.backend("s1").down = three.backend("s2").down = True
    with pytest.raises(ConflictError, match=r"memory://s1: memory://s1 is down; memory://s2"):
        promote(three, [three.term], "s3")
    assert three.backend("s3").list(layout.TERMS) == ["terms/0000000001", "terms/filled"]
    assert promote(three, [three.term], "s3", force=True).forced
    assert three.holds("s3") == [1]


def test_two_terms_of_one_number_are_settled_by_a_third(three: Trio) -> None:
    for name in ("s2", "s3"):
        other = terms.made(2, 2, name, Configuration(three.places, 2))
        terms.place(three.backend(name), other)
    done = promote(three, [three.term], "s2")
    assert (done.term.number, done.term.former) == (3, [])
    assert three.holds("s2") == [1, 2]


def test_later_saves_than_the_term_allows_are_refused(three: Trio) -> None:
    floor.raise_to(three.at(three.places[1]), terms.first_sequence(9))
    with pytest.raises(ConflictError, match="a later authority"):
        promote(three, [three.term], "s3")


def test_a_place_that_is_no_member_is_not_promoted(three: Trio) -> None:
    with pytest.raises(InvalidInputError, match=r"memory://s9 is no member.*memory://s1, memory://s2"):
        promote(three, [three.term], "memory://s9")


@pytest.mark.parametrize("number", range(0, 60, 2))
def test_a_change_that_was_cut_short_is_settled_later(three: Trio, number: int) -> None:
    fewer = Configuration(three.places[:2], 2)
    cut = Cut(three, number)
    try:
        fresh = membership.change(three.authority, three.term, three, fewer)
        membership.settle(three.authority, fresh, three)
    except CkstoreError:
        assert cut.fired
    cut.mend()
    term = terms.own_term(three.backend("s1"), three.term)
    if [place.name for place in term.members] == ["s1", "s2", "s3"]:  # nothing was placed
        term = membership.change(three.authority, term, three, fewer)
    settled, why = membership.settle(three.authority, term, three)
    assert (why, settled.former, [place.name for place in settled.members]) == ("", [], ["s1", "s2"])
    assert three.holds("s2") == [1, 2]


def test_a_change_is_undone_without_those_that_it_needed(three: Trio) -> None:
    changed = membership.change(three.authority, three.term, three, Configuration(three.places[:2], 2))
    assert [len(one.members) for one in changed.former] == [3]
    back = membership.change(three.authority, changed, three, Configuration(three.places, 2))
    assert back.former == []


def test_a_change_waits_for_copies_that_lack_something(three: Trio) -> None:
    three.commit(3)
    changed = membership.change(three.authority, three.term, three, Configuration(three.places, 3))
    three.backend("s3").down = True
    same, why = membership.settle(three.authority, changed, three)
    assert (same, "memory://s3 is down" in why) == (changed, True)
    three.backend("s3").down = False
    settled, why = membership.settle(three.authority, changed, three)
    assert (settled.required, settled.former, why) == (3, [], "")
    assert three.holds("s3") == [1, 2, 3]
