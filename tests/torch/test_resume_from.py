"""`resume(ref=...)`: which snapshot a ref means, what is left behind, and that nothing is before it is certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreWarning, CorruptionError, FencedError, InvalidInputError, MismatchError, NotFoundError
from ckstore_torch import Box, Checkpointer
from ckstore_torch import checkpointer as checkpointer_module
from ckstore_torch.ranks import Ranks
from tests.torch.threaded_ranks import on_ranks


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a run was saved at steps 2, 4, 6 and 8, its value the step."""
    value = Box(0)
    with run(tmp_path / "store", value) as checkpointer:
        checkpointer.resume()
        for n in (2, 4, 6, 8):
            value.value = n
            checkpointer.save(n)
    return tmp_path / "store"


def run(store: Path, value: Box[int] | None = None, **options: Any) -> Checkpointer:
    extra = {"value": Box(0) if value is None else value, **options.pop("more", {})}
    return Checkpointer(store, extra=extra, **{"save": ["weights"], **options})


def states(store: Path, branch: str | None = None) -> dict[int, str]:
    """The condition of each snapshot, by step."""
    with ckstore.open(store) as opened:
        return {info.step: info.state for info in reversed(opened.snapshots(branch))}


ALL_GOOD = dict.fromkeys((2, 4, 6, 8), "ok")


def test_the_run_goes_on_from_there_and_what_came_after_is_left_behind(store: Path) -> None:
    value = Box(0)
    with run(store, value) as checkpointer:
        assert (checkpointer.resume(ref=4), value.value) == (4, 4)
        assert states(store) == {2: "ok", 4: "ok", 6: "fenced", 8: "fenced"}
        value.value = 50
        assert checkpointer.save(5).parent == checkpointer.store.resolve("step:4").id
    with run(store, value) as checkpointer:
        assert (checkpointer.resume(), value.value) == (5, 50)


def test_what_was_left_behind_can_be_named_in_its_turn(store: Path) -> None:
    value = Box(0)
    with run(store, value) as checkpointer:
        checkpointer.resume(ref=4)
        checkpointer.save(5)
        left = next(info.id for info in checkpointer.store.snapshots() if info.step == 8)
        assert (checkpointer.resume(ref=f"id:{left}"), value.value) == (8, 8)
        assert states(store)[5] == "fenced"
        assert (checkpointer.resume(), value.value) == (8, 8)


@pytest.mark.parametrize("ref", [4, np.int64(4), "4", "step:4", "main@4", "tag:good", "good", "id"])
def test_every_kind_of_ref_names_it(store: Path, ref: Any) -> None:
    with run(store, branch="other") as other:  # which has a step of that number too
        other.save(4)
    with run(store) as checkpointer:
        checkpointer.store.tag("good", "main@4")
        ref = checkpointer.store.resolve("good").id if ref == "id" else ref
        assert checkpointer.resume(ref=ref) == 4
        assert checkpointer.store.resolve("main").id == checkpointer.store.resolve("good").id


def test_a_step_is_one_of_the_runs_own_branch(store: Path) -> None:
    with run(store, Box(0), branch="other") as other:
        other.save(4)
        other.save(9)
        assert other.resume(ref=4) == 4
    assert states(store, "main") == ALL_GOOD
    assert states(store, "other") == {4: "ok", 9: "fenced"}


@pytest.mark.parametrize(("ref", "step"), [("latest", 8), ("main", 8), ("branch:main", 8), ("main@latest", 8)])
def test_the_newest_can_be_named_too(store: Path, ref: str, step: int) -> None:
    with run(store) as checkpointer:
        assert checkpointer.resume(ref=ref) == step
    assert states(store) == ALL_GOOD


def test_an_older_run_that_still_writes_is_shut_out(store: Path) -> None:
    with run(store) as older, run(store) as newer:
        older.resume()
        newer.resume(ref=6)
        with pytest.raises(FencedError):
            older.save(10)


def test_another_branch_begins_from_it(store: Path) -> None:
    value = Box(0)
    with run(store, value, branch="high-rate") as forked:
        assert (forked.resume(ref="main@6"), value.value) == (6, 6)
        forked.save(7)
        assert forked.resume() == 7
    assert states(store, "main") == ALL_GOOD


def test_a_branch_with_snapshots_of_its_own_is_not_begun_again(store: Path) -> None:
    with run(store, branch="other") as other:
        other.save(3)
        with pytest.raises(InvalidInputError, match=r"a snapshot of branch main, and branch other has .* resume\(\)"):
            other.resume(ref="main@6")
        assert other.resume() == 3


@pytest.mark.parametrize("ref", [5, "nothing", "id:0123456789abcdef", "other@4"])
def test_where_there_is_none_nothing_is_left_behind(store: Path, ref: Any) -> None:
    with run(store) as checkpointer, pytest.raises(NotFoundError):
        checkpointer.resume(ref=ref)
    assert states(store) == ALL_GOOD


@pytest.mark.parametrize("ref", [True, -1, "", 1.5, "what:ever"])
def test_what_is_no_ref_is_refused(store: Path, ref: Any) -> None:
    with run(store) as checkpointer, pytest.raises(InvalidInputError):
        checkpointer.resume(ref=ref)


def test_one_that_was_found_damaged_is_refused(store: Path) -> None:
    with run(store) as checkpointer:
        checkpointer.store.quarantine("step:4", "for the test")
        with pytest.raises(NotFoundError, match=r"4 is step 4 of branch main \(id:.*quarantined.*ckstore clear"):
            checkpointer.resume(ref=4)
        assert checkpointer.resume() == 8


def test_one_that_turns_out_damaged_is_an_error_and_the_newest_stays_the_newest(tmp_path: Path) -> None:
    weights = torch.empty(100_000)
    options: dict[str, Any] = {"extra": {"weights": weights}, "save": ["weights"]}
    with Checkpointer(tmp_path / "store", **options) as checkpointer:
        for n in (1, 2):
            weights.normal_(generator=torch.Generator().manual_seed(n))
            checkpointer.save(n)
        named = checkpointer.store.resolve(1).id
    (pack,) = (path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file() and named in str(path))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    weights.zero_()
    with Checkpointer(tmp_path / "store", **options) as checkpointer:
        with pytest.raises(CorruptionError), pytest.warns(CkstoreWarning, match="set aside"):
            checkpointer.resume(ref=1)
        assert not weights.any()
        assert states(tmp_path / "store") == {1: "quarantined", 2: "ok"}
        assert checkpointer.resume() == 2


class Stubborn:
    """Takes no state."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this one")


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    store, stubborn = tmp_path / "store", Stubborn()
    with run(store, more={"stubborn": stubborn}) as checkpointer:
        for n in (1, 2):
            checkpointer.save(n)
        with pytest.raises(ValueError, match="not this one"):
            checkpointer.resume(ref=1)
    with run(store, more={"another": []}) as checkpointer, pytest.raises(MismatchError):
        checkpointer.resume(ref=1)
    assert states(store) == {1: "ok", 2: "ok"}


def test_when_the_branch_cannot_be_taken_over_everything_is_put_back(store: Path, monkeypatch: Any) -> None:
    value = Box(70)
    with run(store, value) as checkpointer:
        def refused(*args: Any, **options: Any) -> int:
            raise FencedError("somebody was faster")

        with monkeypatch.context() as patch:
            patch.setattr(checkpointer.store, "open_epoch", refused)
            with pytest.raises(FencedError):
                checkpointer.resume(ref=4)
        assert value.value == 70
        assert checkpointer.resume() == 8


def test_several_ranks_go_on_from_what_rank_0_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "ranks_of", lambda ranks: ranks)
    store = tmp_path / "store"

    def saving(ranks: Ranks) -> None:
        value = Box(0)
        with run(store, value, process_group=ranks) as checkpointer:
            for n in (1, 2, 3):
                value.value = 10 * n + ranks.rank
                checkpointer.save(n)

    def resuming(ranks: Ranks) -> Any:
        value = Box(0)
        with run(store, value, process_group=ranks) as checkpointer:
            with pytest.raises(InvalidInputError, match=r"rank 1 is at resume where rank 0 is at resume\(ref=2\)"):
                checkpointer.resume(ref=2 if ranks.rank == 0 else None)
            at = checkpointer.resume(ref="2")
            saved = value.value
            checkpointer.save(4)
            return at, saved

    on_ranks(2, saving)
    assert on_ranks(2, resuming) == [(2, 20), (2, 21)]
    assert states(store) == {1: "ok", 2: "ok", 3: "fenced", 4: "ok"}


def test_one_process_goes_on_from_one_of_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "ranks_of", lambda ranks: ranks)

    def saving(ranks: Ranks) -> None:
        with run(tmp_path / "store", Box(7), process_group=ranks) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2)

    on_ranks(2, saving)
    value = Box(0)
    with run(tmp_path / "store", value) as checkpointer:
        with pytest.raises(InvalidInputError, match="saved by 2 ranks"):
            checkpointer.resume(ref=1)
        assert (checkpointer.resume(ref=1, reshape=True), value.value) == (1, 7)
