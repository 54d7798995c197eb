"""What a failed request means, to the caller and to whoever might try it again.

The text of a server is shown, but cut and without what could move a cursor: it is no more to be trusted than its bytes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ckstore.backend.s3.place import Place
from ckstore.errors import BackendError, CkstoreError, InvalidInputError, NoSpaceError

FAILURES: tuple[type[Exception], ...] = (boto.BotoCoreError, boto.ClientError, ResponseParserError, HTTPError, OSError)
"""Whatever a request can fail with."""

ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})
TAKEN = frozenset({"PreconditionFailed", "412"})
"""The condition of a PUT was not met: something stands under its key."""
CONTENDED = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
"""Two requests met at one key: the server decided about neither."""
NO_UPLOAD = frozenset({"NoSuchUpload"})
NO_RANGE = frozenset({"InvalidRange", "416"})
UNKNOWN_VERB = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405"})

_THROTTLED = frozenset({
    "SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
    "RequestThrottled", "BandwidthLimitExceeded", "Busy", "ServerBusy", "429", "503",
})  # fmt: skip
_MAY_PASS = frozenset({"InternalError", "InternalServerError", "RequestTimeout", "500", "502", "504", "408"})
_ON_THE_WAY = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "XAmzContentChecksumMismatch"})
_ELSEWHERE = frozenset({
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "301", "307",
})  # fmt: skip
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "ServiceQuotaExceeded", "507"})
_LOGIN_FAILURES = (
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.UnauthorizedSSOTokenError,
)

_SAID = {
    "NoSuchBucket": "there is no bucket {bucket} at {server}: make it, or correct the URL",
    "InvalidBucketName": "{bucket} is no name of a bucket for {server}: correct the URL",
    "InvalidAccessKeyId": "{server} does not know the access key: see which one `aws configure list` shows{profile}",
    "SignatureDoesNotMatch": "{server} finds the request signed with another secret: the secret key is wrong, or a "
    "proxy on the way changes requests{profile}",
    "ExpiredToken": "the credentials have expired: log in again (`aws sso login`), or renew AWS_SESSION_TOKEN{profile}",
    "InvalidToken": "{server} does not take the session token: it is damaged or of another account; log in again, or "
    "unset AWS_SESSION_TOKEN{profile}",
    "AccessDenied": "the credentials do not allow it in bucket {bucket} at {server}: a store needs s3:GetObject, "
    "PutObject, DeleteObject, ListBucket, AbortMultipartUpload, ListMultipartUploadParts and "
    "ListBucketMultipartUploads{profile}",
    "InvalidObjectState": "it is archived, and must be thawed before it can be read: `ckstore tier pull --thaw` asks "
    "for that; exempt all but packs from rules that archive objects (docs/tiers.md)",
    "ObjectLocked": "the object is locked against deletion (Object Lock, a retention rule or a legal hold): wait until "
    "that ends, or keep the store in a bucket without it",
    "KeyTooLongError": "its key is too long for {server}: use a shorter prefix",
}
_NO_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, make a profile (`aws configure`, "
    "?profile=NAME), or give the machine a role"
)
_NO_TLS = (
    "no secure connection to {}: its certificate is not trusted here, or it speaks no TLS; AWS_CA_BUNDLE names a file "
    "of certificates to trust"
)
_NO_PROFILE = "there is no profile {} in the AWS configuration; `aws configure list-profiles` shows those there are"
_SAME_AS = {
    "401": "InvalidAccessKeyId",
    "403": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "UnauthorizedAccess": "AccessDenied",
    "AuthFailure": "InvalidAccessKeyId",
    "TokenRefreshRequired": "ExpiredToken",
    "RequestExpired": "ExpiredToken",
    "ExpiredTokenException": "ExpiredToken",
    "InvalidClientTokenId": "InvalidToken",
    "UnrecognizedClientException": "InvalidToken",
    "WORMProtected": "ObjectLocked",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed: the error to raise for it, and whether that should be tried again first.

    `reached`: a server was there, so it is worth waiting for. `unsure`: the request may have had its effect all the
    same. `wait` is how many seconds the server asks for, `throttled` whether it asks for less.
    """

    error: CkstoreError
    code: str = ""
    again: bool = False
    reached: bool = True
    unsure: bool = False
    throttled: bool = False
    wait: float = 0.0


def code_of(error: BaseException) -> str:
    """What the server calls its refusal, or the status of its answer; "" where no server answered."""
    if not isinstance(error, boto.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", "")) or str(status_of(error.response) or "")


def status_of(answer: Mapping[str, Any]) -> int:
    """The HTTP status of an answer, 0 where there is none."""
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def headers_of(answer: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of an answer, by their names in small letters."""
    found: Mapping[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders") or {}
    return found


def judge(error: Exception, doing: str, place: Place) -> Failure:
    """What one of FAILURES means that was met while `doing` something."""
    if isinstance(error, boto.ClientError):
        return _refused(error, doing, place)
    if isinstance(error, ResponseParserError):
        return _failed(doing, f"the answer is none that S3 gives: is a proxy between here and {place.server}?")
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return _failed(doing, _NO_CREDENTIALS)
    if isinstance(error, _LOGIN_FAILURES):
        return _failed(doing, f"the credentials cannot be renewed: log in again (`aws sso login`){_profile(place)}")
    if isinstance(error, boto.ProfileNotFound):
        named = place.profile or "AWS_PROFILE"
        return Failure(InvalidInputError(f"{place.url}: {_NO_PROFILE.format(named)}"))
    if isinstance(error, ValueError | boto.ParamValidationError | boto.InvalidRegionError):
        return Failure(InvalidInputError(f"{place.url}: {_clean(str(error))}"))
    if isinstance(error, OSError) and not isinstance(error, boto.BotoCoreError):
        return _failed(doing, _clean(str(error)))  # a file of the library's is missing: it wraps what the network says
    return _unanswered(error, doing, place)


def _refused(error: boto.ClientError, doing: str, place: Place) -> Failure:
    """The server, or somebody in its place, has answered."""
    code, status = code_of(error), status_of(error.response)
    known = {code, str(status)}
    said = _clean(str(error.response.get("Error", {}).get("Message") or ""))
    wait = _retry_after(headers_of(error.response))
    if known & _FULL:
        text = f"{place.server} has no room left ({code}); free space with `ckstore prune` and `ckstore gc`"
        return Failure(NoSpaceError(f"cannot {doing}: {text}"), code)
    if code == "RequestTimeTooSkewed":
        theirs = _clean(headers_of(error.response).get("date", ""))
        there = f"{place.server}, where it is {theirs}" if theirs else place.server
        return _failed(doing, f"the clock of this machine is too far from that of {there}: set the clock (NTP)", code)
    if known & _ELSEWHERE:
        region = _clean(headers_of(error.response).get("x-amz-bucket-region", "")) or "NAME"
        return _failed(doing, f"bucket {place.bucket} is in another region: say region={region} in the URL", code)
    if code in _THROTTLED or status in (429, 503):
        text = f"{place.server} asks for fewer requests ({code})"
        return _passing(doing, text, code, unsure=status != 429, throttled=True, wait=wait)
    if code in CONTENDED:
        return _passing(doing, f"others write the same object ({code})", code)
    if code in _ON_THE_WAY:
        return _passing(doing, f"other bytes arrived at {place.server} than were sent ({code})", code)
    if known & _MAY_PASS or (status >= 500 and not known & UNKNOWN_VERB):
        return _passing(doing, f"{place.server} failed: {code} {said}".rstrip(), code, unsure=True, wait=wait)
    if code == "AccessDenied" and ("object lock" in said.lower() or "locked" in said.lower()):
        code = "ObjectLocked"
    told = _SAID.get(_SAME_AS.get(code, code)) or _SAID.get(_SAME_AS.get(str(status), ""))
    if told is None or code.startswith("KMS"):
        return _failed(doing, f"{place.server} refuses: {_clean(code)} {said}".rstrip(), code)
    return _failed(doing, told.format(bucket=place.bucket, server=place.server, profile=_profile(place)), code)


def _unanswered(error: Exception, doing: str, place: Place) -> Failure:
    """No server has answered, or its answer broke off."""
    causes = list(_causes(error))
    lookup = next((cause for cause in causes if isinstance(cause, socket.gaierror)), None)
    if lookup is not None and lookup.errno != socket.EAI_AGAIN:
        why = _clean(str(lookup.strerror or lookup))
        return _failed(doing, f"the name of the server cannot be looked up ({why}): {_which(place)}")
    if isinstance(error, boto.SSLError) or any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return _failed(doing, _NO_TLS.format(place.server))
    never = isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ProxyConnectionError)
    what = "cannot be reached" if never else "did not answer, or broke off"
    text = f"{place.server} {what} ({type(error).__name__})" + (f": {_which(place)}" if never else "")
    return _passing(doing, text, "", reached=not never, unsure=not never)


def _failed(doing: str, text: str, code: str = "") -> Failure:
    return Failure(BackendError(f"cannot {doing}: {text}"), code)


def _passing(doing: str, text: str, code: str, **what: Any) -> Failure:
    return Failure(BackendError(f"cannot {doing}: {text}", retryable=True), code, again=True, **what)


def _which(place: Place) -> str:
    if place.endpoint:
        return f"is {place.endpoint} right, and the network there?"
    return "is there a network, and is the region right? A server other than AWS is named by ?endpoint=URL"


def _profile(place: Place) -> str:
    return f" (profile {place.profile})" if place.profile else ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, as far as that is kept."""
    for _ in range(10):
        if error is None:
            return
        yield error
        kept = getattr(error, "kwargs", None)
        given = kept.get("error") if isinstance(kept, dict) else None  # where the library keeps it
        led = (given, getattr(error, "reason", None), error.__cause__, error.__context__)
        error = next((one for one in led if isinstance(one, BaseException)), None)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait, 0 if it does not say so in a way that makes sense."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal() and len(text) < 7:
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("date", ""))).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:300]).strip()
