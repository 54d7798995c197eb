"""The ways a process that saves in the background may end, fork, spawn or be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import staging
from ckstore.errors import InvalidInputError
from ckstore.store import Store
from ckstore.writer import client
from tests.background.conftest import CHUNK, Writer

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
ROOT = Path(__file__).parents[2]

BEGIN = """
import multiprocessing, os, sys
import numpy as np
import ckstore

store = ckstore.open(sys.argv[1], create=True, cache_dir=sys.argv[2], chunk_size=4096)
buffer = np.arange(40_000.0)
store.save_async({"w": buffer}, step=1)
buffer[:] = 0
"""


def run(tmp_path: Path, rest: str, begin: str = BEGIN) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(begin + rest)
    return subprocess.run(
        [sys.executable, script, tmp_path / "store", tmp_path / "cache"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def check(tmp_path: Path, *steps: int) -> None:
    with ckstore.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert [info.step for info in store.snapshots()] == list(steps)
        for step in steps:
            assert np.array_equal(store.restore(step)["w"], np.arange(40_000.0))
        assert store.status().undecided == []


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("del store", 0),
        ("store.close(); store.close()", 0),
        ("raise ZeroDivisionError", 1),
        ("import threading; threading.Thread(target=lambda: None).start()", 0),
    ],
)
def test_a_process_that_ends_finishes_what_it_began(tmp_path: Path, rest: str, status: int) -> None:
    found = run(tmp_path, rest)
    assert (found.returncode, "ckstore:" in found.stderr) == (status, False)
    check(tmp_path, 1)


FAILING = """
import sys
import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.testing.faults import Fault, FaultyBackend
import numpy as np

backend = FaultyBackend(MemoryBackend(), Fault("put_stream", 1, ckstore.NoSpaceError("the storage is full")))
store = ckstore.open(backend, create=True, cache_dir=sys.argv[2])
import atexit
atexit.register(print, "other things at exit are done")
store.save_async({"w": np.arange(9.0)}, step=1)
"""


def test_a_save_that_fails_while_the_process_ends_is_told_and_is_no_success(tmp_path: Path) -> None:
    found = run(tmp_path, "print('last line')", FAILING)
    assert found.stdout.splitlines() == ["last line", "other things at exit are done"]
    assert "ckstore: a save in the background failed, and nothing was saved: the storage is full" in found.stderr
    assert found.returncode == 1


WORKER = """
import multiprocessing, os, sys, threading
import numpy as np
import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.testing.faults import Fault, FaultyBackend

def work(fails, end, queue):
    full = [Fault("put_stream", 1, ckstore.NoSpaceError("the storage is full"))] if fails else []
    store = ckstore.open(FaultyBackend(MemoryBackend(), *full), create=True, cache_dir=sys.argv[2])
    store.save_async({"w": np.arange(9.0)}, step=1)
    threading.Thread(target=print, args=["a thread is waited for"]).start()
    queue.put("x" * 100_000)
    if end == "raise":
        raise ZeroDivisionError
    if end is not None:
        sys.exit(end)

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    queue = context.Queue()
    worker = context.Process(target=work, args=(FAILS, END, queue))
    worker.start()
    assert len(queue.get()) == 100_000
    worker.join()
    sys.exit(worker.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("fails", "end", "status"),
    [(True, None, 1), (True, 0, 1), (True, 7, 7), (True, "raise", 1), (False, None, 0), (False, 7, 7)],
)
def test_a_save_that_fails_while_a_worker_ends_is_told_and_is_no_success(
    tmp_path: Path, method: str, fails: bool, end: Any, status: int
) -> None:
    """Whatever else happens at the end of a process of multiprocessing still happens."""
    head = f"METHOD, FAILS, END = {method!r}, {fails}, {end!r}\n"
    found = run(tmp_path, "", head + WORKER)
    told = "ckstore: a save in the background failed, and nothing was saved: the storage is full" in found.stderr
    assert (found.returncode, told) == (status, fails)
    assert ("ZeroDivisionError" in found.stderr) == (end == "raise")
    assert found.stdout == "a thread is waited for\n"


@pytest.mark.parametrize("end", ["sys.exit(0)", "pass"])
def test_a_save_that_fails_while_a_fork_ends_is_told_and_is_no_success(tmp_path: Path, end: str) -> None:
    forked = f"""
from ckstore.backend.memory import MemoryBackend
from ckstore.testing.faults import Fault, FaultyBackend

store.close()
sys.stdout.flush()
if (pid := os.fork()) == 0:
    backend = FaultyBackend(MemoryBackend(), Fault("put_stream", 1, ckstore.NoSpaceError("the disk is full")))
    store = ckstore.open(backend, create=True, cache_dir=sys.argv[2])
    store.save_async({{"w": np.arange(9.0)}}, step=1)
    {end}
else:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    found = run(tmp_path, forked)
    assert (found.stdout, found.returncode) == ("1\n", 0)
    assert "ckstore: a save in the background failed, and nothing was saved: the disk is full" in found.stderr


def test_a_fork_saves_with_a_writer_of_its_own(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
def held():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return [name for name in found if "memfd" in name or "socket" in name], "memfd" in open("/proc/self/maps").read()

assert held()[1] and held()[0]
if (pid := os.fork()) == 0:
    assert held() == ([], False), held()
    again = np.arange(40_000.0)
    store.save_async({"w": again}, step=2, branch="child").wait()
    store.close()
    os._exit(5)
status = os.waitpid(pid, 0)[1]
assert os.waitstatus_to_exitcode(status) == 5, status
store.save_async({"w": np.arange(40_000.0)}, step=3).wait()
""",
    )
    assert (found.returncode, found.stderr) == (0, "")
    with ckstore.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert [info.step for info in store.snapshots("main")] == [3, 1]
        assert [info.step for info in store.snapshots("child")] == [2]
        assert store.verify().ok


def test_what_a_parent_began_is_not_its_fork_s(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
pending = store.save_async({"w": np.arange(40_000.0)}, step=2)
if (pid := os.fork()) == 0:
    try:
        pending.wait()
    except ckstore.InvalidInputError as error:
        store.close()  # which has nothing to wait for
        os._exit(5 if "this is a fork" in str(error) else 6)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
pending.wait()
""",
    )
    assert (found.returncode, found.stderr) == (0, "")
    check(tmp_path, 2, 1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_multiprocessing_starts_do_no_harm(tmp_path: Path, method: str) -> None:
    guarded = BEGIN.replace("\nstore", "\nif __name__ == '__main__':\n  store").replace("\nbuffer", "\n  buffer")
    guarded = guarded.replace("\n  store.save_async", "\n  store.save_async")
    found = run(
        tmp_path,
        f"""
def work(n):
    return n + 1
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        assert pool.map(work, [1, 2, 3]) == [2, 3, 4]
        store.save_async({{"w": np.arange(40_000.0)}}, step=2).wait()
        assert pool.map(work, [4]) == [5]
""",
        guarded,
    )
    assert (found.returncode, found.stderr) == (0, "")
    check(tmp_path, 2, 1)


def test_a_file_beside_the_script_is_not_taken_for_a_module(tmp_path: Path) -> None:
    for name in ("socket", "signal", "mmap", "ckstore"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    script = "import os; os.chdir(sys.argv[1] + '/..'); store.save_async({'w': np.arange(40_000.0)}, step=2)\n"
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-P", "-c", BEGIN + script, str(tmp_path / "store"), str(tmp_path / "cache")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    check(tmp_path, 2, 1)


def test_an_interrupt_in_the_call_leaves_nothing_half_begun(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.copy

    def interrupted(blobs: Any) -> None:
        real(blobs)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save_async({"w": noise(1, 30)}, step=1)
    store.wait()
    assert store.snapshots() == []
    assert store.save_async({"w": noise(2, 30)}, step=2, when_busy="skip").wait().step == 2
    assert [info.step for info in store.snapshots()] == [2]


def test_an_interrupt_while_waiting_lets_the_save_go_on(store: Store, writer: Writer, noise: Noise) -> None:
    writer.waits("commit")
    first = store.save_async({"w": noise(1, 9)}, step=1)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGUSR1)

    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for act in (first.wait, lambda: store.save_async({}, step=2), store.wait):
            thread = threading.Thread(target=interrupt)
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                act()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    writer.go_on()
    assert first.wait().step == 1
    assert store.save_async({}, step=3, when_busy="skip").wait().step == 3
    assert [info.step for info in store.snapshots()] == [3, 1]


def test_a_signal_handler_that_saves_in_the_middle_of_the_call_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = staging.copy, []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            store.save_async({}, step=9)
        except InvalidInputError as error:
            refused.append(str(error))

    def disturbed(blobs: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        real(blobs)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(staging, "copy", disturbed)
        store.save_async({}, step=1).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1 and "set a flag" in refused[0]
    assert [info.step for info in store.snapshots()] == [1]


def test_a_small_dev_shm_is_no_limit(store: Store, noise: Noise) -> None:
    store.save_async({"w": noise(1, 30)}, step=1).wait()
    (area,) = store._background._areas._idle  # type: ignore[union-attr]
    assert os.readlink(f"/proc/self/fd/{area.fd}").startswith("/memfd:ckstore-staging")
    assert os.fstat(area.fd).st_size >= 30 * CHUNK


def test_no_fork_falls_into_the_start_of_a_writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would inherit the writer's end of the socket, and the pipe by which Popen waits for its child.
    real, held = subprocess.Popen, []

    def watched(*args: Any, **options: Any) -> Any:
        held.append(client._starting._is_owned())
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client.subprocess, "Popen", watched)  # type: ignore[attr-defined]
        store.save_async({}, step=1).wait()
    assert held == [True]
    assert not client._starting._is_owned()
    if (pid := os.fork()) == 0:
        os._exit(4 if client._starting._is_owned() else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
