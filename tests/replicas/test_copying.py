"""One snapshot from one storage to another: what nobody has whole never arrives, what is there is not brought again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckstore import floor, layout
from ckstore.backend.local import LocalBackend
from ckstore.errors import (
    BackendError,
    ConflictError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
)
from ckstore.format import records
from ckstore.member import Member
from ckstore.process import current_owner
from ckstore.replicas.catching_up import catch_up
from ckstore.replicas.copying import Copied, copy_snapshot
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend
from tests.replicas.pair import Pair, noise, objects_of, standing_still, state_of, store_of


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with standing_still():
        yield Pair(tmp_path, "memory")


def test_it_is_whole_and_the_same_bytes(pair: Pair) -> None:
    pair.save(1)
    save = pair.save(2)
    done = copy_snapshot(pair.authority, pair.copy, save)
    commit = records.decode_decision(
        pair.backend("copy").get(layout.snapshot(save), limit=1 << 20), save, "the copy"
    )
    assert isinstance(commit, records.Commit)
    assert done == Copied(len(commit.packs) + 1, sum(pack.size for pack in commit.packs))
    assert pair.live(pair.copy) == {save}
    pair.check_copy(same=False)


def test_what_is_there_costs_a_few_small_requests(pair: Pair) -> None:
    save = pair.save(1)
    copy_snapshot(pair.authority, pair.copy, save)
    counting = CountingBackend(pair.backend("copy"))
    assert copy_snapshot(pair.context("authority"), pair.over("copy", lambda _: counting), save) == Copied()
    assert dict(counting.faults.counts) == {"get": 1, "list": 1}


def test_manifests_outside_the_record_come_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.rank_writer.INLINE_BYTES", 0)
    save = pair.save(1)
    assert len(pair.objects("authority", layout.MANIFESTS)) == 1
    copy_snapshot(pair.authority, pair.copy, save)
    pair.check_copy()
    other = pair.context("other")
    objects_of(pair.backend("other")).update(objects_of(pair.backend("authority")))
    (name,) = pair.objects("authority", layout.MANIFESTS)
    for damaged in (None, b"CKSTORE\n", objects_of(pair.backend("authority"))[name][:-1] + b"!"):
        objects = objects_of(pair.backend("authority"))
        objects.pop(name)
        if damaged is not None:
            objects[name] = damaged
        else:
            objects[name + "x"] = b""
        third = pair.context(f"third{damaged!r}"[:20].replace("'", "").replace("\\", ""))
        with pytest.raises(CorruptionError):
            copy_snapshot(pair.context("authority"), third, save)
        assert third.backend.list(layout.SNAPSHOTS) == []
        copy_snapshot(pair.context("authority"), third, save, others=[other])
        pair.check_copy(context=third, same=False)
        objects.setdefault(name, b"")


def test_several_ranks(pair: Pair) -> None:
    states = [{"part": noise(10 + rank, 2)} for rank in range(2)]

    def save(rank: int) -> None:
        member = Member(rank=rank, world=2, group="0123456789abcdef", ordinal=1)
        store_of(pair.authority).save(states[rank], step=5, member=member)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one,) = pair.live(pair.authority)
    copy_snapshot(pair.authority, pair.copy, one)
    for rank in range(2):
        assert (store_of(pair.copy).restore(5, rank=rank)["part"] == states[rank]["part"]).all()


def test_damage_at_the_source_is_taken_from_another(pair: Pair) -> None:
    save = pair.save(1)
    other = pair.context("other")
    objects_of(pair.backend("other")).update(objects_of(pair.backend("authority")))
    objects = objects_of(pair.backend("authority"))
    for name in (*pair.objects("authority", layout.PACKS), layout.snapshot(save)):
        whole = objects[name]
        objects[name] = whole[:80] + bytes([whole[80] ^ 1]) + whole[81:]
        with pytest.raises(CorruptionError, match=name):
            copy_snapshot(pair.context("authority"), pair.copy, save)
        assert pair.objects("copy", layout.SNAPSHOTS) == []
        objects[name] = whole
    for name in pair.objects("authority", layout.PACKS):
        objects[name] = objects[name][:80] + b"??" + objects[name][82:]
    objects[layout.snapshot(save)] = b"nothing"
    copy_snapshot(pair.context("authority"), pair.copy, save, others=[other])
    pair.check_copy(same=False)


def test_what_was_removed_is_not_copied(pair: Pair) -> None:
    save = pair.save(1)
    pair.save(2)
    pair.store.drop(1)
    with pytest.raises(NotFoundError, match="was removed from memory://authority"):
        copy_snapshot(pair.authority, pair.copy, save)
    assert pair.objects("copy", layout.SNAPSHOTS) == pair.objects("copy", layout.PACKS) == []
    catch_up(pair.context("authority"), pair.context("copy"))
    assert pair.objects("copy", layout.SAVES) == []  # what it had announced is refused and gone


def test_what_was_removed_on_the_target_stays_removed(pair: Pair) -> None:
    save = pair.save(1)
    pair.save(2)
    catch_up(pair.authority, pair.copy)
    store_of(pair.copy).drop(1)
    with pytest.raises(NotFoundError, match="was removed from memory://copy"):
        copy_snapshot(pair.authority, pair.copy, save)


def test_what_would_be_void_is_not_copied(pair: Pair) -> None:
    save = pair.save(1)
    floor.raise_to(pair.copy, 1 << 40)
    with pytest.raises(ConflictError, match="below the floor of memory://copy"):
        copy_snapshot(pair.authority, pair.copy, save)
    assert pair.objects("copy", layout.PACKS) == []


def test_another_snapshot_under_the_name_is_a_conflict(pair: Pair) -> None:
    save = pair.save(1)
    data = pair.backend("authority").get(layout.snapshot(save), limit=1 << 20)
    commit = records.decode_decision(data, save, "")
    assert isinstance(commit, records.Commit)
    pair.backend("copy").put(
        layout.snapshot(save), records.encode(msgspec.structs.replace(commit, step=99))
    )
    with pytest.raises(ConflictError, match="another snapshot"):
        copy_snapshot(pair.authority, pair.copy, save)


def test_an_abort_or_damage_gives_way(pair: Pair) -> None:
    save = pair.save(1)
    abort = records.encode(records.Abort(str(save), "given up", current_owner()))
    for there in (abort, b"CKSTORE\nbroken"):
        pair.backend("copy").put(layout.snapshot(save), there)
        copy_snapshot(pair.context("authority"), pair.context("copy"), save)
        pair.check_copy()
        pair.wipe("copy")


def test_a_full_copy_shows_nothing_half(pair: Pair) -> None:
    pair.save(1)
    save = pair.save(2)
    for verb in ("append", "commit", "put", "put_if_absent"):
        full = FaultyBackend(pair.backend("copy"), Fault(verb, 1, NoSpaceError("full"), times=1000))
        with pytest.raises(NoSpaceError):
            copy_snapshot(pair.authority, pair.over("copy", lambda _, full=full: full), save)  # type: ignore[misc]
        assert pair.live(pair.copy) == set()


def test_a_full_copy_lets_go_of_what_the_authority_removed(pair: Pair) -> None:
    """It would never be complete otherwise: what is lacking needs the room of what is too much."""
    for step in range(4):
        pair.save(step, state_of(step))
    catch_up(pair.context("authority"), pair.context("copy"))
    pair.store.prune({"keep_last": 1})
    fresh = pair.save(4)

    class Small(FaultyBackend):
        def put_stream(self, name: str, size_hint: int):  # type: ignore[no-untyped-def]
            used = sum(map(len, objects_of(self.inner).values()))
            if used + size_hint > room:
                raise NoSpaceError("full")
            return super().put_stream(name, size_hint)

    room = sum(map(len, objects_of(pair.backend("copy")).values())) + 100
    done = catch_up(pair.context("authority"), pair.over("copy", Small))
    assert done.copied == [fresh]
    assert len(done.removed) == 3
    pair.check_copy()
    room = 0
    last = pair.save(5)
    done = catch_up(pair.context("authority"), pair.over("copy", Small))
    assert done.waiting == {last: "full"}
    pair.check_copy(same=False)


def test_storages_that_hold_something_else(pair: Pair) -> None:
    pair.save(1)
    other = records.Config(store="f" * 32)
    pair.backend("copy").put(layout.CONFIG, records.encode(other))
    with pytest.raises(InvalidInputError, match="holds another store"):
        catch_up(pair.authority, pair.copy)
    pair.backend("copy").delete(layout.CONFIG)
    pair.backend("copy").put("snapshots/fffffffffffffff0-00000000000000ab", b"?")
    with pytest.raises(FormatError, match="none of them is known"):
        catch_up(pair.authority, pair.copy)
    pair.backend("copy").put(layout.CONFIG, b"something else")
    with pytest.raises(CorruptionError):
        catch_up(pair.authority, pair.copy)


def test_features_of_writers_that_are_not_known(pair: Pair) -> None:
    newer = records.Config(store=pair.authority.config.store, chunk_size=4096, writer_features=["later"])
    pair.backend("authority").put(layout.CONFIG, records.encode(newer))
    with pytest.raises(FormatError, match="later"):
        catch_up(pair.authority, pair.copy)


def test_a_source_that_answers_for_none_of_it(pair: Pair) -> None:
    save = pair.save(1)
    fault = Fault("get_into", 1, BackendError("no route", retryable=True), times=100)
    with pytest.raises(BackendError, match="no route"):
        copy_snapshot(pair.over("authority", lambda inner: FaultyBackend(inner, fault)), pair.copy, save)
    assert pair.objects("copy", layout.PACKS) == []


def test_progress_is_bytes(pair: Pair) -> None:
    save = pair.save(1)
    seen: list[tuple[int, int]] = []
    copy_snapshot(pair.authority, pair.copy, save, lambda done, total: seen.append((done, total)))
    total = sum(pair.backend("copy").stat(name) for name in pair.objects("copy", layout.PACKS))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)


class Stop(Exception):
    pass


def test_whoever_is_told_of_progress_may_stop_it(pair: Pair) -> None:
    pair.save(1)

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        catch_up(pair.context("authority"), pair.context("copy"), stop)
    assert pair.objects("authority", layout.PINS) == []
    assert pair.live(pair.copy) == set()
    catch_up(pair.context("authority"), pair.context("copy"))
    pair.check_copy()


def test_a_copy_on_disk_gets_its_reserve(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "local")
    pair.save(1)
    catch_up(pair.authority, pair.copy)
    assert isinstance(pair.backend("copy"), LocalBackend)
    assert len(pair.objects("copy", layout.RESERVE)) == 16
