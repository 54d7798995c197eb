"""The index: right while it is whole, silent about everything else."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import msgspec
import pytest

from ckstore import layout, sealed
from ckstore.format.manifest import Location
from ckstore.ids import SaveName, digest
from ckstore.index import ChunkIndex
from ckstore.process import current_owner

SAVE = SaveName(1, "00000000000000aa")
OTHER = SaveName(2, "00000000000000bb")
PACKS = [layout.pack(SAVE, 0, number) for number in range(3)]
IDS = [digest(bytes([i])) for i in range(60)]
PLACES = [Location(PACKS[i % 3], 64 + (i << 33), 2**32 - 1 - i, i % 3, i % 9) for i in range(60)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "store"


@pytest.fixture
def index(path: Path) -> Iterator[ChunkIndex]:
    found = ChunkIndex.open(path)
    yield found
    found.close()


def filled(index: ChunkIndex) -> bool:
    """Whether the index holds all of `IDS` at `PLACES`; asserts that it holds nothing else."""
    found = [index.get(chunk) for chunk in IDS]
    assert all(hit in (None, place) for hit, place in zip(found, PLACES, strict=True))
    return None not in found


def test_an_index_that_was_never_written_is_empty_and_makes_no_files(path: Path, index: ChunkIndex) -> None:
    assert index.get(IDS[0]) is None
    assert not index.covers(SAVE)
    index.forget([])
    assert not path.exists()


def test_what_was_added_is_found(index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    assert filled(index)
    assert (index.covers(SAVE), index.covers(OTHER)) == (True, False)
    assert index.get(digest(b"unknown")) is None


def test_it_is_found_again_after_reopening(path: Path) -> None:
    first = ChunkIndex.open(path)
    first.add(SAVE, IDS, PLACES)
    first.close()
    second = ChunkIndex.open(path)
    assert filled(second)
    assert second.covers(SAVE)
    second.close()


def test_a_later_place_replaces_the_earlier(index: ChunkIndex) -> None:
    index.add(SAVE, IDS[:1], PLACES[:1])
    index.add(OTHER, IDS[:1], PLACES[1:2])
    assert index.get(IDS[0]) == PLACES[1]


def test_forgotten_packs_are_misses_and_no_save_is_covered_any_more(index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    index.add(OTHER, [], [])
    index.forget([PACKS[1], "packs/unknown"])
    assert [index.get(chunk) for chunk in IDS] == [None if place.pack == PACKS[1] else place for place in PLACES]
    assert (index.covers(SAVE), index.covers(OTHER)) == (False, False)


def test_a_number_that_is_used_again_does_not_revive_old_entries(index: ChunkIndex) -> None:
    index.add(SAVE, IDS[:3], PLACES[:3])
    index.forget([PACKS[2]])
    new = Location(layout.pack(OTHER, 0, 0), 64, 5, 0, 0)
    index.add(OTHER, IDS[10:11], [new])
    assert index.get(IDS[10]) == new
    assert index.get(IDS[2]) is None


def test_several_in_one_process_share_one_environment(path: Path, index: ChunkIndex) -> None:
    second = ChunkIndex.open(path.parent / "." / "store")
    second.add(SAVE, IDS, PLACES)
    assert filled(index)
    second.close()
    second.close()
    assert filled(index)
    assert second.get(IDS[0]) is None
    second.add(OTHER, IDS, PLACES)
    assert not index.covers(OTHER)


def test_threads_may_share_it(index: ChunkIndex) -> None:
    def work(number: int) -> None:
        for i in range(20):
            index.add(SaveName(100 + number, f"{i:016x}"), IDS, PLACES)
            assert filled(index)
        done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]


def flip_some(path: Path) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    chance = random.Random(len(data))
    for _ in range(200):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    (path / "data.mdb").write_bytes(data)


def flip_one(path: Path) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "data.mdb").write_bytes(data)


def copy(path: Path) -> None:
    """The same bytes in another file, beside a lock file of their own past."""
    shutil.copy(path / "data.mdb", path / "copy")
    (path / "copy").replace(path / "data.mdb")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one bit": flip_one,
    "many bits": flip_some,
    "cut": lambda path: os.truncate(path / "data.mdb", 4096 + 100),
    "empty": lambda path: os.truncate(path / "data.mdb", 0),
    "zeros": lambda path: (path / "data.mdb").write_bytes(bytes(100_000)),
    "text": lambda path: (path / "data.mdb").write_bytes(b"not a database"),
    "data gone": lambda path: (path / "data.mdb").unlink(),
    "lock gone": lambda path: (path / "lock.mdb").unlink(),
    "seal gone": lambda path: (path / "seal").unlink(),
    "seal cut": lambda path: os.truncate(path / "seal", 10),
    "all gone": shutil.rmtree,
    "copied": copy,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_index_is_empty_and_begun_anew(kind: str, path: Path) -> None:
    first = ChunkIndex.open(path)
    first.add(SAVE, IDS, PLACES)
    first.close()
    DAMAGE[kind](path)
    second = ChunkIndex.open(path)
    assert not filled(second)
    assert not second.covers(SAVE)
    second.add(OTHER, IDS, PLACES)
    assert filled(second)
    second.close()


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if "gone" in kind or kind == "copied"])
def test_files_that_go_while_it_is_open_do_no_harm(kind: str, path: Path, index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    DAMAGE[kind](path)
    filled(index)
    index.add(OTHER, IDS, PLACES)
    assert filled(index)
    assert index.covers(OTHER)


def test_damage_while_it_is_open_is_found_by_the_next_write(path: Path, index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    flip_one(path)
    index.add(OTHER, [], [])
    assert (index.covers(SAVE), index.covers(OTHER)) == (False, True)


BEGIN_ANEW = """
import sys
from pathlib import Path
from ckstore.ids import SaveName
from ckstore.index import ChunkIndex

(Path(sys.argv[1]) / "seal").unlink()
index = ChunkIndex.open(Path(sys.argv[1]))
index.add(SaveName.parse(sys.argv[2]), [], [])
"""


def test_an_index_begun_anew_by_another_process_is_followed(path: Path, index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    subprocess.run([sys.executable, "-c", BEGIN_ANEW, str(path), str(OTHER)], check=True, cwd=Path(__file__).parents[2])
    assert (index.covers(SAVE), index.covers(OTHER)) == (False, True)


def test_a_lock_file_removed_at_the_wrong_moment_is_no_lock(
    path: Path, index: ChunkIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_first(descriptor: int, operation: int) -> None:
        (path / "busy").unlink(missing_ok=True)
        flock(descriptor, operation)

    flock = fcntl.flock
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", removed_first)
        index.add(SAVE, IDS, PLACES)
    assert not index.covers(SAVE)
    index.add(SAVE, IDS, PLACES)
    assert index.covers(SAVE)


def test_every_flipped_byte_of_the_file_is_a_miss(path: Path) -> None:
    index = ChunkIndex.open(path)
    index.add(SAVE, IDS[:3], PLACES[:3])
    index.close()
    whole = (path / "data.mdb").read_bytes()
    for i in range(0, len(whole), 37):
        with (path / "data.mdb").open("r+b") as file:
            file.seek(i)
            file.write(bytes([whole[i] ^ 0x10]))
        assert not sealed.SealedEnvironment(str(path), 1 << 20)._is_whole()
        with (path / "data.mdb").open("r+b") as file:
            file.seek(i)
            file.write(whole[i : i + 1])
    index = ChunkIndex.open(path)
    assert index.get(IDS[0]) is None  # nobody knows that all is as it was
    index.close()


def test_every_seal_is_another_one(path: Path, index: ChunkIndex) -> None:
    seals = set()
    for _ in range(20):
        index.add(SAVE, IDS, PLACES)
        seals.add((path / "seal").read_bytes())
        assert (path / "data.mdb").stat().st_mtime < 1.1e9
    assert len(seals) == 20


@pytest.mark.parametrize("boot", ["another boot", ""])
def test_after_another_boot_an_index_is_begun_anew(boot: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may have torn what was never made durable."""
    first = ChunkIndex.open(path)
    first.add(SAVE, IDS, PLACES)
    first.close()
    monkeypatch.setattr(sealed, "current_owner", lambda: msgspec.structs.replace(current_owner(), boot=boot))
    second = ChunkIndex.open(path)
    assert second.get(IDS[0]) is None
    second.add(SAVE, IDS, PLACES)
    assert filled(second)
    second.close()


def file_in_the_way(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")


def directories_in_the_way(path: Path) -> None:
    (path / "data.mdb" / "x").mkdir(parents=True)


def link_in_the_way(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "busy").symlink_to(path / "elsewhere")


@pytest.mark.parametrize("obstacle", [file_in_the_way, directories_in_the_way, link_in_the_way])
def test_a_directory_that_cannot_be_used_makes_everything_a_miss(
    obstacle: Callable[[Path], None], path: Path, index: ChunkIndex
) -> None:
    obstacle(path)
    index.add(SAVE, IDS, PLACES)
    assert index.get(IDS[0]) is None
    assert not index.covers(SAVE)
    index.forget(PACKS)


def test_a_path_that_cannot_be_is_a_miss() -> None:
    index = ChunkIndex.open(Path("/proc/self/nothing/here"))
    index.add(SAVE, IDS, PLACES)
    assert index.get(IDS[0]) is None
    index.close()


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("x"), lmdb.CorruptedError("x"), lmdb.ReadersFullError("x"), OSError(28, "full")]
)
def test_errors_of_lmdb_are_misses_until_the_next_write(
    error: Exception, index: ChunkIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raised.append(error)
        raise error

    raised: list[Exception] = []
    index.add(SAVE, IDS, PLACES)
    with monkeypatch.context() as patch:
        patch.setattr("ckstore.index.ChunkIndex._find", fail)
        patch.setattr("ckstore.index._add", fail)
        assert index.get(IDS[0]) is None
        index.add(OTHER, IDS, PLACES)
        assert index.get(IDS[0]) is None
    assert len(raised) == 2
    index.add(OTHER, IDS, PLACES)
    assert filled(index)


def test_a_full_map_is_begun_anew(path: Path) -> None:
    index = ChunkIndex.open(path, map_size=256 << 10)
    for i in range(40):
        ids = [digest(f"{i} {j}".encode()) for j in range(100)]
        places = [Location(PACKS[0], 64 + j, 1, 0, 0) for j in range(100)]
        index.add(SaveName(10 + i, SAVE.nonce), ids, places)
        assert [index.get(chunk) for chunk in ids] == places
    assert not index.covers(SaveName(10, SAVE.nonce))
    too_many = [digest(str(i).encode()) for i in range(20_000)]
    index.add(SAVE, too_many, [PLACES[0]] * len(too_many))
    assert not index.covers(SAVE)
    index.add(SAVE, IDS, PLACES)
    assert filled(index)
    index.close()


def in_child(act: Callable[[], bool]) -> bool:
    """Run `act` in a forked child and say whether it returned true."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if act() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_parent_and_forked_child_both_read_and_write(path: Path, index: ChunkIndex) -> None:
    def child() -> bool:
        before = filled(index)
        index.add(OTHER, IDS, PLACES)
        return before and index.covers(OTHER)

    index.add(SAVE, IDS, PLACES)
    assert in_child(child)
    assert filled(index)
    assert index.covers(OTHER)
    assert in_child(lambda: in_child(child) and filled(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_fork_while_threads_use_it(index: ChunkIndex) -> None:
    def work() -> None:
        while not stop.is_set():
            index.get(IDS[0])

    def child() -> bool:
        while not filled(index):  # a miss while the parent opens its files again is no fault
            pass
        return True

    index.add(SAVE, IDS, PLACES)
    stop = threading.Event()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [in_child(child) for _ in range(20)] == [True] * 20
    finally:
        stop.set()
        for thread in threads:
            thread.join()


WRITER = """
import os, signal, sys
from pathlib import Path
import lmdb
from ckstore import index as module
from ckstore.ids import SaveName, digest
from ckstore.format.manifest import Location

path, moment, sign = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
index = module.ChunkIndex.open(path)
index.get(bytes(32))
place = Location("packs/ffffffffffffffff-0000000000000000/0-0", 64, 1, 0, 0)

def die(*_):
    print("now", flush=True)
    os.kill(os.getpid(), sign)

add = module._add
def interrupted(transaction, *rest):
    add(transaction, *rest)
    die()

if moment == "transaction":
    module._add = interrupted
else:
    module.sealed.SealedEnvironment._seal = die
index.add(SaveName(77, "0" * 16), [digest(b"other")], [place])
if sign == signal.SIGSTOP:
    print("went on", flush=True)
"""


def start_writer(path: Path, moment: str, sign: signal.Signals) -> subprocess.Popen[str]:
    """A process that sends itself `sign` in a write transaction, or between it and its seal; it is there on return."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), moment, str(int(sign))],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    return child


@pytest.mark.parametrize("moment", ["transaction", "seal"])
def test_a_writer_that_is_killed_blocks_nobody(moment: str, path: Path, index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    child = start_writer(path, moment, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert child.stdout is not None
    child.stdout.close()
    assert filled(index)
    index.add(OTHER, IDS, PLACES)
    assert filled(index)
    assert index.covers(OTHER)


@pytest.mark.parametrize("moment", ["transaction", "seal"])
def test_a_writer_that_is_stopped_makes_others_skip_and_goes_on_later(
    moment: str, path: Path, index: ChunkIndex
) -> None:
    index.add(SAVE, IDS, PLACES)
    with start_writer(path, moment, signal.SIGSTOP) as child:
        os.waitpid(child.pid, os.WUNTRACED)
        assert filled(index)
        index.add(OTHER, IDS, PLACES)
        assert not index.covers(OTHER)
        assert in_child(lambda: not filled(index) and not index.covers(SAVE))
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout is not None
        assert child.stdout.readline() == "went on\n"
        assert child.wait() == 0
    index.add(OTHER, IDS, PLACES)
    assert filled(index)
    assert index.covers(OTHER)


BUSY = """
import sys
from pathlib import Path
from ckstore.format.manifest import Location
from ckstore.ids import SaveName, digest
from ckstore.index import ChunkIndex

path, who = Path(sys.argv[1]), int(sys.argv[2])
index = ChunkIndex.open(path)
hits = 0
for turn in range(60):
    save = SaveName(1000 + turn, f"{who:016x}")
    ids = [digest(b"%d %d" % (turn, i)) for i in range(50)]
    places = [Location("packs/%s/0-0" % SaveName(1000 + turn, "0" * 16), 64 + i, 1, 0, 0) for i in range(50)]
    index.add(save, ids, places)
    found = [index.get(chunk) for chunk in ids]
    assert all(hit in (None, place) for hit, place in zip(found, places)), (found, places)
    hits += sum(hit is not None for hit in found)
    if turn % 20 == 19:
        index.forget([places[0].pack])
        index.close()
        index = ChunkIndex.open(path)
print(hits)
"""


def test_many_processes_at_once_never_get_a_wrong_place(path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, str(path), str(who)],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for who in range(4)
    ]  # fmt: skip
    found = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert sum(map(int, found)) > 0


def test_readers_keep_one_slot_each(path: Path, index: ChunkIndex) -> None:
    index.add(SAVE, IDS, PLACES)
    for chunk in IDS:
        index.get(chunk)
    with sealed._guard:
        env = sealed._shared[os.path.realpath(path)]._env
        assert env is not None
        assert env.info()["num_readers"] == 1


@pytest.mark.parametrize("size", [0, 4096])
def test_a_file_that_was_cut_under_an_open_index_kills_nobody(tmp_path: Path, size: int) -> None:
    child = (
        "import glob, os, sys, ckstore\n"
        "store = ckstore.open(sys.argv[1] + '/store', create=True, cache_dir=sys.argv[1] + '/cache')\n"
        "store.save({'a': b'x' * 9000}, step=1)\n"
        "(data,) = glob.glob(sys.argv[1] + '/cache/*/data.mdb')\n"
        f"os.truncate(data, {size})\n"
        "store.save({'a': b'y' * 9000}, step=2)\n"
        "store.save({'a': b'y' * 9000}, step=3)\n"
    )
    assert subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=False).returncode == 0
