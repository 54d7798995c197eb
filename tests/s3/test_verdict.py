"""What failures mean, and how long they are put up with: without any server, and without waiting."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
from botocore import exceptions as boto

from ckstore.backend.s3.calls import Clock, Patience
from ckstore.backend.s3.place import Place
from ckstore.backend.s3.verdict import Failure, judge
from ckstore.errors import BackendError, InvalidInputError, NoSpaceError

PLACE = Place("bucket", "x", endpoint="https://s3.example.org", profile="mine")


def refused(code: str, status: int, message: str = "", **headers: str) -> boto.ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused("NoSuchBucket", 404), "there is no bucket bucket at https://s3.example.org: make it"),
        (refused("InvalidAccessKeyId", 403), "does not know the access key.*profile mine"),
        (refused("SignatureDoesNotMatch", 403), "the secret key is wrong"),
        (refused("ExpiredToken", 400), "have expired: log in again"),
        (refused("InvalidToken", 400), "does not take the session token"),
        (refused("AccessDenied", 403), "a store needs s3:GetObject"),
        (refused("403", 403), "a store needs s3:GetObject"),
        (refused("AccessDenied", 403, "object protected by object lock"), "locked against deletion"),
        (refused("RequestTimeTooSkewed", 403, date="Tue, 01 Dec 2026"), "clock .* where it is Tue, 01 Dec"),
        (refused("PermanentRedirect", 301, **{"x-amz-bucket-region": "eu-west-1"}), "region=eu-west-1"),
        (refused("AuthorizationHeaderMalformed", 400), "in another region"),
        (refused("InvalidObjectState", 403), "archived"),
        (refused("KMS.DisabledException", 400, "key is disabled"), "KMS.DisabledException key is disabled"),
        (refused("Odd", 400, "one\x1b[31mtwo\nthree" + "x" * 9999), r"refuses: Odd one \[31mtwo threexx+$"),
        (boto.NoCredentialsError(), "no credentials were found"),
        (boto.SSLError(endpoint_url="https://x", error="bad certificate"), "certificate is not trusted"),
        (OSError("Could not find a suitable TLS CA certificate bundle"), "CA certificate bundle"),
        (
            boto.EndpointConnectionError(endpoint_url="x", error=socket.gaierror(socket.EAI_NONAME, "not known")),
            "cannot be looked up .not known.: is https://s3.example.org right",
        ),
    ],
)  # fmt: skip
def test_what_retrying_cannot_change(error: Exception, message: str) -> None:
    failure = judge(error, "put a", PLACE)
    assert not failure.again
    assert isinstance(failure.error, BackendError)
    assert not failure.error.retryable
    assert len(str(failure.error)) < 500
    with pytest.raises(BackendError, match=message):
        raise failure.error


@pytest.mark.parametrize(
    ("error", "message", "unsure", "throttled"),
    [
        (refused("SlowDown", 503), "asks for fewer requests", True, True),
        (refused("TooManyRequests", 429), "asks for fewer requests", False, True),
        (refused("503", 503), "asks for fewer requests", True, True),
        (refused("InternalError", 500, "oops"), "failed: InternalError oops", True, False),
        (refused("RequestTimeout", 400), "failed: RequestTimeout", True, False),
        (refused("ConditionalRequestConflict", 409), "others write the same object", False, False),
        (refused("BadDigest", 400), "other bytes arrived", False, False),
        (boto.ReadTimeoutError(endpoint_url="x", error="x"), "did not answer", True, False),
        (boto.ConnectionClosedError(endpoint_url="x", error="x"), "did not answer, or broke off", True, False),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "broke off", True, False),
        (boto.EndpointConnectionError(endpoint_url="x", error="x"), "cannot be reached", False, False),
        (
            boto.EndpointConnectionError(endpoint_url="x", error=socket.gaierror(socket.EAI_AGAIN, "try again")),
            "cannot be reached",
            False,
            False,
        ),
    ],
)
def test_what_may_pass(error: Exception, message: str, unsure: bool, throttled: bool) -> None:
    failure = judge(error, "put a", PLACE)
    assert failure.again
    assert (failure.unsure, failure.throttled) == (unsure, throttled)
    assert isinstance(failure.error, BackendError)
    assert failure.error.retryable
    with pytest.raises(BackendError, match=message):
        raise failure.error


def test_a_full_storage_is_full() -> None:
    assert isinstance(judge(refused("QuotaExceeded", 403), "put a", PLACE).error, NoSpaceError)


def test_a_profile_that_is_missing_is_bad_input() -> None:
    failure = judge(boto.ProfileNotFound(profile="mine"), "connect", PLACE)
    assert isinstance(failure.error, InvalidInputError)
    assert "no profile mine" in str(failure.error)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "Tue, 01 Dec 2026 10:00:30 GMT", "date": "Tue, 01 Dec 2026 10:00:00 GMT"}, 30.0),
        ({"retry-after": "Tue, 01 Dec 2026 10:00:00 GMT", "date": "Tue, 01 Dec 2026 10:00:30 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "9" * 400}, 0.0),
        ({}, 0.0),
    ],
)
def test_how_long_the_server_asks_to_wait(headers: dict[str, str], seconds: float) -> None:
    assert judge(refused("SlowDown", 503, **headers), "put a", PLACE).wait == seconds


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = Clock(lambda: self.now, self.sleep, random.Random(1))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


PASSING = judge(boto.ConnectionClosedError(endpoint_url="x", error="x"), "put a", PLACE)
UNREACHED = judge(boto.EndpointConnectionError(endpoint_url="x", error="x"), "put a", PLACE)


def pauses(failure: Failure, seconds: float, answered: bool = True) -> list[float]:
    """The pauses between tries until patience ends."""
    time = Time()
    patience = Patience(seconds, time.clock)
    found = []
    while (pause := patience.spend(failure, answered)) is not None:
        found.append(pause)
        time.sleep(pause)
    return found


def test_pauses_are_random_and_grow_until_patience_ends() -> None:
    found = pauses(PASSING, 120)
    assert 5 < len(found) < 40
    assert all(0 <= pause <= min(20, 0.05 * 2**n) for n, pause in enumerate(found, 1))
    assert sum(found) == pytest.approx(120)
    assert len({*found}) == len(found)


def test_a_server_that_never_answered_is_given_up_soon() -> None:
    assert sum(pauses(UNREACHED, 120, answered=False)) == pytest.approx(15)
    assert sum(pauses(UNREACHED, 120, answered=True)) == pytest.approx(120)


def test_the_wait_that_a_server_asks_for_is_kept_if_there_is_time_for_it() -> None:
    asked = judge(refused("SlowDown", 503, **{"retry-after": "30"}), "put a", PLACE)
    assert pauses(asked, 100)[:3] == [30.0, 30.0, 30.0]
    assert pauses(asked, 20) == []
