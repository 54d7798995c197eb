"""The simulated file system behaves like the real one, and its crashes leave all that they may and no more."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckstore.backend.fs import Fs, OsFs
from ckstore.testing.crashes import CrashExplorer, CrashRules, crash_states, torn
from ckstore.testing.simfs import Operation, SimFs

Tree = dict[str, bytes]


def write(fs: Fs, path: str, data: bytes, *, fsync: bool) -> None:
    fd = fs.create(path)
    fs.write(fd, memoryview(data), 0)
    if fsync:
        fs.fsync(fd)
    fs.close(fd)


def fsync_directory(fs: Fs, path: str) -> None:
    fd = fs.open_directory(path)
    fs.fsync(fd)
    fs.close(fd)


def trees(fs: SimFs, rules: CrashRules | None = None) -> list[Tree]:
    """What may be left when the machine crashes now."""
    return [state.tree() for state in crash_states(fs, len(fs.log), rules)]


def in_any_order(found: list[Tree]) -> list[list[tuple[str, bytes]]]:
    return sorted(sorted(tree.items()) for tree in found)


# like the real one


def answer(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def step(fs: Fs, root: str, lots: random.Random) -> object:
    """One random call and what it says; the same lots give the same call."""
    paths = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "a/below", "missing/a"]
    one, two = (f"{root}/{lots.choice(paths)}" for _ in range(2))
    data, offset, size = lots.randbytes(lots.randrange(9)), lots.randrange(6), lots.randrange(12)

    def write_some() -> int:
        fd = fs.create(one)
        try:
            if size > 8:
                fs.preallocate(fd, size)
            written = fs.write(fd, memoryview(data), offset)
            if size < 4:
                fs.truncate(fd, size)
            fs.fsync(fd)
            return written
        finally:
            fs.close(fd)

    def read_some() -> tuple[bytes, int, bytes, int]:
        fd = fs.open(one)
        try:
            out = bytearray(size)
            return fs.read(fd, size, offset), fs.read_into(fd, memoryview(out), offset), bytes(out), fs.fstat(fd).size
        finally:
            fs.close(fd)

    def look() -> tuple[str, int]:
        found = fs.stat(one)
        return found.kind, found.size if found.kind == "file" else 0

    def rename_file() -> None:
        if fs.stat(one).kind != "directory":  # no store renames a directory
            fs.rename(one, two)

    calls: list[Callable[[], object]] = [
        write_some,
        write_some,
        read_some,
        look,
        lambda: sorted((entry.name, entry.kind) for entry in fs.scandir(one)),
        lambda: fs.mkdir(one),
        lambda: fs.rmdir(one),
        rename_file,
        lambda: fs.link(one, two),
        lambda: fs.unlink(one),
        lambda: fsync_directory(fs, one),
    ]
    return answer(lots.choice(calls))


@pytest.mark.parametrize("seed", range(20))
def test_it_answers_like_the_real_one(tmp_path: Path, seed: int) -> None:
    sim, real = SimFs(), OsFs()
    sim.mkdir("/root")
    mine, its = random.Random(seed), random.Random(seed)
    for number in range(300):
        found, expected = step(sim, "/root", mine), step(real, str(tmp_path), its)
        assert found == expected, f"call {number}"
    assert sim.open_files == []


def test_an_unlinked_file_can_be_read_while_it_is_open() -> None:
    fs = SimFs()
    write(fs, "/a", b"abc", fsync=False)
    fd = fs.open("/a")
    fs.unlink("/a")
    assert fs.read(fd, 9, 1) == b"bc"
    assert fs.open_files == ["/a"]


def test_a_full_one_refuses_to_grow() -> None:
    fs = SimFs(capacity=4)
    write(fs, "/a", b"abcd", fsync=True)
    with pytest.raises(OSError) as caught:
        write(fs, "/b", b"e", fsync=True)
    assert caught.value.errno == errno.ENOSPC
    fs.unlink("/a")
    write(fs, "/c", b"e", fsync=True)


# bytes


def test_bytes_not_fsynced_may_be_absent_zeroed_or_torn() -> None:
    fs = SimFs()
    write(fs, "/a", b"abcd", fsync=False)
    fsync_directory(fs, "/")
    expected = [b"", b"\0\0\0\0", b"a", b"a\0\0\0", b"ab", b"ab\0\0", b"abc", b"abc\0", b"abcd"]
    assert in_any_order(trees(fs)) == in_any_order([{"/a": data} for data in expected])


def test_bytes_fsynced_stay_wherever_a_name_leads_to_them() -> None:
    fs = SimFs()
    write(fs, "/a", b"abcd", fsync=True)
    fs.link("/a", "/b")
    expected: list[Tree] = [{"/": b""}, {"/a": b"abcd"}, {"/b": b"abcd"}, {"/a": b"abcd", "/b": b"abcd"}]
    assert in_any_order(trees(fs)) == in_any_order(expected)


def test_pages_reach_the_disk_in_any_order() -> None:
    data = random.Random(1).randbytes(3 * 4096)
    found = torn("/a", b"", data)
    for cut in (1, 4096, 8192, 3 * 2048, len(data) - 1):
        assert data[:cut] in found
        assert data[:cut] + bytes(len(data) - cut) in found
    assert bytes(4096) + data[4096:] in found


def test_tearing_keeps_what_was_fsynced() -> None:
    assert all(found.startswith(b"abc") for found in torn("/a", b"abc", b"abcdefgh"))
    assert sorted(torn("/a", b"aaa", b"bbb")) == [b"aaa", b"baa", b"bba", b"bbb"]


def test_an_appended_file_keeps_its_beginning() -> None:
    fs = SimFs()
    fd = fs.create("/a")
    fs.write(fd, memoryview(b"abc"), 0)
    fs.fsync(fd)
    fsync_directory(fs, "/")
    fs.write(fd, memoryview(b"de"), 3)
    assert in_any_order(trees(fs)) == in_any_order([{"/a": d} for d in (b"abc", b"abcd", b"abcd\0", b"abcde")])


# names


def test_names_not_fsynced_happen_in_any_subset() -> None:
    fs = SimFs()
    fs.mkdir("/d")
    write(fs, "/d/a", b"x", fsync=True)
    write(fs, "/b", b"y", fsync=True)
    expected: list[Tree] = [
        {"/": b""},
        {"/b": b"y"},
        {"/d/": b""},
        {"/b": b"y", "/d/": b""},
        {"/d/a": b"x"},
        {"/b": b"y", "/d/a": b"x"},
    ]
    assert in_any_order(trees(fs)) == in_any_order(expected)


def test_an_fsync_settles_the_names_of_its_directory_only() -> None:
    fs = SimFs()
    fs.mkdir("/d")
    write(fs, "/d/a", b"x", fsync=True)
    fsync_directory(fs, "/d")
    assert in_any_order(trees(fs)) == in_any_order([{"/": b""}, {"/d/a": b"x"}])
    fsync_directory(fs, "/")
    assert trees(fs) == [{"/d/a": b"x"}]


def test_a_rename_is_wholly_there_or_not() -> None:
    fs = SimFs()
    fs.mkdir("/d")
    write(fs, "/a", b"new", fsync=True)
    write(fs, "/d/a", b"old", fsync=True)
    fs = fs.reboot()
    fs.rename("/a", "/d/a")
    before: Tree = {"/a": b"new", "/d/a": b"old"}
    after: Tree = {"/d/a": b"new"}
    assert in_any_order(trees(fs)) == in_any_order([before, after])
    fsync_directory(fs, "/d")
    assert trees(fs) == [after]


def test_what_became_durable_later_is_not_undone_by_what_came_before() -> None:
    """The name of a temporary, never fsynced, does not come back after a durable rename took it away."""
    fs = SimFs()
    fs.mkdir("/tmp")
    fs.mkdir("/d")
    fs = fs.reboot()
    write(fs, "/tmp/t", b"x", fsync=True)
    fs.rename("/tmp/t", "/d/a")
    fsync_directory(fs, "/d")
    assert trees(fs) == [{"/d/a": b"x", "/tmp/": b""}]
    write(fs, "/tmp/t", b"y", fsync=True)
    expected: list[Tree] = [{"/d/a": b"x", "/tmp/": b""}, {"/d/a": b"x", "/tmp/t": b"y"}]
    assert in_any_order(trees(fs)) == in_any_order(expected)


@pytest.mark.parametrize("removal", ["unlink", "rmdir"])
def test_a_removal_not_fsynced_may_not_have_happened(removal: str) -> None:
    fs = SimFs()
    fs.mkdir("/d")
    write(fs, "/a", b"x", fsync=True)
    fs = fs.reboot()
    whole = fs.tree()
    if removal == "unlink":
        fs.unlink("/a")
    else:
        fs.rmdir("/d")
    assert in_any_order(trees(fs)) == in_any_order([whole, fs.tree()])
    fsync_directory(fs, "/")
    assert trees(fs) == [fs.tree()]


def test_time_makes_everything_durable() -> None:
    fs = SimFs()
    fs.mkdir("/d")
    write(fs, "/d/a", b"abc", fsync=False)
    fs.sync()
    assert trees(fs) == [{"/d/a": b"abc"}]


# enumeration


def workload() -> SimFs:
    fs = SimFs()
    fs.mkdir("/d")
    fsync_directory(fs, "/")
    write(fs, "/d/t", b"abc", fsync=True)
    fs.rename("/d/t", "/d/a")
    fsync_directory(fs, "/d")
    return fs


def test_ignored_fsyncs_have_no_effect() -> None:
    def fully_durable(rules: CrashRules) -> bool:
        return trees(workload(), rules) == [{"/d/a": b"abc"}]

    assert fully_durable(CrashRules())
    assert [fully_durable(CrashRules(ignore={ordinal})) for ordinal in range(3)] == [False, False, False]
    assert fully_durable(CrashRules(ignore={3}))

    def directory(ordinal: int, operation: Operation) -> bool:
        return operation.path == "/d"

    assert in_any_order(trees(workload(), CrashRules(ignore=directory))) == in_any_order(
        trees(workload(), CrashRules(ignore={2}))
    )


def test_every_prefix_is_asked_and_no_state_comes_twice() -> None:
    fs = workload()
    explorer = CrashExplorer(fs)
    found = [(prefix, state.tree()) for prefix, state in explorer.all()]
    assert in_any_order([tree for _, tree in found]) == in_any_order(
        [dict(tree) for tree in {tuple(tree.items()) for _, tree in found}]
    )
    assert found[0] == (0, {"/": b""})
    assert found[-1] == (6, {"/d/a": b"abc"})
    assert explorer.counts.prefixes == len(fs.log) + 1 == 8
    assert explorer.counts.states == len(found) < explorer.counts.candidates
    assert str(explorer.counts).startswith(f"{len(found)} distinct of {explorer.counts.candidates} crash states")
    with pytest.raises(ValueError, match="not between"):
        next(explorer.after(3))


def test_a_state_is_a_file_system_of_its_own() -> None:
    fs = workload()
    states = [state for _, state in CrashExplorer(fs).all()]
    before = [state.tree() for state in states]
    for state in states:
        write(state, "/new", b"n", fsync=True)
        assert [operation.verb for operation in state.log] == ["create", "write", "fsync"]
    assert [state.tree() for state in states] == [
        {path: data for path, data in sorted({**tree, "/new": b"n"}.items()) if path != "/"} for tree in before
    ]
    assert fs.tree() == {"/d/a": b"abc"}
    assert in_any_order(trees(states[-1])) == in_any_order([{"/d/a": b"abc"}, {"/d/a": b"abc", "/new": b"n"}])


def test_above_the_cap_subsets_are_sampled_the_same_each_time() -> None:
    fs = SimFs()
    for number in range(20):
        fs.mkdir(f"/{number}")
    rules = CrashRules(exhaustive=8, samples=100)
    runs = []
    for _ in range(2):
        explorer = CrashExplorer(fs, rules)
        runs.append([state.tree() for state in explorer.after(20)])
        assert explorer.counts.sampled == 1
        assert 61 <= explorer.counts.states <= 100
    assert runs[0] == runs[1]
    everything = {f"/{number}/": b"" for number in range(20)}
    assert everything in runs[0]
    assert {"/": b""} in runs[0]
    for name in everything:
        assert {name: b""} in runs[0]
        assert {other: b"" for other in everything if other != name} in runs[0]


def test_operations_put_together_happen_all_or_none() -> None:
    fs = SimFs()
    for number in range(20):
        fs.mkdir(f"/{number}")
    explorer = CrashExplorer(fs, CrashRules(together=lambda operation: "all"))
    assert sorted(len(state.tree()) for state in explorer.after(20)) == [1, 20]
    assert explorer.counts.sampled == 0


def test_many_torn_files_are_combined_up_to_the_cap() -> None:
    fs = SimFs()
    for number in range(4):
        write(fs, f"/{number}", b"abcd", fsync=False)
    fsync_directory(fs, "/")
    explorer = CrashExplorer(fs, CrashRules(combinations=10))
    found = [state.tree() for state in explorer.after(len(fs.log))]
    assert explorer.counts.combined == 1
    assert fs.tree() in found
    for number in range(4):
        assert {**fs.tree(), f"/{number}": b"a"} in found


def test_a_test_may_say_itself_how_bytes_are_torn() -> None:
    fs = SimFs()
    write(fs, "/a", b"abcd", fsync=False)
    fsync_directory(fs, "/")
    rules = CrashRules(tear=lambda path, durable, current: [current, path.encode(), durable])
    assert trees(fs, rules) == [{"/a": b"abcd"}, {"/a": b"/a"}, {"/a": b""}]
