"""How a writer process comes to be: which ckstore it runs, with what, and what is said when it cannot be started."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import sealed
from ckstore.errors import BackendError, FormatError
from ckstore.retention import Retention
from ckstore.store import Store
from ckstore.throttle import TokenBucket, throttle_of
from ckstore.writer import __main__ as program
from ckstore.writer import client, launch, messages, service, sources
from ckstore.writer.client import WriterClient
from ckstore.writer.messages import Channel, Hello, Open, Opened, Prune, Pruned, Save
from ckstore.writer.service import serve
from ckstore.writer.watch import Watch, is_stopped
from tests.background.conftest import Writer

Noise = Callable[..., np.ndarray]
Opens = Callable[..., Store]
ROOT = Path(__file__).parents[2]
SITE = sysconfig.get_path("purelib")

TRAIN = """
import ckstore, numpy, sys
store = ckstore.open(sys.argv[1], create=True, cache_dir=sys.argv[2])
print(store.save_async({"w": numpy.arange(9.0)}, step=1).wait().step, ckstore.__file__)
store.close()
"""


def train(tmp_path: Path, begin: str, *flags: str, **environment: str) -> str:
    """Have a process save whose `sys.path` is the work of `begin`; from where it had ckstore."""
    found = subprocess.run(
        [sys.executable, *flags, "-c", f"import sys\n{begin}\n{TRAIN}", tmp_path / "store", tmp_path / "cache"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **environment},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    step, place = found.stdout.split()
    assert step == "1"
    return place


# ---- which ckstore


@pytest.mark.parametrize("begin", ["", "import ckstore; sys.path.insert(0, '{}')"])
def test_another_ckstore_that_comes_first_is_not_run(tmp_path: Path, begin: str) -> None:
    other = tmp_path / "other" / "ckstore"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the wrong ckstore')")
    begin = f"sys.path.insert(0, {str(ROOT)!r}); {begin.format(other.parent)}"
    assert train(tmp_path, begin, PYTHONPATH=str(other.parent)) == ckstore.__file__


@pytest.mark.parametrize("flags", [("-S",), ("-I", "-S"), ("-P", "-S"), ("-E", "-s", "-S")])
def test_dependencies_that_only_the_trainer_s_path_knows_are_found(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert train(tmp_path, f"sys.path += [{SITE!r}, {str(ROOT)!r}]", *flags) == ckstore.__file__


def test_entries_that_are_relative_are_meant_as_the_trainer_means_them(tmp_path: Path) -> None:
    (tmp_path / "vendored").symlink_to(ROOT)
    (tmp_path / "logging.py").write_text("raise SystemExit('a file beside the script')")
    begin = "import logging; sys.path[:0] = ['vendored', '']"
    assert train(tmp_path, begin, "-P") == str(tmp_path / "vendored" / "ckstore" / "__init__.py")


def test_a_ckstore_in_a_zip_file_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for path in (ROOT / "ckstore").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
    found = train(tmp_path, f"sys.path.insert(0, {str(tmp_path / 'app.zip')!r})")
    assert found == str(tmp_path / "app.zip" / "ckstore" / "__init__.py")


def test_a_path_longer_than_an_argument_may_be_is_handed_over(tmp_path: Path) -> None:
    begin = f"sys.path += ['/no/such/folder/' + 'x' * 200 + str(n) for n in range(3000)] + [{str(ROOT)!r}]"
    assert train(tmp_path, begin) == ckstore.__file__


def test_a_writer_of_another_version_is_refused(store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save({}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "VERSION", "0.0.1+feed")
        with pytest.raises(FormatError, match=r"another ckstore \(0\.1\.0\+\w+\) than this process \(0\.0\.1\+feed\)"):
            store.save_async({"w": noise(1)}, step=2).wait()
    assert store.save_async({"w": noise(1)}, step=3).wait().step == 3
    assert [info.step for info in store.snapshots()] == [3, 1]


def test_the_version_tells_modules_apart_by_name_and_content(tmp_path: Path) -> None:
    seen: set[str] = set()
    for name, text in [("a.py", "x"), ("b.py", "x"), ("a.py", "y"), ("a.txt", "x")]:
        path = tmp_path / f"{len(seen)}" / name
        path.parent.mkdir()
        path.write_text(text)
        seen.add(sources._digest(path.parent))
    assert len(seen) == 4


def test_what_is_no_module_is_no_part_of_the_version(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "part" / "b.py").write_text("y")
    digest = sources._digest(tmp_path)
    (tmp_path / "part" / ".#b.py").symlink_to("somebody@some.host.123")  # as Emacs locks a file
    (tmp_path / "broken.py").symlink_to("no such file")
    (tmp_path / "unreadable.py").symlink_to("/proc/self/mem")
    (tmp_path / "b-2.py").write_text("x")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.py").write_text("x")
    os.mkfifo(tmp_path / "pipe.py")
    assert sources._digest(tmp_path) == digest
    (tmp_path / "c.py").symlink_to("a.py")
    assert sources._digest(tmp_path) != digest


# ---- what the program has set for its sockets


@pytest.fixture
def default_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("default_timeout")
def test_a_default_timeout_of_the_program_is_not_the_writer_s(store: Store, noise: Noise) -> None:
    for step in (1, 2):
        assert store.save_async({"w": noise(step)}, step=step).wait().step == step


def test_a_default_timeout_in_the_writer_is_not_the_socket_s(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import socket; socket.setdefaulttimeout(0)")
    assert train(tmp_path, f"sys.path.insert(0, {str(ROOT)!r})", PYTHONPATH=str(tmp_path)) == ckstore.__file__


# ---- forks


@pytest.mark.parametrize("lock", [client._starting, sealed._guard], ids=["start", "index"])
def test_a_fork_whose_wait_was_interrupted_leaves_the_lock_as_it_is(lock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the other thread's in the parent, and nobody's in the child."""
    held, done = threading.Event(), threading.Event()
    ignored: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_type))

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    def interrupt(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # the fork waits for the lock until then
        if (pid := os.fork()) == 0:
            os._exit(3 if lock.acquire(blocking=False) else 4)
        assert not lock.acquire(blocking=False)  # it is the other thread's as before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        done.set()
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert ignored == [KeyboardInterrupt, RuntimeError]  # the wait; and there was nothing to release
    assert lock.acquire(blocking=False)
    lock.release()


INTERRUPTED_FORK = """
import logging, os, signal, sys, threading
from _thread import interrupt_main
from functools import partial

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGUSR1, interrupt)
# Comes up in the first Python code after the fork; logging has some, which is before this.
os.register_at_fork(after_in_parent=partial(interrupt_main, signal.SIGUSR1))

from ckstore import sealed
from ckstore.writer import client

try:
    if os.fork() == 0:
        os._exit(0)
except KeyboardInterrupt:
    os.wait()
else:
    sys.exit("not interrupted")
for lock in (client._starting, sealed._guard):
    free = []
    thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    print(free)
"""


def test_an_interrupt_as_a_fork_returns_leaves_no_lock_taken() -> None:
    found = subprocess.run([sys.executable, "-c", INTERRUPTED_FORK], capture_output=True, text=True, cwd=ROOT)
    assert (found.stdout, found.stderr, found.returncode) == ("[True]\n[True]\n", "", 0)


# ---- when it cannot be started


def test_a_writer_that_finds_no_module_is_told_at_once(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "MODULE", ["no_such_module"])
        with pytest.raises(BackendError, match="cannot be started: it ended with status 1 before") as caught:
            store.save_async({"w": noise(1)}, step=1).wait()
    assert not caught.value.retryable
    assert capfd.readouterr().err.count("No module named no_such_module") == 1
    assert store.save_async({"w": noise(1)}, step=2).wait().step == 2


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_that_knows_no_python_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(BackendError, match="names no Python interpreter here") as caught:
            store.save_async({}, step=1).wait()
    assert not caught.value.retryable
    assert store.save_async({}, step=2).wait().step == 2


def test_a_frozen_program_is_not_started_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(BackendError, match="names no Python interpreter here"):
        store.save_async({}, step=1).wait()


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("module", "name"), [(socket, "socketpair"), (os, "memfd_create"), (subprocess, "Popen")])
def test_a_system_that_refuses_is_told(store: Store, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    client = WriterClient(store._context)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(BackendError, match=r"cannot be started: .*Too many open files") as caught:
            client._connected()
    assert caught.value.retryable
    client._connected()
    client.close()


# ---- why a branch could not be pruned

POLICY = Retention.of({"keep_last": 1})


def test_whatever_keeps_a_branch_from_being_pruned_is_said(
    store: Store, place: Path, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save({"w": noise(1)}, step=1)
    client = WriterClient(store._context)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "MODULE", ["no_such_module"])
        assert "ended with status 1" in (client.prune("main", POLICY, False) or "")
    assert client.prune("main", Retention.of({"keep_last": 10**20}), False) is not None
    assert client.prune("main", POLICY, False) is None
    client.close()
    place.rename(place.with_name("elsewhere"))
    assert "there is no store" in (client.prune("main", POLICY, False) or "")


def test_a_number_that_cannot_be_sent_costs_no_save(
    store: Store, noise: Noise, caplog: pytest.LogCaptureFixture
) -> None:
    store.save_async({"w": noise(1)}, step=1, keep={"keep_last": 10**20}).wait()
    assert store.save_async({"w": noise(2)}, step=2).wait().step == 2
    store.wait()
    assert [text.partition(":")[0] for text in caplog.messages] == ["snapshot saved, but pruning failed"]


# ---- paths that are no text


def test_places_whose_names_are_no_text(tmp_path: Path, open_here: Opens, noise: Noise) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff")
    store = open_here(odd + "/store", cache_dir=odd + "/cache")
    assert store.save_async({"w": noise(1)}, step=1, keep={"keep_last": 1}).wait().step == 1
    store.wait()
    assert np.array_equal(store.restore()["w"], noise(1))


def test_an_error_that_names_such_a_place_comes_through(tmp_path: Path, open_here: Opens, noise: Noise) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff")
    store = open_here(odd + "/store", cache_dir=odd + "/cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "MODULE", ["tests.background.test_writer_start"])
        with pytest.raises(BackendError) as caught:
            store.save_async({"w": noise(1)}, step=1).wait()
    assert str(caught.value) == "cannot open " + odd.replace("\udcff", "\\udcff") + "/cache"
    assert store.save_async({"w": noise(1)}, step=2).wait().step == 2


def _serve_without_a_cache() -> None:
    """Be a writer that cannot open the store."""

    def refuse(opening: Open) -> Any:
        raise BackendError(f"cannot open {os.fsdecode(opening.cache)}")

    service._open = refuse
    program.main()


def _pid(store: Store) -> int:
    client: Any = store._background._runner  # type: ignore[union-attr]
    return int(client._process.pid)


def _pid_after_saving(store: Store, noise: Noise) -> int:
    store.save_async({"w": noise(1)}, step=1).wait()
    return _pid(store)


# ---- how fast it may write


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The bandwidth limit of every message to a writer that has one."""
    sent: list[tuple[str, int | None]] = []
    send = Channel.send

    def watched(self: Channel, message: Any, fd: int | None = None) -> None:
        if isinstance(message, Save | Prune):
            sent.append((type(message).__name__, message.bandwidth_limit))
        send(self, message, fd)

    monkeypatch.setattr(Channel, "send", watched)
    return sent


@pytest.mark.parametrize("first", [10**9, None])
def test_another_opening_s_limit_reaches_a_writer_that_runs(
    open_here: Opens, noise: Noise, limits: list[tuple[str, int | None]], first: int | None
) -> None:
    """The one that was set last holds; an opening without any changes nothing."""
    store = open_here(bandwidth_limit=first)
    pid = _pid_after_saving(store, noise)
    open_here(bandwidth_limit="2GB/s")
    store.save_async({"w": noise(2)}, step=2, keep={"keep_last": 1}).wait()
    open_here()
    store.save_async({"w": noise(3)}, step=3).wait()
    assert _pid(store) == pid
    store.close()
    assert limits == [("Save", first), ("Save", 2 * 10**9), ("Prune", 2 * 10**9), ("Save", 2 * 10**9)]


def test_a_store_opened_without_a_limit_keeps_to_that_of_an_earlier_opening(
    open_here: Opens, noise: Noise, limits: list[tuple[str, int | None]]
) -> None:
    open_here(bandwidth_limit=10**9).close()
    open_here().save_async({"w": noise(1)}, step=1).wait()
    assert limits == [("Save", 10**9)]


def test_a_thread_that_writes_keeps_to_another_opening_s_limit(
    open_here: Opens, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    def take(_: TokenBucket, size: int, now: float) -> float:
        waited.append(size)
        return 0.0

    monkeypatch.setattr(TokenBucket, "take", take)
    store = open_here("memory://limits")
    store.save_async({"w": noise(1, 9)}, step=1).wait()
    assert waited == []
    open_here("memory://limits", bandwidth_limit=10**6)
    store.save_async({"w": noise(2, 9)}, step=2).wait()
    assert sum(waited) >= 9 * 4096


def test_the_writer_keeps_to_the_limit_that_came_last(store: Store, place: Path, tmp_path: Path) -> None:
    config = store._context.config
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    trainer = Channel(ours)
    assert trainer.receive_in_trainer() == Hello(sources.VERSION)
    trainer.send(Open(store._context.backend.url, config.store, "fast", os.fsencode(tmp_path / "c")))
    assert trainer.receive_in_trainer() == Opened()
    found = throttle_of(config.store)
    for rate, then in ((None, None), (20_000, 20_000), (30_000, 30_000), (None, 30_000)):
        trainer.send(Prune("main", {"keep_last": 1}, False, rate))
        assert trainer.receive_in_trainer() == Pruned(None)
        assert found.rate == then
    trainer.finish()  # which waits for the writer to close its end
    thread.join()


# ---- a writer that is stopped


class Heard(logging.Handler):
    """Lets a test wait for a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.heard = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.heard.release()


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    logging.getLogger("ckstore").addHandler(found)
    yield found
    logging.getLogger("ckstore").removeHandler(found)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_writer_that_is_stopped_is_told_of_once_each_time_and_waited_for(
    store: Store, writer: Writer, noise: Noise, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    look_again = _count_looks(monkeypatch)
    monkeypatch.setattr(messages, "QUIET_SECONDS", 0.02)
    writer.waits("commit")
    pending = store.save_async({"w": noise(1, 9)}, step=1)
    with writer.gate.open("w"):  # it has come to the gate
        pid = _pid(store)
        for times in (1, 2):
            with stopped(pid):
                assert heard.heard.acquire(timeout=15)
                look_again(5)
                assert len(heard.texts) == times
            look_again(5)
    assert pending.wait().step == 1
    assert f"the writer process {pid} is stopped" in heard.texts[0]


def _count_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have looks counted; what comes back waits for so many more."""
    look, looked = Watch.look, threading.Semaphore(0)

    def counted(self: Watch) -> None:
        look(self)
        looked.release()

    def again(times: int) -> None:
        while looked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert looked.acquire(timeout=60)

    monkeypatch.setattr(Watch, "look", counted)
    return again


def test_a_writer_that_is_stopped_before_it_ends_is_told_of(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    pid = _pid_after_saving(store, noise)
    monkeypatch.setattr(messages, "QUIET_SECONDS", 0.02)
    thread = threading.Thread(target=store.close)
    with stopped(pid):
        thread.start()
        assert heard.heard.acquire(timeout=15)
    thread.join()
    assert f"the writer process {pid} is stopped" in heard.texts[0]


def test_a_large_message_goes_through_a_full_socket_to_whoever_is_slow() -> None:
    first, second = socket.socketpair()
    text = "x" * 3_000_000
    looks = threading.Semaphore(0)
    trainer, writer = Channel(first, looks.release), Channel(second)
    thread = threading.Thread(target=lambda: trainer.send(Hello(text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "QUIET_SECONDS", 0.01)
        thread.start()
        assert looks.acquire(timeout=60)  # it cannot go on
        assert writer.receive_in_trainer() == Hello(text)
        thread.join()
    trainer.close()
    writer.close()


def test_whether_a_process_is_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_stopped(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_stopped(child.pid)
    child.kill()
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert not is_stopped(child.pid)


if __name__ == "__main__":
    _serve_without_a_cache()
