"""Objects in parts, and ranges: what arrives is what was sent, and what is given up is cleared away."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckstore.backend.s3 import S3Backend, open_url, reading, stream
from ckstore.backend.s3.checksums import crc32_of
from ckstore.backend.s3.stream import Body, part_size
from ckstore.errors import BackendError, CorruptionError, NotFoundError
from ckstore.testing.contract import SAVE
from tests.s3.conftest import Url
from tests.services.proxy import Answer, Effect, Fault, Forward, Proxy, Request, answer, drop, flip, lose, truncate
from tests.services.servers import BUCKET, S3Server

CEPH = pytest.mark.parametrize("server", ["ceph"], indirect=True)
MOTO = pytest.mark.parametrize("server", ["moto"], indirect=True)

NAME = f"packs/{SAVE}/0-0"
PART = 5 << 20
"""The least that a part may have: here a stream's parts have it, too, and so have requests for ranges."""
LARGE = random.Random(5).randbytes(2 * PART + 12345)

Uploads = Callable[[], list[str]]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to send, in as many parts."""
    monkeypatch.setattr(stream, "PART", PART)
    monkeypatch.setattr(reading, "REQUEST", PART)


pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def uploads(server: S3Server, backend: S3Backend) -> Uploads:
    """Keys of what was begun in parts at the test's place and is neither complete nor aborted."""
    client = server.client()

    def found() -> list[str]:
        listed = client.list_multipart_uploads(Bucket=BUCKET, Prefix=backend.place.root).get("Uploads", [])
        return [upload["Key"] for upload in listed]

    return found


def write(backend: S3Backend, content: bytes, name: str = NAME, step: int = 3_000_000) -> None:
    writing = backend.put_stream(name, len(content))
    for start in range(0, len(content), step):
        writing.append(memoryview(content)[start : start + step])
    writing.commit()


def read(backend: S3Backend, size: int, start: int = 0) -> bytes:
    out = bytearray(size)
    backend.get_into(NAME, start, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize(
    ("size", "requests"),
    [
        (0, {"put": 1}),
        (1, {"put": 1}),
        (PART, {"put": 1}),
        (PART + 1, {"begin": 1, "part": 2, "complete": 1}),
        (2 * PART, {"begin": 1, "part": 2, "complete": 1}),
        (2 * PART + 12345, {"begin": 1, "part": 3, "complete": 1}),
    ],
)
def test_a_small_object_is_one_request_and_a_large_one_is_parts(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, size: int, requests: dict[str, int]
) -> None:
    write(spoiled, LARGE[:size])
    found = [verb for verb, _ in proxy.requests if verb != "head"]
    assert {verb: found.count(verb) for verb in found} == requests
    assert read(backend, size) == LARGE[:size]
    assert backend.stat(NAME) == size


def test_ten_thousand_parts_hold_the_largest_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert part_size(1) == part_size(1000) == stream.PART == 16 << 20
    assert all(8 << 20 <= part_size(number) <= 5 << 30 for number in range(1, 10_001))
    assert sum(part_size(number) for number in range(1, 10_001)) >= 5 << 40


def test_a_body_is_sent_again_from_the_start() -> None:
    body = Body(memoryview(LARGE)[:1000])
    assert len(body) == 1000
    assert bytes(body.read()) == LARGE[:1000]
    assert not body.read(5)
    assert body.seek(-1, 2) == body.tell() == 999
    assert body.seek(0) == 0
    assert bytes(body.read(5))[:5] == LARGE[:5]


@CEPH
@pytest.mark.parametrize("verb", ["begin", "part", "complete", "put"])
@pytest.mark.parametrize(
    "effect",
    [drop, lose, truncate, answer(503, "SlowDown"), answer(500, "InternalError")],
    ids=["dropped", "lost", "cut off", "503", "500"],
)
def test_a_failed_request_of_a_stream_is_made_again(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, verb: str, effect: Effect
) -> None:
    content = LARGE[: PART + 5] if verb != "put" else LARGE[:1000]
    proxy.spoil(Fault(verb, 1, effect))
    write(spoiled, content)
    proxy.assert_fired()
    assert read(backend, len(content)) == content


@CEPH
@pytest.mark.parametrize("verb", ["part", "put", "create"])
def test_bytes_that_change_on_the_way_are_found_by_the_server(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, verb: str
) -> None:
    proxy.spoil(Fault(verb, 1, flip))
    content = LARGE[: PART + 5] if verb == "part" else LARGE[:1000]
    if verb == "create":
        assert spoiled.put_if_absent(NAME, content) is True
    else:
        write(spoiled, content)
    proxy.assert_fired()
    assert read(backend, len(content)) == content


@pytest.mark.parametrize("verb", ["begin", "part", "complete", "put"])
def test_a_stream_that_cannot_be_written_leaves_nothing(
    url: Url, backend: S3Backend, proxy: Proxy, uploads: Uploads, verb: str
) -> None:
    spoiled = open_url(url(proxy.endpoint, retry="1"))
    proxy.spoil(Fault(verb, 1, answer(500, "InternalError"), 10**6))
    with pytest.raises(BackendError, match="InternalError") as caught:
        write(spoiled, LARGE if verb != "put" else b"small")
    assert caught.value.retryable
    proxy.assert_fired()
    assert uploads() == []
    assert backend.list("packs/") == []
    spoiled.close()


def test_an_aborted_stream_is_no_upload_any_more(backend: S3Backend, uploads: Uploads) -> None:
    writing = backend.put_stream(NAME, len(LARGE))
    writing.append(LARGE)
    assert len(uploads()) == 1
    writing.abort()
    assert uploads() == []


def test_only_uploads_of_decided_saves_below_the_prefix_are_swept(
    backend: S3Backend, server: S3Server, uploads: Uploads
) -> None:
    client, root = server.client(), backend.place.root
    undecided = "fffffffffffffffd-0123456789abcdef"
    theirs = [f"{root}packs/{undecided}/0-0", f"{root}things/a", f"{root}odd//name"]
    elsewhere = f"{backend.place.prefix}-other/packs/{SAVE}/0-0"
    for key in (f"{root}{NAME}", *theirs, elsewhere):
        begun = client.create_multipart_upload(Bucket=BUCKET, Key=key)
        client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 1000)
    assert backend.sweep_temporaries({SAVE}) == 1000
    assert sorted(uploads()) == sorted(theirs)
    everything = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert elsewhere in [upload["Key"] for upload in everything]
    assert backend.sweep_temporaries({SAVE}) == 0


def paged(backend: S3Backend, verb: str, most: str) -> None:
    """The server gives pages of three to `backend`."""

    def limited(params: dict[str, object], **_: object) -> None:
        params[most] = 3

    client: Any = backend._calls.connections.get().client
    client.meta.events.register(f"before-parameter-build.s3.{verb}", limited)


def test_more_uploads_than_a_page_holds_are_swept(backend: S3Backend, server: S3Server, uploads: Uploads) -> None:
    client = server.client()
    for number in range(8):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{backend.place.root}packs/{SAVE}/0-{number}")
    paged(backend, "ListMultipartUploads", "MaxUploads")
    assert backend.sweep_temporaries({SAVE}) == 0
    assert uploads() == []


@CEPH
def test_a_stream_whose_parts_were_swept_says_so(backend: S3Backend) -> None:
    writing = backend.put_stream(NAME, len(LARGE))
    writing.append(LARGE)
    other = S3Backend(backend.place)
    other.sweep_temporaries({SAVE})
    with pytest.raises(BackendError, match="removed while it was written") as caught:
        writing.commit()
    assert caught.value.retryable
    assert backend.list("packs/") == []
    other.close()


@pytest.mark.parametrize("count", [2, 3, 4, 10])
def test_names_of_more_than_a_page_are_listed(backend: S3Backend, server: S3Server, count: int) -> None:
    client = server.client()
    names = [f"things/{number:04}" for number in range(count)]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=backend.place.key(name), Body=b"")
    for foreign in ("things/", "things/a b", "things/.hidden", "things/x//y"):
        client.put_object(Bucket=BUCKET, Key=backend.place.key(foreign), Body=b"")
    paged(backend, "ListObjectsV2", "MaxKeys")
    assert backend.list("things/") == names


def test_a_large_range_is_read_in_parts_and_only_what_was_asked_for(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy
) -> None:
    write(backend, LARGE)
    out = bytearray(len(LARGE) + 2)
    spoiled.get_into(NAME, 0, memoryview(out)[1:-1])
    assert bytes(out) == b"\0" + LARGE + b"\0"
    assert [verb for verb, _ in proxy.requests] == ["get"] * -(-len(LARGE) // PART)


def test_many_pieces_are_one_request(spoiled: S3Backend, backend: S3Backend, proxy: Proxy) -> None:
    write(backend, LARGE[:100_000])
    pieces = [bytearray(size) for size in (1, 0, 40_000, 7, 50_000)]
    spoiled.get_parts(NAME, 3, [memoryview(piece) for piece in pieces])
    assert b"".join(pieces) == LARGE[3 : 3 + 90_008]
    assert [verb for verb, _ in proxy.requests] == ["get"]


@CEPH
@pytest.mark.parametrize(
    "effect",
    [drop, truncate, answer(503, "SlowDown"), answer(500, "InternalError")],
    ids=["dropped", "cut off", "503", "500"],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failed_read_is_made_again(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, effect: Effect, number: int
) -> None:
    write(backend, LARGE)
    proxy.spoil(Fault("get", number, effect))
    assert read(spoiled, len(LARGE)) == LARGE
    proxy.assert_fired()


def test_a_body_that_is_cut_off_again_and_again_is_an_error(url: Url, backend: S3Backend, proxy: Proxy) -> None:
    spoiled = open_url(url(proxy.endpoint, retry="1"))
    write(backend, LARGE[:1000])
    proxy.spoil(Fault("get", 1, truncate, 10**6))
    acts: list[Callable[[], object]] = [lambda: read(spoiled, 1000), lambda: spoiled.get(NAME, limit=1000)]
    for act in acts:
        with pytest.raises(BackendError, match="broke off") as caught:
            act()
        assert caught.value.retryable
    proxy.assert_fired()
    spoiled.close()


def test_ranges_that_end_early_in_every_part(backend: S3Backend) -> None:
    write(backend, LARGE)
    with pytest.raises(CorruptionError, match=f"ends at {len(LARGE)}"):
        read(backend, len(LARGE) + 1)
    with pytest.raises(CorruptionError, match=f"ends at {len(LARGE)}"):
        read(backend, 3 * PART, start=len(LARGE) - 5)
    with pytest.raises(NotFoundError, match="no object"):
        backend.get_into(f"packs/{SAVE}/0-1", 0, memoryview(bytearray(3 * PART)))


@pytest.mark.parametrize("checksum", ["auto", "crc32", "md5", "none"])
def test_every_kind_of_checksum_is_taken(url: Url, server: S3Server, checksum: str) -> None:
    backend = open_url(url(checksum=checksum))
    for _ in range(2):  # what the first answer taught holds for the second
        backend.put("things/a", b"small")
        write(backend, LARGE)
    assert backend.get("things/a", limit=5) == b"small"
    assert read(backend, len(LARGE)) == LARGE
    backend.close()


@MOTO
def test_a_server_that_knows_checksums_keeps_them(backend: S3Backend, server: S3Server) -> None:
    write(backend, LARGE, "things/large")
    backend.put("things/a", b"small")
    assert backend.put_if_absent("things/b", b"small") is True
    kept = {}
    for name in ("things/large", "things/a", "things/b"):
        found = server.client().head_object(Bucket=BUCKET, Key=backend.place.key(name), ChecksumMode="ENABLED")
        kept[name] = found["ChecksumCRC32"]  # of what has parts it is one of theirs
    assert kept.pop("things/large")
    assert kept == {"things/a": crc32_of(b"small"), "things/b": crc32_of(b"small")}


@MOTO
def test_objects_are_encrypted_by_the_server_as_the_url_says(url: Url, server: S3Server) -> None:
    backend = open_url(url(sse="aws:kms", sse_key="the-key"))
    backend.put("things/a", b"a")
    assert backend.put_if_absent("things/b", b"b") is True
    write(backend, LARGE, "things/c")
    for name in ("things/a", "things/b", "things/c"):
        found = server.client().head_object(Bucket=BUCKET, Key=backend.place.key(name))
        assert found["ServerSideEncryption"] == "aws:kms"
        assert found["SSEKMSKeyId"] == "the-key"
    backend.close()


def test_a_fork_makes_a_connection_of_its_own(backend: S3Backend) -> None:
    """While other threads of the parent use theirs."""
    backend.put("things/a", b"parent")
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            backend.get("things/a", limit=9)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        child = os.fork()
        if child == 0:
            try:
                assert backend.get("things/a", limit=9) == b"parent"
                backend.put("things/b", b"child")
                write(backend, LARGE)
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert backend.get("things/b", limit=9) == b"child"
    assert read(backend, len(LARGE)) == LARGE


@CEPH
def test_two_parts_of_a_stream_are_under_way_and_no_more(spoiled: S3Backend, backend: S3Backend, proxy: Proxy) -> None:
    """So a stream holds the memory of three parts, however large it is."""
    both, lock = threading.Barrier(stream.UNDER_WAY, timeout=60), threading.Lock()
    under_way: list[int] = [0]

    def counted(request: Request, forward: Forward) -> Answer | None:
        with lock:
            under_way.append(under_way[-1] + 1)
        if "partNumber=1&" in request.target + "&" or "partNumber=2&" in request.target + "&":
            both.wait()
        found = forward(request)
        with lock:
            under_way.append(under_way[-1] - 1)
        return found

    proxy.spoil(Fault("part", 1, counted, 10**6))
    content = LARGE + LARGE
    write(spoiled, content)
    assert max(under_way) == stream.UNDER_WAY
    assert read(backend, len(content)) == content


def test_threads_of_one_backend_share_its_memory_and_its_requests(backend: S3Backend) -> None:
    contents = [random.Random(number).randbytes(PART + number) for number in range(4)]
    threads = [
        threading.Thread(target=write, args=(backend, content, f"packs/{SAVE}/0-{number}"))
        for number, content in enumerate(contents)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, content in enumerate(contents):
        out = bytearray(len(content))
        backend.get_into(f"packs/{SAVE}/0-{number}", 0, memoryview(out))
        assert bytes(out) == content
