"""Where a store may be made: an empty place, on a storage where writers can agree or only one of them writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from ckstore.backend.base import Capabilities
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreWarning, InvalidInputError, NotFoundError
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend
from tests.contract.object_store import ObjectStore, over

Open = Callable[..., Store]


class Unable(MemoryBackend):
    """Cannot create; whether that is declared is up to the test."""

    declared = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=False, single_writer=self.declared)


# what else is there


@pytest.mark.parametrize("name", ["checkpoint-500", "model.safetensors", "notes"])
def test_a_folder_that_holds_something_else_is_refused(place: Path, open_here: Open, name: str) -> None:
    place.mkdir()
    (place / name).mkdir()
    with pytest.raises(InvalidInputError, match=rf"not empty: there is '{name}'.*empty folder.*ckstore import"):
        open_here()
    assert [path.name for path in place.iterdir()] == [name]


def test_of_many_names_a_few_are_shown(place: Path, open_here: Open) -> None:
    for number in range(9):
        (place / f"run-{number}").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match="'run-4' and more"):
        open_here()


def test_without_create_there_is_just_no_store(place: Path, open_here: Open) -> None:
    (place / "model.pt").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="there is no store"):
        open_here(create=False)


@pytest.mark.parametrize("name", ["lost+found", ".DS_Store", ".nfs0001", ".snapshot"])
def test_what_a_system_puts_there_is_in_nobodys_way(place: Path, open_here: Open, name: str) -> None:
    (place / name).mkdir(parents=True)
    assert open_here().snapshots() == []


def test_a_store_stays_one_whatever_is_put_beside_it(place: Path, open_here: Open) -> None:
    open_here().close()
    (place / "notes.txt").write_text("mine")
    open_here().save({"a": 1}, step=1)
    assert open_here().restore() == {"a": 1}


def test_what_a_former_attempt_left_is_not_foreign(place: Path, open_here: Open) -> None:
    """Its temporaries, and the houses that it made."""
    (place / "tmp" / "p1").mkdir(parents=True)
    (place / "packs").mkdir()
    assert open_here().snapshots() == []


def test_an_object_store_is_asked_too(tmp_path: Path) -> None:
    fs = ObjectStore()
    fs.keep("bucket/runs/model.pt", b"")
    with pytest.raises(InvalidInputError, match=r"not empty: there is 'model\.pt'"):
        open_store(over(fs), create=True, cache_dir=tmp_path)
    assert list(fs.objects) == ["bucket/runs/model.pt"]


def test_other_prefixes_of_a_bucket_are_no_concern(tmp_path: Path) -> None:
    fs = ObjectStore()
    fs.keep("bucket/runs-old/model.pt", b"")
    fs.keep("bucket/other", b"")
    with open_store(over(fs), create=True, cache_dir=tmp_path) as store:
        store.save({"a": 1}, step=1)


def test_looking_around_is_only_for_who_makes_a_store(place: Path, open_here: Open) -> None:
    open_here().close()
    backend = CountingBackend(LocalBackend(place))
    open_here(backend)
    assert backend.faults.counts["foreign"] == backend.faults.counts["probe"] == 0


# who may create


def test_a_storage_that_cannot_create_is_refused_before_anything_is_written(open_here: Open) -> None:
    backend = Unable()
    with pytest.raises(InvalidInputError, match=r"cannot hold a store that several processes use.*single_writer=true"):
        open_here(backend)
    assert backend.list("snapshots/") == []
    with pytest.raises(NotFoundError):
        backend.stat("config")


def test_a_storage_that_ignores_conditions_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    fs = ObjectStore(conditional=False)
    with pytest.raises(InvalidInputError, match="ignores the condition"):
        open_store(over(fs), create=True, cache_dir=tmp_path)
    assert fs.objects == {}


def test_a_declared_single_writer_is_told_what_it_means_at_each_opening(open_here: Open) -> None:
    backend = Unable()
    backend.declared = True
    for _ in range(2):
        with pytest.warns(CkstoreWarning, match="one process at a time") as caught:
            store = open_here(backend)
        assert len(caught) == 1
    store.save({"a": 1}, step=1)
    store.save({"a": 2}, step=2)
    store.prune({"keep_last": 1})
    store.gc()
    assert store.restore() == {"a": 2}


def test_nobody_else_is_warned(open_here: Open) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_here()
