"""Creation has one winner, and the winner knows it, whatever becomes of requests and answers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckstore.backend.s3 import S3Backend, open_url
from ckstore.errors import BackendError, CkstoreWarning, InvalidInputError
from tests.s3.conftest import Url
from tests.services.proxy import Answer, Effect, Fault, Forward, Proxy, Request, after, answer, drop, lose
from tests.services.servers import BUCKET, S3Server

NAME = "snapshots/fffffffffffffffe-0123456789abcdef"


def test_one_of_eight_racers_wins(url: Url) -> None:
    """Each with a client of its own, as processes have."""
    racers = [open_url(url()) for _ in range(8)]
    barrier = threading.Barrier(8)

    def race(number: int, name: str) -> bool:
        barrier.wait()
        return racers[number].put_if_absent(name, str(number).encode())

    with ThreadPoolExecutor(8) as threads:
        for round_ in range(5):
            name = f"things/{round_}"
            won = list(threads.map(lambda number, name=name: race(number, name), range(8)))
            assert won.count(True) == 1
            assert racers[0].get(name, limit=9) == str(won.index(True)).encode()
    for racer in racers:
        racer.close()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "effect",
    [lose, after(answer(503, "SlowDown")), after(answer(500, "InternalError")), after(answer(409, "OperationAborted"))],
    ids=["lost", "503", "500", "409"],
)
def test_a_success_whose_answer_was_lost_is_a_success(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, effect: Effect, times: int
) -> None:
    proxy.spoil(Fault("create", 1, effect, times))
    assert spoiled.put_if_absent(NAME, b"mine") is True
    proxy.assert_fired()
    assert backend.get(NAME, limit=9) == b"mine"
    assert spoiled.put_if_absent(NAME, b"other") is False


@pytest.mark.parametrize(
    "effect",
    [drop, answer(503, "SlowDown", {"Retry-After": "1"}), answer(429, "TooManyRequests"),
     answer(409, "ConditionalRequestConflict"), answer(500)],
    ids=["dropped", "503", "429", "409", "500"],
)  # fmt: skip
def test_a_request_that_never_arrived_is_made_again(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy, effect: Effect
) -> None:
    proxy.spoil(Fault("create", 1, effect, 2))
    assert spoiled.put_if_absent(NAME, b"mine") is True
    proxy.assert_fired()
    assert backend.get(NAME, limit=9) == b"mine"


def test_somebody_else_was_faster_while_the_request_was_lost(
    spoiled: S3Backend, backend: S3Backend, proxy: Proxy
) -> None:
    def overtaken(request: Request, forward: Forward) -> Answer | None:
        assert backend.put_if_absent(NAME, b"theirs") is True
        return None

    proxy.spoil(Fault("create", 1, overtaken))
    assert spoiled.put_if_absent(NAME, b"mine") is False
    proxy.assert_fired()
    assert backend.get(NAME, limit=9) == b"theirs"


def test_the_last_answer_is_lost_too_and_the_object_tells(url: Url, proxy: Proxy, backend: S3Backend) -> None:
    """Every answer to a PUT is lost until patience ends; a HEAD still gets through."""
    spoiled = open_url(url(proxy.endpoint, retry="1"))
    proxy.spoil(Fault("create", 1, lose, 10**6))
    assert spoiled.put_if_absent(NAME, b"mine") is True
    proxy.assert_fired()
    assert backend.get(NAME, limit=9) == b"mine"
    spoiled.close()


def test_what_cannot_be_found_out_is_an_error(url: Url, proxy: Proxy, backend: S3Backend) -> None:
    spoiled = open_url(url(proxy.endpoint, retry="1"))
    proxy.spoil(Fault("create", 1, lose), Fault("*", 2, drop, 10**6))
    with pytest.raises(BackendError, match=r"create .*did not answer") as caught:
        spoiled.put_if_absent(NAME, b"mine")
    assert caught.value.retryable
    proxy.assert_fired()
    assert backend.put_if_absent(NAME, b"other") is False  # it had landed
    spoiled.close()


def test_what_landed_and_is_gone_is_an_error_not_a_guess(spoiled: S3Backend, backend: S3Backend, proxy: Proxy) -> None:
    def gone(request: Request, forward: Forward) -> Answer | None:
        found = forward(request)
        assert found.status == 412
        assert backend.delete(NAME) is True
        return found

    proxy.spoil(Fault("create", 1, lose), Fault("create", 2, gone))
    with pytest.raises(BackendError, match="whose it was is unknown"):
        spoiled.put_if_absent(NAME, b"mine")
    proxy.assert_fired()


@pytest.mark.parametrize("server", ["ceph"], indirect=True)
def test_a_put_that_was_sent_before_a_pause_and_lands_after_it(url: Url, backend: S3Backend, server: S3Server) -> None:
    """The server stands still, the request times out, the server goes on: who asked finds that it was served."""
    impatient = open_url(url(timeout="1", retry="60"))
    impatient.put("things/warm", b"")
    with ThreadPoolExecutor(1) as threads:
        with server.paused():
            future = threads.submit(impatient.put_if_absent, NAME, b"mine")
            with pytest.raises(TimeoutError):
                future.result(timeout=2.5)
        assert future.result() is True
    assert backend.get(NAME, limit=9) == b"mine"
    impatient.close()


def blind(request: Request, forward: Forward) -> Answer | None:
    """A server that knows no conditions: the object is written, whatever stands there."""
    found = forward(request)
    ok = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n'
    return Answer(ok, b"") if found.status == 412 else found


def test_the_probe_finds_one_winner(backend: S3Backend, server: S3Server) -> None:
    backend.probe()
    left = server.client().list_objects_v2(Bucket=BUCKET, Prefix=backend.place.root)
    assert left["KeyCount"] == 0


@pytest.mark.parametrize(
    ("effect", "winners"),
    [(blind, 8), (answer(501, "NotImplemented"), 0)],
    ids=["ignored", "not implemented"],
)
def test_a_server_without_conditional_puts_is_no_place_for_a_store(
    url: Url, proxy: Proxy, effect: Effect, winners: int
) -> None:
    proxy.spoil(Fault("create", 1, effect, 10**6))
    with pytest.raises(InvalidInputError, match=f"{winners} of 8 were told .*If-None-Match.*single_writer=true"):
        open_url(url(proxy.endpoint)).probe()
    proxy.assert_fired()


def test_with_one_declared_writer_it_is_a_place_all_the_same(url: Url, proxy: Proxy) -> None:
    proxy.spoil(Fault("create", 1, answer(501, "NotImplemented"), 10**6))
    backend = open_url(url(proxy.endpoint, single_writer="true"))
    assert not backend.capabilities.put_if_absent
    assert backend.capabilities.single_writer
    backend.probe()
    assert backend.put_if_absent(NAME, b"first") is True
    assert backend.put_if_absent(NAME, b"second") is False
    assert backend.get(NAME, limit=9) == b"first"
    assert all(verb != "create" for verb, _ in proxy.requests)


@pytest.fixture
def versioned(server: S3Server) -> str:
    """A bucket that keeps old versions."""
    client = server.client()
    client.create_bucket(Bucket="tests-versioned")
    client.put_bucket_versioning(Bucket="tests-versioned", VersioningConfiguration={"Status": "Enabled"})
    return "tests-versioned"


@pytest.mark.parametrize("server", ["moto"], indirect=True)
def test_a_bucket_with_versions_is_warned_of(versioned: str, url: Url) -> None:
    with pytest.warns(CkstoreWarning, match="keeps old versions: .* lifecycle rule"):
        open_url(url(bucket=versioned)).probe()


@pytest.mark.parametrize("server", ["ceph"], indirect=True)
def test_a_server_that_forgets_conditions_where_it_keeps_versions(versioned: str, url: Url) -> None:
    """As this one does: every writer is told that the object is its own."""
    with pytest.raises(InvalidInputError, match="8 of 8 were told"):
        open_url(url(bucket=versioned)).probe()
