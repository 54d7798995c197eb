"""What the contract suite cannot see: strays, races, roots that come and go, sweeps, and several processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.fs import Entry, OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, CorruptionError, InvalidInputError, NotFoundError
from ckstore.process import current_owner
from ckstore.testing.faults import Fault, FaultyFs
from ckstore.testing.simfs import SimFs

SAVE = "fffffffffffffffe-0123456789abcdef"
PACK = f"packs/{SAVE}/0-0"


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def run_python(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


# strays in the directory


def test_foreign_files_are_passed_over(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things/a", b"x")
    for stray in (".DS_Store", "notes~", "b c", ".nfs0001", "\udcff"):
        (tmp_path / "things" / stray).write_text("not ours")
    (tmp_path / "things" / ".trash").mkdir()
    (tmp_path / "things" / ".trash" / "a").write_text("not ours")
    os.mkfifo(tmp_path / "things" / "fifo")
    assert backend.list("things/") == ["things/a"]


def test_a_symbolic_link_is_refused_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("secret")
    backend = LocalBackend(tmp_path / "store")
    backend.put("things/a", b"x")
    (tmp_path / "store" / "things" / "link").symlink_to(outside / "a")
    for call in (lambda: backend.get("things/link", limit=9), lambda: backend.stat("things/link")):
        with pytest.raises(BackendError, match="symbolic link"):
            call()
    with pytest.raises(BackendError, match="symbolic link"):
        backend.list("things/")
    assert backend.delete("things/link") is True
    assert (outside / "a").read_text() == "secret"
    (tmp_path / "store" / "linked").symlink_to(outside)
    for prefix in ("linked/", "linked/deeper/"):
        with pytest.raises(BackendError, match="symbolic link"):
            backend.list(prefix)


def test_a_fifo_does_not_hang_its_reader(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BackendError, match="no regular file"):
        backend.get("fifo", limit=1)


def test_a_directory_under_the_name_is_an_error(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things/a/b", b"x")
    with pytest.raises(BackendError):
        backend.put("things/a", b"y")
    with pytest.raises(BackendError, match="directory stands there"):
        backend.put_if_absent("things/a", b"y")
    stream = backend.put_stream("things/a", 1)
    with pytest.raises(BackendError):
        stream.commit()
    assert backend.delete("things/a") is False
    assert backend.list("things/") == ["things/a/b"]
    assert files_below(tmp_path) == ["things/a/b"]


def test_a_file_above_the_name_is_an_error(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things", b"x")
    for put in (backend.put, backend.put_if_absent):
        with pytest.raises(BackendError) as caught:
            put("things/a", b"y")
        assert caught.value.retryable is False
    assert files_below(tmp_path) == ["things"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOMEM])
def test_what_cannot_be_listed_is_an_error_and_not_empty(tmp_path: Path, number: int) -> None:
    LocalBackend(tmp_path).put("things/a/b", b"x")
    for at in (1, 2):
        fs = FaultyFs(OsFs(), Fault("scandir", at, OSError(number, "injected")))
        with pytest.raises(BackendError) as caught:
            LocalBackend(tmp_path, fs=fs).list("things/")
        assert isinstance(caught.value.__cause__, OSError)
        fs.faults.assert_fired()


def test_a_file_that_shrinks_while_it_is_read_is_corruption(tmp_path: Path) -> None:
    def cut() -> None:
        os.truncate(tmp_path / "a", 4)

    for verb in ("read", "read_into"):
        (tmp_path / "a").write_bytes(bytes(10))
        backend = LocalBackend(tmp_path, fs=FaultyFs(OsFs(), Fault(verb, 1, cut)))
        with pytest.raises(CorruptionError, match="ends at 4"):
            if verb == "read":
                backend.get("a", limit=10)
            else:
                backend.get_into("a", 0, memoryview(bytearray(10)))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    fs = FaultyFs(OsFs())
    backend = LocalBackend(tmp_path, fs=fs)
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptionError):
        backend.get("huge", limit=1 << 20)
    assert fs.faults.counts["read"] == 0


# the root


def test_a_missing_root_holds_nothing_and_is_made_by_the_first_put(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet"
    backend = LocalBackend(root)
    assert backend.list("things/") == []
    assert backend.delete("config") is False
    assert backend.sweep_temporaries(set()) == 0
    backend.sync("things/")
    backend.close()
    with pytest.raises(NotFoundError):
        backend.get("config", limit=1)
    assert not (tmp_path / "not").exists()
    backend.put("config", b"x")
    assert (root / "config").read_bytes() == b"x"


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInputError, match="not a directory"):
            LocalBackend(path)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "replaced"])
def test_a_root_that_went_away_is_an_error_and_not_an_empty_store(tmp_path: Path, again: bool) -> None:
    root = tmp_path / "mount"
    backend = LocalBackend(root)
    backend.put("things/a", b"x")
    root.rename(tmp_path / "moved")
    if again:
        root.mkdir()
    for call in (
        lambda: backend.list("things/"),
        lambda: backend.get("things/a", limit=1),
        lambda: backend.stat("things/a"),
        lambda: backend.delete("things/a"),
        lambda: backend.put("things/b", b""),
        lambda: backend.put_if_absent("things/b", b""),
        lambda: backend.put_stream("things/b", 1),
    ):
        with pytest.raises(BackendError, match="no longer the directory"):
            call()
    assert root.exists() is again
    assert files_below(tmp_path / "moved") == ["things/a"]


def test_a_root_reached_through_a_symbolic_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    backend = LocalBackend(tmp_path / "link")
    backend.put("things/a", b"x")
    assert backend.list("things/") == ["things/a"]
    assert files_below(tmp_path / "real") == ["things/a"]


def test_a_relative_root_stays_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend("store")
    backend.put("a", b"x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    backend.put("b", b"y")
    assert files_below(tmp_path) == ["store/a", "store/b"]


# directories come and go


def test_empty_directories_go_with_their_last_object(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    for name in ("packs/s/0", "packs/s/1", "packs/t/deep/0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    backend.delete("packs/s/0")
    assert (tmp_path / "packs" / "s").is_dir()
    backend.delete("packs/s/1")
    backend.delete("packs/t/deep/0")
    assert list((tmp_path / "packs").iterdir()) == []


@pytest.mark.parametrize("verb", ["create", "rename", "link"])
def test_a_directory_dropped_just_before_it_is_used_is_made_again(tmp_path: Path, verb: str) -> None:
    owner = "tmp/" + current_owner().token

    def drop() -> None:
        (tmp_path / (owner if verb == "create" else "things")).rmdir()

    fs = FaultyFs(OsFs(), Fault(verb, 2, drop))
    backend = LocalBackend(tmp_path, fs=fs)
    put = backend.put_if_absent if verb == "link" else backend.put
    put("things/a", b"1")
    assert backend.delete("things/a") is True
    (tmp_path / "things").mkdir(exist_ok=True)
    put("things/b", b"2")
    fs.faults.assert_fired()
    assert backend.list("things/") == ["things/b"]


def test_a_directory_deleted_while_it_is_listed_lists_as_nothing(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things/a/b", b"")
    backend.put("things/c", b"")
    other = LocalBackend(tmp_path)
    fs = FaultyFs(OsFs(), Fault("scandir", 2, lambda: void(other.delete("things/a/b"))))
    assert LocalBackend(tmp_path, fs=fs).list("things/") == ["things/c"]
    fs.faults.assert_fired()


def test_directories_that_never_stay_end_in_an_error(tmp_path: Path) -> None:
    fs = FaultyFs(OsFs(), Fault("create", 1, FileNotFoundError(errno.ENOENT, "gone"), times=10**9))
    with pytest.raises(BackendError, match="vanishes as fast") as caught:
        LocalBackend(tmp_path, fs=fs).put("things/a", b"")
    assert caught.value.retryable is True


# temporaries


def test_a_sweep_takes_what_decided_saves_and_dead_processes_left(tmp_path: Path) -> None:
    dead = run_python("from ckstore.process import current_owner; print(current_owner().token)")
    token = dead.communicate()[0].strip()
    undecided = "fffffffffffffffd-0123456789abcdef"
    living = current_owner().token
    gone = [token, f"{SAVE}+{living}", f"{SAVE}+{token}", f"{undecided}+{token}", SAVE]
    kept = [living, f"{undecided}+{living}", "stranger", undecided]
    for owner in gone + kept:
        (tmp_path / "tmp" / owner).mkdir(parents=True)
        (tmp_path / "tmp" / owner / "t").write_bytes(bytes(100))
    (tmp_path / "tmp" / "empty").mkdir()
    (tmp_path / "tmp" / "file").write_text("stray")
    assert LocalBackend(tmp_path).sweep_temporaries({SAVE}) == 500
    assert files_below(tmp_path / "tmp") == sorted([*(f"{owner}/t" for owner in kept), "file"])
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == sorted([*kept, "file"])


def test_a_temporary_that_cannot_be_deleted_does_not_keep_the_others() -> None:
    sim = SimFs()
    backend = LocalBackend("/store", fs=sim)
    for _ in range(3):
        backend.put_stream(PACK, 0)
    fs = FaultyFs(sim, Fault("unlink", 2, PermissionError(errno.EACCES, "another user's")))
    with pytest.raises(BackendError, match="sweep"):
        LocalBackend("/store", fs=fs).sweep_temporaries({SAVE})
    assert len([path for path in sim.tree() if SAVE in path]) == 1


def test_a_swept_stream_fails_and_may_be_written_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    stream = backend.put_stream(PACK, 3)
    stream.append(b"abc")
    backend.sweep_temporaries({SAVE})
    with pytest.raises(BackendError, match="decided elsewhere") as caught:
        stream.commit()
    assert caught.value.retryable is True
    assert files_below(tmp_path) == []


def test_a_late_commit_whose_temporary_was_swept_finds_the_abort(tmp_path: Path) -> None:
    """gc aborts a save and sweeps its temporaries just when the late writer links its commit."""
    gc = LocalBackend(tmp_path)
    name = f"snapshots/{SAVE}"

    def abort() -> None:
        assert gc.put_if_absent(name, b"ABORT") is True
        gc.sweep_temporaries({SAVE})

    fs = FaultyFs(OsFs(), Fault("link", 1, abort))
    assert LocalBackend(tmp_path, fs=fs).put_if_absent(name, b"COMMIT") is False
    fs.faults.assert_fired()
    assert gc.get(name, limit=9) == b"ABORT"


def test_a_killed_writer_leaves_a_temporary_that_a_sweep_takes(tmp_path: Path) -> None:
    code = """
import sys
from ckstore.backend.local import LocalBackend
stream = LocalBackend(sys.argv[1]).put_stream("things/a", 1 << 20)
stream.append(bytes(1 << 20))
print("written", flush=True)
sys.stdin.read()
"""
    writer = run_python(code, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    backend = LocalBackend(tmp_path)
    assert backend.sweep_temporaries(set()) == 0
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert len(files_below(tmp_path)) == 1
    assert backend.list("things/") == []
    assert backend.sweep_temporaries(set()) == 1 << 20
    assert files_below(tmp_path) == []


def test_closing_removes_the_own_empty_directories_only(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things/a", b"x")
    put_stream(backend, PACK, b"x", size_hint=0)
    (tmp_path / "tmp" / "stranger").mkdir()
    stream = backend.put_stream("things/b", 1)
    backend.close()
    stream.append(b"y")
    stream.commit()
    backend.close()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["stranger"]
    assert backend.list("things/") == ["things/a", "things/b"]


# several processes


def test_processes_agree_on_one_creator(tmp_path: Path) -> None:
    code = """
import sys
from ckstore.backend.local import LocalBackend
backend = LocalBackend(sys.argv[1] + "/new/store")
print("ready", flush=True)
sys.stdin.readline()
print(*(int(backend.put_if_absent(f"things/{n}/a", sys.argv[2].encode())) for n in range(20)))
"""
    processes = [run_python(code, tmp_path, number) for number in range(4)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    backend = LocalBackend(tmp_path / "new" / "store")
    for number in range(20):
        column = [answer[number] for answer in answers]
        assert sorted(column) == ["0", "0", "0", "1"]
        assert backend.get(f"things/{number}/a", limit=1) == str(column.index("1")).encode()


# filesystems that cannot do everything


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_links_is_refused_clearly(number: int) -> None:
    sim = SimFs()
    backend = LocalBackend("/store", fs=FaultyFs(sim, Fault("link", 1, OSError(number, "injected"))))
    with pytest.raises(BackendError, match="a store cannot be kept on it") as caught:
        backend.put_if_absent("config", b"")
    assert caught.value.retryable is False
    assert [path for path, data in sim.tree().items() if not path.endswith("/")] == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_filesystem_without_preallocation_is_fine(number: int) -> None:
    fs = FaultyFs(SimFs(), Fault("preallocate", 1, OSError(number, "injected")))
    backend = LocalBackend("/store", fs=fs)
    put_stream(backend, "things/a", b"abc", size_hint=1 << 20)
    fs.faults.assert_fired()
    assert backend.get("things/a", limit=3) == b"abc"


def test_more_room_asked_for_than_there_is_does_not_keep_what_fits_from_being_written() -> None:
    fs = SimFs(capacity=2 << 20)
    backend = LocalBackend("/store", fs=fs)
    put_stream(backend, "things/a", bytes(1 << 20), size_hint=256 << 20)
    assert backend.stat("things/a") == 1 << 20
    partly = FaultyFs(SimFs(), Fault("preallocate", 1, OSError(errno.ENOSPC, "injected"), after=True))
    backend = LocalBackend("/store", fs=partly)
    put_stream(backend, "things/a", b"abc", size_hint=1 << 20)
    partly.faults.assert_fired()
    assert backend.get("things/a", limit=3) == b"abc"


@pytest.mark.parametrize("verb", ["open_directory", "fsync"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
def test_a_directory_above_the_root_that_cannot_be_fsynced_is_no_obstacle(verb: str, number: int) -> None:
    def run(*faults: Fault) -> FaultyFs:
        fs = FaultyFs(SimFs(), *faults)
        fs.mkdir("/above")
        fs.mkdir("/above/store")
        LocalBackend("/above/store", fs=fs).put("config", b"x")
        return fs

    at = [path for called, path in run().faults.calls if called == verb].index("/above") + 1
    fs = run(Fault(verb, at, OSError(number, "injected")))
    fs.faults.assert_fired()
    assert fs.scandir("/above/store") == [Entry("tmp", "directory"), Entry("config", "file")]


def put_stream(backend: Backend, name: str, data: bytes, size_hint: int) -> None:
    stream = backend.put_stream(name, size_hint)
    stream.append(data)
    stream.commit()


def void(_: object) -> None:
    pass
