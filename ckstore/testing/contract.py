"""What every backend must do, as tests: subclass `BackendContract` and give it a `backend` fixture."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from ckstore import aligned, layout
from ckstore.backend.base import Backend, foreign, get_parts, probe
from ckstore.errors import BackendError, CorruptionError, FormatError, InvalidInputError, NotFoundError

LIMIT = 1 << 20
BAD_NAMES = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.b",
    "a b",
    "a\nb",
    "ä",
    "a\\b",
]
SAVE = "fffffffffffffffe-0123456789abcdef"

T = TypeVar("T")


class BackendContract:
    """Each test gets a new, empty backend.

    One that is declared to have a single writer (`Capabilities.single_writer`) passes as well: its creations exclude
    each other among the threads that share the object.
    """

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        raise NotImplementedError("a subclass gives the backend to test")

    # one object

    def test_what_was_put_is_read(self, backend: Backend) -> None:
        backend.put("things/a", b"hello")
        assert backend.get("things/a", limit=5) == b"hello"
        assert backend.stat("things/a") == 5
        assert backend.list("things/") == ["things/a"]

    @pytest.mark.parametrize("durable", [True, False])
    def test_put_replaces(self, backend: Backend, durable: bool) -> None:
        backend.put("things/a", b"a long first value")
        backend.put("things/a", b"second", durable=durable)
        assert backend.get("things/a", limit=LIMIT) == b"second"
        assert backend.list("things/") == ["things/a"]

    def test_visible_without_durable(self, backend: Backend) -> None:
        backend.put("things/a", b"seen", durable=False)
        assert backend.get("things/a", limit=LIMIT) == b"seen"

    def test_an_empty_object_is_an_object(self, backend: Backend) -> None:
        backend.put("things/a", b"")
        assert backend.get("things/a", limit=0) == b""
        assert backend.stat("things/a") == 0
        backend.get_into("things/a", 0, memoryview(bytearray()))
        assert backend.list("things/") == ["things/a"]

    def test_an_object_without_a_prefix(self, backend: Backend) -> None:
        backend.put("config", b"c")
        assert backend.get("config", limit=1) == b"c"
        assert backend.delete("config") is True

    def test_what_is_absent_is_not_found(self, backend: Backend) -> None:
        backend.put("things/deep/a", b"x")
        for name in ("nothing", "things", "things/b", "things/deep", "things/deep/a/below"):
            for read in _reads(backend, name):
                with pytest.raises(NotFoundError, match=name):
                    read()
            assert backend.delete(name) is False
        assert backend.get("things/deep/a", limit=1) == b"x"

    def test_deleted_is_gone_and_may_come_again(self, backend: Backend) -> None:
        backend.put("things/deep/a", b"1")
        backend.put("things/deep/b", b"2")
        assert backend.delete("things/deep/a") is True
        assert backend.delete("things/deep/a") is False
        assert backend.list("things/") == ["things/deep/b"]
        assert backend.delete("things/deep/b") is True
        assert backend.list("things/") == []
        assert backend.put_if_absent("things/deep/a", b"3") is True
        assert backend.get("things/deep/a", limit=1) == b"3"

    @pytest.mark.parametrize("name", [*BAD_NAMES, "tmp/a", "x/" * 6 + "y", "x" * 201])
    def test_bad_names_are_refused_by_every_verb(self, backend: Backend, name: str) -> None:
        writes: list[Callable[[], object]] = [
            lambda: backend.put(name, b""),
            lambda: backend.put_if_absent(name, b""),
            lambda: backend.put_stream(name, 0),
            lambda: backend.delete(name),
        ]
        for call in [*writes, *_reads(backend, name)]:
            with pytest.raises(FormatError):
                call()

    # create if absent

    def test_the_first_creation_wins(self, backend: Backend) -> None:
        assert backend.put_if_absent("things/a", b"first") is True
        assert backend.put_if_absent("things/a", b"second") is False
        assert backend.put_if_absent("things/a", b"first") is False
        assert backend.get("things/a", limit=LIMIT) == b"first"

    def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        for round_ in range(5):
            answers = _at_once(8, lambda i, r=round_: backend.put_if_absent(f"things/{r}", f"{i}".encode()))  # type: ignore[misc]
            assert sorted(answers) == [False] * 7 + [True]
            assert backend.get(f"things/{round_}", limit=9) == str(answers.index(True)).encode()

    # streams

    def test_a_stream_appears_when_committed(self, backend: Backend) -> None:
        stream = backend.put_stream("things/a", 6)
        stream.append(b"abc")
        assert backend.list("things/") == []
        stream.append(memoryview(b"de"))
        stream.append(bytearray(b"f"))
        stream.commit()
        assert backend.get("things/a", limit=6) == b"abcdef"

    @pytest.mark.parametrize("size_hint", [0, 1, 3 << 20])
    @pytest.mark.parametrize("size", [0, 5, (1 << 20) + 1])
    def test_the_size_hint_is_a_hint(self, backend: Backend, size_hint: int, size: int) -> None:
        content = random.Random(size).randbytes(size)
        stream = backend.put_stream("things/a", size_hint)
        for start in range(0, size, 300_000):
            stream.append(memoryview(content)[start : start + 300_000])
        stream.commit()
        assert backend.stat("things/a") == size
        assert backend.get("things/a", limit=size) == content

    @pytest.mark.parametrize("size_hint", [0, 3 << 20])
    @pytest.mark.parametrize("tail", [0, 1, 4095])
    def test_aligned_memory_and_other_memory_in_one_stream(self, backend: Backend, size_hint: int, tail: int) -> None:
        """Which a backend may write in different ways: what comes out is what went in, to the byte."""
        lots = random.Random(tail)
        memory = aligned.take(1 << 20)
        memory[: 1 << 20] = lots.randbytes(1 << 20)
        first, uneven, shifted = memory[: 1 << 16], memory[4096 : (1 << 19) + tail], memory[1 : 1 << 15]
        pieces: list[bytes | memoryview] = [first, uneven, first, shifted, b"end"]
        stream = backend.put_stream("things/a", size_hint)
        for piece in pieces:
            stream.append(piece)
        stream.commit()
        content = b"".join(pieces)
        assert backend.stat("things/a") == len(content)
        assert backend.get("things/a", limit=len(content)) == content

    def test_aligned_memory_may_be_used_again_at_once(self, backend: Backend) -> None:
        memory = aligned.take(1 << 16)[: 1 << 16]
        stream = backend.put_stream("things/a", 3 << 16)
        for value in (b"a", b"b", b"c"):
            memory[:] = value * (1 << 16)
            stream.append(memory)
        memory[:] = bytes(1 << 16)
        stream.commit()
        content = backend.get("things/a", limit=3 << 16)
        assert content == b"a" * (1 << 16) + b"b" * (1 << 16) + b"c" * (1 << 16)

    def test_an_aborted_stream_leaves_nothing(self, backend: Backend) -> None:
        backend.put("things/a", b"old")
        stream = backend.put_stream("things/a", 3)
        stream.append(b"new")
        stream.abort()
        stream.abort()
        assert backend.get("things/a", limit=3) == b"old"

    def test_an_ended_stream_takes_no_more(self, backend: Backend) -> None:
        for end in ("commit", "abort"):
            stream = backend.put_stream("things/a", 3)
            getattr(stream, end)()
            for call in (stream.commit, lambda s=stream: s.append(b"x")):
                with pytest.raises(InvalidInputError):
                    call()
        assert backend.get("things/a", limit=0) == b""

    def test_no_buffer_is_kept(self, backend: Backend) -> None:
        piece = bytearray(b"before")
        stream = backend.put_stream("things/a", 6)
        stream.append(piece)
        piece[:] = b"after!"
        stream.commit()
        assert backend.get("things/a", limit=6) == b"before"

    def test_memory_with_gaps_is_refused_and_the_stream_lives(self, backend: Backend) -> None:
        stream = backend.put_stream("things/a", 6)
        with pytest.raises(InvalidInputError):
            stream.append(memoryview(b"abcdef")[::2])
        stream.append(b"whole")
        stream.commit()
        assert backend.get("things/a", limit=5) == b"whole"

    # reading

    def test_more_than_the_limit_is_not_read(self, backend: Backend) -> None:
        backend.put("things/a", b"12345")
        with pytest.raises(CorruptionError, match=r"things/a.*5 bytes.*at most 4"):
            backend.get("things/a", limit=4)

    def test_a_range_is_read_into_memory(self, backend: Backend) -> None:
        backend.put("things/a", bytes(range(100)))
        out = bytearray(b"\xff" * 12)
        backend.get_into("things/a", 40, memoryview(out)[1:11])
        assert out == b"\xff" + bytes(range(40, 50)) + b"\xff"
        words = memoryview(bytearray(8)).cast("I")
        backend.get_into("things/a", 92, words)
        assert words.tobytes() == bytes(range(92, 100))

    @pytest.mark.parametrize(("start", "size"), [(0, 6), (3, 3), (5, 1), (6, 0), (2**62, 1)])
    def test_a_short_object_is_corruption(self, backend: Backend, start: int, size: int) -> None:
        backend.put("things/a", b"12345")
        with pytest.raises(CorruptionError, match="things/a"):
            backend.get_into("things/a", start, memoryview(bytearray(size)))

    def test_unusable_memory_is_refused(self, backend: Backend) -> None:
        backend.put("things/a", b"12345")
        for start, view in [(-1, memoryview(bytearray(1))), (0, memoryview(b"x")), (0, memoryview(bytearray(4))[::2])]:
            with pytest.raises(InvalidInputError):
                backend.get_into("things/a", start, view)

    @pytest.mark.parametrize("sizes", [[], [0], [1], [7, 0, 90], [1 << 16, 1, 4095], [30] * 50])
    def test_parts_are_what_stands_there(self, backend: Backend, sizes: list[int]) -> None:
        """Whether or not the backend reads them with one request."""
        content = random.Random(len(sizes)).randbytes(5 + sum(sizes))
        backend.put("things/a", content)
        parts = [memoryview(bytearray(size)) for size in sizes]
        get_parts(backend, "things/a", 5, parts)
        assert b"".join(parts) == content[5:]

    def test_parts_of_a_short_or_absent_object_are_an_error(self, backend: Backend) -> None:
        backend.put("things/a", b"12345")
        parts = [memoryview(bytearray(2)) for _ in range(2)]
        with pytest.raises(CorruptionError, match="things/a"):
            get_parts(backend, "things/a", 2, parts)
        with pytest.raises(NotFoundError, match="things/b"):
            get_parts(backend, "things/b", 2, parts)

    # listing

    def test_a_listing_is_sorted_deep_and_exact(self, backend: Backend) -> None:
        names = ["a/b", "a/b-c", "ab/x", "a/c/d/e", "a/B", "a/10", "a/9"]
        for name in names:
            backend.put(name, b"")
        assert backend.list("a/") == sorted(name for name in names if name.startswith("a/"))
        assert backend.list("a/c/") == ["a/c/d/e"]
        assert backend.list("a/b/") == []
        assert backend.list("b/") == []

    @pytest.mark.parametrize("prefix", ["", "a", "/", "../", "a//", ".a/"])
    def test_a_prefix_is_whole_components(self, backend: Backend, prefix: str) -> None:
        for call in (backend.list, backend.sync):
            with pytest.raises(FormatError):
                call(prefix)

    def test_temporaries_are_not_listed(self, backend: Backend) -> None:
        stream = backend.put_stream(f"packs/{SAVE}/0-0", 3)
        stream.append(b"abc")
        assert backend.list("tmp/") == []
        assert backend.list("packs/") == []
        stream.commit()
        assert backend.list("packs/") == [f"packs/{SAVE}/0-0"]

    def test_sync_takes_any_prefix(self, backend: Backend) -> None:
        backend.put("a/b/c", b"", durable=False)
        for prefix in ("a/", "a/b/", "a/b/c/", "absent/", "absent/deeper/"):
            backend.sync(prefix)
        assert backend.list("a/") == ["a/b/c"]

    def test_a_sweep_spares_objects_and_living_writers(self, backend: Backend) -> None:
        backend.put("things/a", b"x")
        ours = backend.put_stream("things/b", 1)
        undecided = backend.put_stream(f"packs/{SAVE}/0-0", 1)
        backend.sweep_temporaries({"fffffffffffffffd-0123456789abcdef"})
        for stream in (ours, undecided):
            stream.append(b"y")
            stream.commit()
        assert backend.list("things/") == ["things/a", "things/b"]
        assert backend.get(f"packs/{SAVE}/0-0", limit=1) == b"y"

    def test_a_sweep_of_a_decided_save_never_leaves_half_an_object(self, backend: Backend) -> None:
        name = f"packs/{SAVE}/0-0"
        stream = backend.put_stream(name, 3)
        stream.append(b"abc")
        backend.sweep_temporaries({SAVE})
        try:
            stream.commit()
        except BackendError:
            assert backend.list("packs/") == []
        else:
            assert backend.get(name, limit=3) == b"abc"

    # many threads

    def test_readers_see_whole_objects_while_they_are_replaced(self, backend: Backend) -> None:
        values = [bytes([i]) * (1000 + i) for i in range(4)]
        backend.put("things/a", values[0])

        def work(i: int) -> set[bytes]:
            if i < 2:
                for value in values * 5:
                    backend.put("things/a", value, durable=False)
                return set()
            return {backend.get("things/a", limit=LIMIT) for _ in range(60)}

        assert set().union(*_at_once(4, work)) <= set(values)

    def test_threads_come_and_go_in_one_directory(self, backend: Backend) -> None:
        """Its directory, where a backend has such things, is dropped and made again all the time."""

        def work(i: int) -> list[str]:
            for n in range(25):
                name = f"things/shared/{i}-{n}"
                backend.put(name, b"x", durable=n % 5 == 0)
                assert name in backend.list("things/")
                assert backend.delete(name) is True
            return backend.list("things/")

        _at_once(4, work)
        assert backend.list("things/") == []

    def test_random_calls_agree_with_a_dictionary(self, backend: Backend) -> None:
        lots = random.Random(7)
        names = [f"{a}/{b}" for a in ("p", "q", "p/r") for b in ("1", "2", "3")]
        model: dict[str, bytes] = {}
        for number in range(200):
            name, value = lots.choice(names), str(number).encode() * lots.randrange(4)
            match lots.randrange(6):
                case 0:
                    backend.put(name, value, durable=False)
                    model[name] = value
                case 1:
                    assert backend.put_if_absent(name, value) is (name not in model)
                    model.setdefault(name, value)
                case 2:
                    stream = backend.put_stream(name, len(value))
                    stream.append(value)
                    stream.commit()
                    model[name] = value
                case 3:
                    assert backend.delete(name) is (model.pop(name, None) is not None)
                case 4:
                    prefix = lots.choice(["p/", "q/", "p/r/"])
                    assert backend.list(prefix) == sorted(known for known in model if known.startswith(prefix))
                case 5 if name in model:
                    assert backend.get(name, limit=LIMIT) == model[name]
        assert {name: backend.get(name, limit=LIMIT) for name in model} == model

    # a place for a store

    def test_what_a_store_puts_there_is_not_foreign(self, backend: Backend) -> None:
        assert foreign(backend) == []
        backend.put(layout.CONFIG, b"x")
        for house in layout.HOUSES:
            if house.endswith("/") and house not in (layout.TEMPORARIES, layout.ENCRYPTION):
                backend.put(f"{house}a", b"x")
        stream = backend.put_stream("packs/b", 1)
        assert foreign(backend) == []
        stream.abort()

    def test_trying_it_out_leaves_nothing(self, backend: Backend) -> None:
        probe(backend)
        assert foreign(backend) == []
        assert backend.put_if_absent("things/a", b"x") is True

    # the rest

    def test_closing_twice_is_closing_once(self, backend: Backend) -> None:
        backend.close()
        backend.close()

    def test_it_says_where_it_is(self, backend: Backend) -> None:
        assert "://" in backend.url
        assert backend.capabilities.put_if_absent or backend.capabilities.single_writer


def _reads(backend: Backend, name: str) -> list[Callable[[], object]]:
    return [
        lambda: backend.get(name, limit=LIMIT),
        lambda: backend.get_into(name, 0, memoryview(bytearray(1))),
        lambda: backend.stat(name),
    ]


def _at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """`work(i)` in `count` threads that start together; their answers, in order."""
    barrier = threading.Barrier(count)

    def run(i: int) -> T:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))
