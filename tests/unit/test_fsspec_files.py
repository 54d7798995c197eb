"""What fsspec and the libraries behind it may do wrong: lost answers, partial listings, errors of every kind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from ckstore import layout
from ckstore.backend.fsspec_files import FsspecBackend
from ckstore.backend.fsspec_files.kinds import LOCAL, Filesystem, Kind, kind_of
from ckstore.backend.fsspec_files.lending import Lending
from ckstore.errors import BackendError, InvalidInputError, NoSpaceError, NotFoundError
from ckstore.process import current_owner
from tests.contract.object_store import ObjectStore, over

SAVE = "fffffffffffffffe-0123456789abcdef"


class Answers(ObjectStore):
    """An object store whose next calls of a verb fail, after the deed or before."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, tuple[Exception, bool]] = {}
        """Verb → what it raises once, and whether it has done the deed."""

    def _answer(self, verb: str, act: Callable[[], Any]) -> Any:
        error, after = self.failing.pop(verb, (None, False))
        if error is None:
            return act()
        if after:
            act()
        raise error

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._answer("pipe_file", lambda: super(Answers, self).pipe_file(path, value, **options))

    def find(self, path: str, **options: Any) -> list[str]:
        found: list[str] = self._answer("find", lambda: super(Answers, self).find(path, **options))
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        found: bytes = self._answer("cat_file", lambda: super(Answers, self).cat_file(path, start, end, **options))
        return found

    def keep(self, path: str, data: bytes, attempt: str = "", create: bool = False) -> None:
        self._answer("keep", lambda: super(Answers, self).keep(path, data, attempt, create))


# creation


@pytest.mark.parametrize("error", [TimeoutError(), FileExistsError(), RuntimeError("an SDK's own")])
def test_a_lost_answer_is_found_to_be_our_success(error: Exception) -> None:
    """FileExistsError is what a library says that has asked again by itself."""
    fs = Answers()
    fs.failing["pipe_file"] = error, True
    assert over(fs).put_if_absent("things/a", b"ours") is True
    assert over(fs).get("things/a", limit=9) == b"ours"


def test_a_lost_answer_is_found_to_be_somebody_elses_success() -> None:
    fs = Answers()
    assert over(fs).put_if_absent("things/a", b"same") is True
    fs.failing["pipe_file"] = TimeoutError(), True
    assert over(fs).put_if_absent("things/a", b"same") is False


def test_a_request_that_did_not_arrive_is_an_error_that_may_pass() -> None:
    fs = Answers()
    fs.failing["pipe_file"] = TimeoutError(), False
    with pytest.raises(BackendError, match="cannot create things/a") as caught:
        over(fs).put_if_absent("things/a", b"x")
    assert caught.value.retryable
    assert over(fs).list("things/") == []


def test_who_was_there_and_is_gone_was_there() -> None:
    fs = Answers()
    fs.failing["pipe_file"] = FileExistsError(), False
    assert over(fs).put_if_absent("things/a", b"x") is False


def test_a_storage_without_conditions_is_found_out() -> None:
    fs = ObjectStore(conditional=False)
    with pytest.raises(InvalidInputError, match=r"ignores the condition.*single_writer=true"):
        over(fs).probe()
    assert fs.objects == {}
    over(ObjectStore()).probe()
    over(fs, single_writer=True).probe()


def test_the_single_writer_creates_by_looking_first() -> None:
    fs = Answers()
    backend = over(fs, single_writer=True)
    assert (backend.capabilities.put_if_absent, backend.capabilities.single_writer) == (False, True)
    fs.failing["pipe_file"] = TimeoutError(), True
    assert backend.put_if_absent("things/a", b"ours") is True
    fs.failing["pipe_file"] = TimeoutError(), False
    with pytest.raises(BackendError):
        backend.put_if_absent("things/b", b"ours")
    assert backend.put_if_absent("things/a", b"ours") is False


def test_without_either_nothing_is_created(tmp_path: Path) -> None:
    lending = Lending(LocalFileSystem, shared=True)
    backend = FsspecBackend("fsspec+x://a", str(tmp_path), LOCAL, lending)
    with pytest.raises(InvalidInputError, match="no atomic creation"):
        backend.put_if_absent("things/a", b"x")
    assert list(tmp_path.iterdir()) == []


# streams


def test_a_stream_that_is_forgotten_shows_nothing() -> None:
    """A library's file completes its upload when it is collected."""
    fs = Answers()
    stream = over(fs).put_stream("things/a", 9)
    stream.append(bytes(10_000))  # some parts are sent, and one is begun
    stream.abort()
    del stream
    gc.collect()
    assert fs.objects == {}


@pytest.mark.parametrize("after", [False, True])
def test_an_upload_that_cannot_be_completed_shows_nothing(after: bool) -> None:
    """Nor does one that was completed when its answer was lost."""
    fs = Answers()
    stream = over(fs).put_stream("things/a", 9)
    stream.append(bytes(10_000))
    fs.failing["keep"] = ConnectionResetError(), after
    with pytest.raises(BackendError, match="cannot write things/a") as caught:
        stream.commit()
    assert caught.value.retryable
    del stream
    gc.collect()
    assert fs.objects == {}


def local(folder: Path, fs: Filesystem, kind: Kind = LOCAL) -> FsspecBackend:
    lending = Lending(lambda: fs, shared=True)
    return FsspecBackend(f"fsspec+x://{folder}", str(folder), kind, lending, single_writer=True)


class Short(LocalFileSystem):  # type: ignore[misc]
    """Loses the last byte of each file, and says nothing."""

    def info(self, path: Any, **options: Any) -> Any:
        found = super().info(path, **options)
        if found["type"] == "file" and "/tmp/" in str(path)[-80:]:
            found["size"] -= 1
        return found


def test_a_write_that_failed_silently_is_noticed_before_the_object_shows(tmp_path: Path) -> None:
    backend = local(tmp_path, Short(skip_instance_cache=True))
    for write in (lambda: backend.put("things/a", b"12345"), lambda: streamed(backend, "things/a", b"12345")):
        with pytest.raises(BackendError, match=r"4 of 5 bytes.*arrived") as caught:
            write()
        assert caught.value.retryable
    assert backend.list("things/") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def streamed(backend: FsspecBackend, name: str, data: bytes) -> None:
    stream = backend.put_stream(name, len(data))
    stream.append(data)
    stream.commit()


class Hadoop(LocalFileSystem):  # type: ignore[misc]
    """Renames to no name that is taken."""

    def mv(self, path1: Any, path2: Any, **options: Any) -> None:
        if os.path.exists(path2):
            raise OSError("cannot rename: the target exists")
        super().mv(path1, path2, **options)


def test_where_renaming_does_not_replace_it_takes_two_steps(tmp_path: Path) -> None:
    kind = kind_of("hdfs")
    backend = local(tmp_path, Hadoop(skip_instance_cache=True), kind)
    backend.put("things/a", b"1")
    backend.put("things/a", b"22")
    streamed(backend, "things/a", b"333")
    assert backend.get("things/a", limit=3) == b"333"


# temporaries


@pytest.fixture
def abandoned(tmp_path: Path) -> list[Path]:
    """Temporaries of a decided save, of a dead process, and of a living one."""
    dead = current_owner().token.rpartition("-")[0] + "-1"
    living = current_owner().token
    found = []
    for owner in (f"{SAVE}+{living}", dead, living):
        folder = tmp_path / layout.TEMPORARIES.rstrip("/") / owner
        folder.mkdir(parents=True)
        (folder / "aa").write_bytes(bytes(100))
        found.append(folder / "aa")
    return found


def test_temporaries_of_decided_saves_and_of_dead_processes_are_swept(tmp_path: Path, abandoned: list[Path]) -> None:
    backend = local(tmp_path, LocalFileSystem())
    assert backend.sweep_temporaries({SAVE}) == 200
    assert [path.exists() for path in abandoned] == [False, False, True]
    assert backend.sweep_temporaries({SAVE}) == 0


# listings


class Partial(LocalFileSystem):  # type: ignore[misc]
    """Cannot list one directory."""

    def ls(self, path: Any, detail: bool = False, **options: Any) -> Any:
        if str(path).endswith("/closed"):
            raise PermissionError(13, "closed")
        return super().ls(path, detail, **options)


def test_a_listing_is_whole_or_an_error(tmp_path: Path) -> None:
    backend = local(tmp_path, Partial(skip_instance_cache=True))
    backend.put("things/open/a", b"x")
    backend.put("things/closed/b", b"x")
    assert backend.list("things/open/") == ["things/open/a"]
    with pytest.raises(BackendError, match=r"cannot list things/.*not allowed"):
        backend.list("things/")
    fs = Answers()
    over(fs).put("things/a", b"x")
    fs.failing["find"] = ConnectionError(), False
    with pytest.raises(BackendError, match="cannot list things/") as caught:
        over(fs).list("things/")
    assert caught.value.retryable


class Elsewhere(LocalFileSystem):  # type: ignore[misc]
    """Says of what it lists that it stands somewhere else."""

    def ls(self, path: Any, detail: bool = False, **options: Any) -> Any:
        return [{**entry, "name": "/other" + entry["name"]} for entry in super().ls(path, detail=True, **options)]


def test_a_listing_of_another_place_is_an_error(tmp_path: Path) -> None:
    backend = local(tmp_path, Elsewhere(skip_instance_cache=True))
    backend.put("things/a", b"x")
    with pytest.raises(BackendError, match="where it is not"):
        backend.list("things/")


def test_names_that_no_store_gives_are_passed_over(tmp_path: Path) -> None:
    backend = local(tmp_path, LocalFileSystem())
    backend.put("things/a", b"x")
    for name in ("things/.hidden", "things/with space", "things/.snapshot/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert backend.list("things/") == ["things/a"]


def test_a_root_that_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    root = tmp_path / "mounted"
    backend = local(root, LocalFileSystem())
    assert backend.list("things/") == []
    with pytest.raises(NotFoundError):
        backend.stat("things/a")
    backend.put("things/a", b"x")
    with pytest.raises(NotFoundError):
        backend.stat("things/b")
    root.rename(tmp_path / "away")
    for look in (lambda: backend.list("things/"), lambda: backend.stat("things/a")):
        with pytest.raises(BackendError, match="no longer the directory of this store"):
            look()


def test_what_else_is_there_is_told(tmp_path: Path) -> None:
    backend = local(tmp_path, LocalFileSystem())
    backend.put("config", b"x")
    for name in ("model.pt", ".DS_Store", "lost+found", "checkpoint-1"):
        (tmp_path / name).mkdir()
    assert backend.foreign() == ["checkpoint-1", "model.pt"]
    fs = ObjectStore()
    fs.keep("bucket/runs/model.pt", b"")
    fs.keep("bucket/runs-old/other.pt", b"")
    assert over(fs).foreign() == ["model.pt"]


# errors


class Service(Exception):
    """What a library raises, with the status that the service answered with."""

    def __init__(self, code: int) -> None:
        super().__init__("https://host/object?signature=hunter2")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (PermissionError(13, "no"), BackendError, False),
        (OSError("Forbidden: https://host/object?signature=hunter2"), BackendError, False),
        (OSError(28, "full"), NoSpaceError, False),
        (OSError(5, "input/output"), BackendError, True),
        (ConnectionResetError(), BackendError, True),
        (EOFError(), BackendError, True),
        (NotImplementedError(), BackendError, False),
        (Service(503), BackendError, True),
        (Service(429), BackendError, True),
        (Service(403), BackendError, False),
        (Service(400), BackendError, False),
        (ValueError("hunter2"), BackendError, False),
    ],
)
def test_an_error_says_what_it_means_and_no_secret(error: Exception, kind: type[BackendError], retryable: bool) -> None:
    fs = Answers()
    over(fs).put("things/a", b"12345")
    fs.failing["cat_file"] = error, False
    with pytest.raises(kind, match="cannot read things/a") as caught:
        over(fs).get("things/a", limit=9)
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is error
    assert "hunter2" not in str(caught.value)


# instances


class Instance:
    """A filesystem that is asked for nothing but to close."""

    def __init__(self) -> None:
        self.open = True
        self.client = self

    def close(self) -> None:
        self.open = False


def test_each_caller_has_an_instance_and_those_that_are_left_are_used_again() -> None:
    made: list[Instance] = []

    def connect() -> Any:
        made.append(Instance())
        return made[-1]

    lending = Lending(connect, shared=False)
    with lending.lent() as one, lending.lent() as two:
        assert one is not two
    with lending.lent() as again:
        assert again in (one, two)
    for answer in (FileNotFoundError(), NotFoundError("no object")):
        with pytest.raises(type(answer)), lending.lent():
            raise answer
    assert len(made) == 2
    with pytest.raises(KeyboardInterrupt), lending.lent() as interrupted:
        raise KeyboardInterrupt
    assert [instance.open for instance in made].count(False) == 1
    assert not interrupted.open  # type: ignore[attr-defined]
    lending.close()
    assert not any(instance.open for instance in made)


def test_a_child_makes_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Instance] = []
    lending = Lending(lambda: made.append(Instance()) or made[-1], shared=True)  # type: ignore[arg-type, func-returns-value, return-value]
    assert lending.take() is lending.take()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert lending.take() is made[1]
    assert made[0].open
