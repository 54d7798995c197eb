"""A store on several storages as its user has it: opening, saving, losing one, going on elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import (
    CkstoreError,
    CkstoreWarning,
    CommittedUnderReplicatedError,
    ConflictError,
    FencedError,
    InvalidInputError,
)
from ckstore.replicas import terms
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend
from tests.background.conftest import Writer, writer

__all__ = ["writer"]  # a fixture

Open = Callable[..., Store]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_here(tmp_path: Path) -> Iterator[Open]:
    """Open the store at `name` in the folder of this test, with other folders there as its copies."""
    with ExitStack() as opened:

        def open_(name: str, *copies: str, **options: Any) -> Store:
            replicas = [{"url": str(tmp_path / copy), "role": "copy"} for copy in copies] or None
            given = {"cache_dir": tmp_path / "cache", "chunk_size": 4096, "replicas": replicas, **options}
            return opened.enter_context(open_store(tmp_path / name, **given))

        yield open_


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(step, step + 3000.0), "step": step}


def steps(store: Store) -> list[int]:
    return [info.step for info in store.snapshots()]


def test_a_copy_restores_what_was_saved_at_the_authority(open_here: Open) -> None:
    with open_here("a", "b", "c", create=True, required=3) as store:
        store.save(state(1), step=1)
        store.save(state(2), step=2, tags=["best"])
    for name in ("b", "c"):
        copy = open_here(name)
        assert copy.id == store.id
        assert steps(copy) == [2, 1]
        assert np.array_equal(copy.restore("best")["w"], state(2)["w"])
        assert copy.verify().ok


def test_members_are_known_to_later_openings(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    with open_here("a") as store:
        store.save(state(1), step=1)
        assert [(one.name, one.role, one.health) for one in store.replicas.members()] == [
            ("s1", "authority", "ok"),
            ("s2", "copy", "ok"),
        ]
    assert steps(open_here("b")) == [1]


def test_a_save_in_the_background_waits_for_the_copies(open_here: Open) -> None:
    store = open_here("a", "b", create=True, required=2)
    info = store.save_async(state(1), step=1).wait()
    assert open_here("b").resolve().id == info.id


def test_what_is_not_required_follows_before_the_writer_ends(open_here: Open) -> None:
    with open_here("a", "b", create=True) as store:
        for step in (1, 2, 3):
            store.save_async(state(step), step=step).wait()
    assert steps(open_here("b")) == [3, 2, 1]


def test_of_several_ranks_the_first_ships(open_here: Open) -> None:
    open_here("a", "b", create=True, required=2).close()
    stores = [open_here("a"), open_here("a")]
    members = [ckstore.Member(rank, 2, "0123456789abcdef", 0) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        saves = [
            pool.submit(store.save, state(member.rank), step=1, member=member)
            for store, member in zip(stores, members, strict=True)
        ]
        infos = [save.result(100) for save in saves]
    assert infos[0].id == infos[1].id
    assert [bool(store.replicas.is_feeding) for store in stores] == [True, False]
    copy = open_here("b")
    assert [int(copy.restore(rank=rank)["step"]) for rank in (0, 1)] == [0, 1]


def test_a_copy_may_be_encrypted_by_itself(open_here: Open, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_text("00112233445566778899aabbccddeeff" * 2)
    key.chmod(0o600)
    copies = [{"url": str(tmp_path / "b"), "encryption_key": f"file:{key}"}]
    with open_here("a", create=True, replicas=copies, required=2) as store:
        store.save(state(1), step=1)
        store.save_async(state(2), step=2).wait()
    with pytest.raises(InvalidInputError, match="encrypted"):
        open_here("b")
    copy = open_here("b", encryption_key=f"file:{key}")
    assert steps(copy) == [2, 1]
    assert np.array_equal(copy.restore()["w"], state(2)["w"])


def test_what_was_pruned_goes_from_the_copies(open_here: Open) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        for step in (1, 2, 3):
            store.save_async(state(step), step=step, keep={"keep_last": 1}).wait()
    assert steps(open_here("b")) == [3]


def test_what_is_tagged_and_dropped_by_a_run_follows(open_here: Open) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        for step in (1, 2, 3):
            store.save(state(step), step=step)
        store.tag("best", 2)
        store.prune({"keep_last": 1})
    copy = open_here("b")
    assert steps(copy) == [3, 2]
    assert copy.tags() == {"best": copy.resolve(2).id}


@pytest.mark.parametrize(
    "act",
    [
        lambda copy: copy.save(state(9), step=9),
        lambda copy: copy.save_async(state(9), step=9),
        lambda copy: copy.prune({"keep_last": 1}),
        lambda copy: copy.gc(),
        lambda copy: copy.drop(1),
        lambda copy: copy.tag("best", 1),
        lambda copy: copy.untag("best"),
        lambda copy: copy.open_epoch(),
        lambda copy: copy.quarantine(1, "why"),
        lambda copy: copy.clear(1),
    ],
    ids=["save", "save_async", "prune", "gc", "drop", "tag", "untag", "open_epoch", "quarantine", "clear"],
)
def test_a_copy_is_only_read(open_here: Open, tmp_path: Path, act: Callable[[Store], object]) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        store.save(state(1), step=1)
    with pytest.raises(InvalidInputError, match=rf"b is a copy and can only be read: the authority is file://{tmp_path}/a;"):
        act(open_here("b"))


def blocked(tmp_path: Path, name: str) -> None:
    """Nothing can be written at a place any more: a file is where a folder has to be."""
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).write_text("in the way")


def unblocked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).unlink()


@pytest.mark.parametrize("in_background", [False, True])
def test_at_the_deadline_the_snapshot_is_saved_and_follows_later(
    open_here: Open, tmp_path: Path, in_background: bool
) -> None:
    open_here("a", "b", create=True, required=2).close()
    blocked(tmp_path, "b")
    with open_here("a", replica_deadline=0.0) as store:
        with pytest.raises(CommittedUnderReplicatedError, match=r"on 1 of the 2 storages") as caught:
            if in_background:
                pending = store.save_async(state(1), step=1)
                assert pending.exception() is not None
                assert pending.is_saved()
                assert pending.saved() == caught_snapshot(pending)
                pending.wait()
            else:
                store.save(state(1), step=1)
        assert caught.value.snapshot.step == 1
        assert store.resolve().id == caught.value.save == caught.value.snapshot.id
    unblocked(tmp_path, "b")
    with open_here("a") as store:
        store.save(state(2), step=2)
    assert steps(open_here("b")) == [2, 1]


def caught_snapshot(pending: ckstore.PendingSave) -> object:
    error = pending.exception()
    assert isinstance(error, CommittedUnderReplicatedError)
    return error.snapshot


def test_nobody_asked_and_is_warned(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    blocked(tmp_path, "b")
    store = open_here("a", replica_deadline=0.0)
    store.save_async(state(1), step=1)
    with pytest.warns(CkstoreWarning, match="the snapshot of step 1 is saved, but on 1 of the 2"):
        store.wait()
    unblocked(tmp_path, "b")


def test_a_writer_that_died_after_the_commit_is_followed_by_one_that_ships(
    open_here: Open, writer: Writer
) -> None:
    store = open_here("a", "b", create=True, required=2)
    writer.does(at="committed", act="die")
    info = store.save_async(state(1), step=1).wait()
    assert open_here("b").resolve().id == info.id


_DIES = """
import os, signal, sys
from ckstore.replicas.shipping import Shipping
from ckstore.store import open_store
Shipping.ship = lambda self, record: os.kill(os.getpid(), signal.SIGKILL)
store = open_store(sys.argv[1], cache_dir=sys.argv[2])
store.save({"step": 1}, step=1)
"""


def test_what_a_killed_process_did_not_ship_is_shipped_by_the_next(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    died = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path / "a"), str(tmp_path / "cache")], cwd=ROOT, timeout=100
    )
    assert died.returncode == -signal.SIGKILL
    assert steps(open_here("b")) == []
    with open_here("a") as store:
        assert steps(store) == [1]
        store.save(state(2), step=2)
    assert steps(open_here("b")) == [2, 1]


def test_a_lost_authority_is_read_elsewhere_and_promoted(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", "c", create=True, required=2) as store:
        store.save(state(1), step=1)
    shutil.rmtree(tmp_path / "a")
    with pytest.warns(CkstoreWarning, match="opened at .*b, to be read.*ckstore promote"):
        there = open_here("a", "b", "c")
    assert np.array_equal(there.restore()["w"], state(1)["w"])
    with pytest.raises(ConflictError, match="ckstore promote"):
        there.save(state(2), step=2)
    done = there.replicas.promote()
    assert (done.term.number, done.term.authority, done.forced) == (2, "s2", False)
    there.save(state(2), step=2)
    there.close()
    with open_here("b") as store:
        store.replicas.reseed("s1")
        assert [one.health for one in store.replicas.members()] == ["ok"] * 3
    assert steps(open_here("a")) == [2, 1]


def test_an_empty_place_is_not_made_a_new_store_while_copies_have_it(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        store.save(state(1), step=1)
    shutil.rmtree(tmp_path / "a")
    with pytest.warns(CkstoreWarning, match="ckstore promote"):
        there = open_here("a", "b", create=True)
    assert there.id == store.id
    assert not (tmp_path / "a" / "config").exists()


def test_an_authority_without_its_terms_takes_no_saves(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    shutil.rmtree(tmp_path / "a" / "terms")
    with pytest.raises(ConflictError, match=r"knows this store under term 1.*wiped.*ckstore promote"):
        open_here("a", "b")


def test_the_run_of_a_lost_authority_is_fenced(open_here: Open, tmp_path: Path) -> None:
    old = open_here("a", "b", create=True, required=2)
    old.save(state(1), step=1)
    with open_here("b") as copy:
        copy.replicas.promote()
    with pytest.raises(FencedError, match=r"b is the authority since term 2"):
        old.save(state(2), step=2)
    with pytest.raises(FencedError, match=r"b is the authority since term 2"):
        old.save_async(state(2), step=2)


def test_the_same_place_is_promoted_again_after_it_was_wiped(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        store.save(state(1), step=1, tags=["best"])
    shutil.rmtree(tmp_path / "a")
    with open_here("b") as copy:
        copy.replicas.promote(str(tmp_path / "a"))
    with open_here("a") as again:
        assert np.array_equal(again.restore("best")["w"], state(1)["w"])
        again.save(state(2), step=2)
        assert again.verify().ok
    assert steps(open_here("b")) == [2, 1]


def test_too_few_are_promoted_by_force_only(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", create=True) as store:
        store.save(state(1), step=1)
    shutil.rmtree(tmp_path / "a")
    with open_here("b") as copy:
        with pytest.raises(ConflictError, match=r"too few storages answer.*/a: there is no copy.*--force"):
            copy.replicas.promote()
        done = copy.replicas.promote(force=True)
        assert done.forced
        copy.save(state(2), step=2)


def test_nothing_is_promoted_twice(open_here: Open) -> None:
    store = open_here("a", "b", create=True)
    with pytest.raises(InvalidInputError, match="is the authority already"):
        store.replicas.promote()


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"replicas": "b"}, "replicas is a list"),
    ({"replicas": [{"place": "b"}]}, "a replica has url"),
    ({"replicas": [{"url": "{tmp}/b", "role": "leader"}]}, "role is 'authority' or 'copy'"),
    ({"replicas": [{"url": "{tmp}/b"}, {"url": "{tmp}/b"}]}, "twice"),
    ({"replicas": [{"url": "{tmp}/b", "required": 2}], "required": 1}, "required is said twice"),
    ({"replicas": [{"url": "{tmp}/b"}], "required": 0}, "required is a number"),
    ({"replicas": [{"url": "{tmp}/b"}], "required": 3}, "required is a number from 1 to 2"),
    ({"replicas": [{"url": "{tmp}/b", "role": "authority"}]}, "where its authority is opened"),
    ({"replicas": [{"url": "{tmp}/a", "role": "copy"}, {"url": "{tmp}/b"}]}, "called a copy"),
    ({"required": 2}, "required is a number from 1 to 1"),
    ({"replica_deadline": -1}, "replica_deadline is a number of seconds"),
]


@pytest.mark.parametrize(("options", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_mistakes_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    open_store(tmp_path / "a", create=True, cache_dir=tmp_path / "cache").close()
    given = dict(options)
    if isinstance(given.get("replicas"), list):
        given["replicas"] = [
            {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in one.items()}
            for one in given["replicas"]
        ]
    with pytest.raises(InvalidInputError, match=said):
        open_store(tmp_path / "a", cache_dir=tmp_path / "cache", **given)
    assert LocalBackend(str(tmp_path / "a")).list("terms/") == []


def test_the_authority_may_stand_among_the_replicas(open_here: Open, tmp_path: Path) -> None:
    places = [{"url": str(tmp_path / "a"), "role": "authority", "required": 2}, {"url": str(tmp_path / "b")}]
    with open_here("a", create=True, replicas=places) as store:
        store.save(state(1), step=1)
    assert steps(open_here("b", replicas=places)) == [1]


DIFFERENCES: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("b", "c"), {}, r"/c is no member.*ckstore replicas add"),
    (("c",), {}, r"/c is no member"),
    (("b",), {"required": 1}, r"required is 2 for this store.*ckstore replicas require"),
]


@pytest.mark.parametrize(("copies", "options", "said"), DIFFERENCES)
def test_other_members_than_those_recorded_are_refused(
    open_here: Open, copies: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    open_here("a", "b", create=True, required=2).close()
    with pytest.raises(InvalidInputError, match=said):
        open_here("a", *copies, **options)


def test_a_member_that_is_left_out_is_named(open_here: Open) -> None:
    open_here("a", "b", "c", create=True).close()
    with pytest.raises(InvalidInputError, match=r"also at file://.*/c, which replicas= leaves out.*replicas remove"):
        open_here("a", "b")


def test_a_replica_of_another_store_is_refused(open_here: Open) -> None:
    open_here("b", create=True).close()
    open_here("a", create=True).close()
    with pytest.raises(InvalidInputError, match=r"/b holds another store"):
        open_here("a", "b")


def test_a_replica_in_a_place_with_other_things_is_refused(open_here: Open, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "photo.jpg").write_text("not a store")
    open_here("a", create=True).close()
    with pytest.raises(InvalidInputError, match=r"photo.jpg"):
        open_here("a", "b")


def test_all_storages_down_is_one_clear_error(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True).close()
    for name in ("a", "b"):
        blocked(tmp_path, name)
    with pytest.raises(CkstoreError, match=r"/[ab] "):
        open_here("a", "b")


def test_a_storage_by_another_name_can_be_read_only(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        store.save(state(1), step=1)
    os.symlink(tmp_path / "a", tmp_path / "alias")
    alias = open_here("alias")
    assert steps(alias) == [1]
    if alias.url != store.url:  # where places are not resolved
        with pytest.raises(InvalidInputError, match="none of the places of this store"):
            alias.save(state(2), step=2)


def test_members_are_added_removed_and_required(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", create=True) as store:
        store.save(state(1), step=1)
        assert store.replicas.members() == []
        store.replicas.add(str(tmp_path / "b"))
        store.replicas.add(str(tmp_path / "c"), required=2)
        assert [one.health for one in store.replicas.members()] == ["ok"] * 3
        term = store.replicas.require(3)
        assert (term.required, term.former, [one.name for one in term.members]) == (3, [], ["s1", "s2", "s3"])
        store.save(state(2), step=2)
        term = store.replicas.remove(str(tmp_path / "b"))
        assert (term.required, [one.name for one in term.members]) == (2, ["s1", "s3"])
        store.save(state(3), step=3)
    assert steps(open_here("c")) == [3, 2, 1]
    assert steps(open_here("b")) == [2, 1]


def test_a_copy_that_is_gone_for_good_is_removed(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    blocked(tmp_path, "b")
    with open_here("a") as store:
        with pytest.raises(ConflictError, match=r"2 of the members have to answer.*--force"):
            store.replicas.remove("s2")
        term = store.replicas.remove("s2", force=True)
        assert (term.required, term.former, [one.name for one in term.members]) == (1, [], ["s1"])
        store.save(state(1), step=1)


def test_a_run_goes_on_while_members_change(open_here: Open, tmp_path: Path) -> None:
    run = open_here("a", "b", create=True, required=2)
    run.save_async(state(1), step=1).wait()
    with open_here("a") as other:
        other.replicas.add(str(tmp_path / "c"), required=3)
    run.save_async(state(2), step=2).wait()
    run.save(state(3), step=3)
    assert steps(open_here("c")) == [3, 2, 1]


def test_the_authority_is_not_removed(open_here: Open) -> None:
    store = open_here("a", "b", create=True)
    with pytest.raises(InvalidInputError, match="is the authority: promote another storage first"):
        store.replicas.remove("s1")
    with pytest.raises(InvalidInputError, match="is no member"):
        store.replicas.remove("somewhere/else")


def test_a_store_on_one_storage_costs_one_listing_more_to_open_and_no_more_to_save(tmp_path: Path) -> None:
    raw = MemoryBackend("alone")
    open_store(raw, create=True, cache_dir=tmp_path).close()
    counted = CountingBackend(raw)
    with open_store(counted, cache_dir=tmp_path) as store:
        opening = [call for call in counted.faults.calls if call[1].startswith("terms/")]
        assert opening == [("list", "terms/")]
        store.save(state(1), step=1)
        store.save_async(state(2), step=2).wait()
        store.prune({"keep_last": 1})
        assert [call for call in counted.faults.calls if call[1].startswith("terms/")] == opening


def test_damage_at_the_authority_is_read_from_a_copy(open_here: Open, tmp_path: Path) -> None:
    with open_here("a", "b", create=True, required=2) as store:
        store.save(state(1), step=1)
        for pack in (tmp_path / "a" / "packs").rglob("0-*"):
            pack.chmod(0o600)
            pack.write_bytes(b"x" * pack.stat().st_size)
        with pytest.warns(CkstoreWarning, match=r"damaged or missing at .*/a and put back from .*/b"):
            restored = store.restore()
        assert np.array_equal(restored["w"], state(1)["w"])


def test_terms_are_on_every_member(open_here: Open, tmp_path: Path) -> None:
    open_here("a", "b", create=True, required=2).close()
    shown = [terms.read_newest(LocalBackend(str(tmp_path / name))) for name in ("a", "b")]
    assert shown[0] is not None
    assert shown[0] == shown[1]
