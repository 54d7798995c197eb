"""Names, page by page. An answer that is not surely the listing that was asked for is an error, never an empty one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckstore.backend.s3.calls import NOTHING, Answer, Calls
from ckstore.backend.s3.verdict import NO_UPLOAD, UNKNOWN_VERB
from ckstore.errors import BackendError

Following = Callable[[Answer], dict[str, Any]]
"""From a page to the parameters of the next one."""


def objects(calls: Calls, prefix: str) -> Iterator[tuple[str, int]]:
    """The names and sizes of a store's objects below `prefix`, in order of their keys; foreign keys are passed over.

    A page is asked for when the one before is used up.
    """
    doing, start, last = f"list {prefix}", calls.place.key(prefix), ""
    for page in _pages(calls, doing, _next_objects, "list_objects_v2", start):
        # A page of HTML can be read as an empty listing: one must say what it is a listing of.
        if page.get("Prefix") != start:
            raise _wrong(calls, doing, "it is of something else")
        for entry in page.get("Contents", ()):
            key = str(entry["Key"])
            if key <= last:
                raise _wrong(calls, doing, "its keys are not in order")
            last = key
            name = calls.place.name(key)
            if name is not None and name.startswith(prefix):
                yield name, int(entry["Size"])


def uploads(calls: Calls) -> Iterator[tuple[str, str]]:
    """Name and upload id of every object in parts that is neither complete nor aborted.

    `Refused` if the server does not list them.
    """
    doing = "list uploads that were not completed"
    for page in _pages(calls, doing, _next_uploads, "list_multipart_uploads", calls.place.root, UNKNOWN_VERB):
        for entry in page.get("Uploads", ()):
            name = calls.place.name(str(entry["Key"]))
            if name is not None:
                yield name, str(entry["UploadId"])


def top(calls: Calls) -> Iterator[str]:
    """What stands at the top of the place, store or not; what has more below it ends with `/`. One page of it."""
    root = calls.place.root
    answer = calls.call("list_objects_v2", "list what there is", Prefix=root, Delimiter="/")
    for entry in answer.get("CommonPrefixes", ()):
        yield str(entry["Prefix"])[len(root) :]
    for entry in answer.get("Contents", ()):
        if entry["Key"] != root:  # some programs put an empty object there to show a folder
            yield str(entry["Key"])[len(root) :]


def upload_size(calls: Calls, name: str, upload: str) -> int:
    """Bytes of the parts that an upload has so far."""
    size = 0
    more: dict[str, Any] = {}
    while True:
        answer = calls.call(
            "list_parts", f"list parts of {name}", NO_UPLOAD, Key=calls.place.key(name), UploadId=upload, **more
        )
        size += sum(int(entry["Size"]) for entry in answer.get("Parts", ()))
        following = answer.get("NextPartNumberMarker", 0)
        if not answer.get("IsTruncated") or following <= more.get("PartNumberMarker", 0):
            return size
        more = {"PartNumberMarker": following}


def _pages(
    calls: Calls, doing: str, following: Following, verb: str, prefix: str, expected: frozenset[str] = NOTHING
) -> Iterator[Answer]:
    more: dict[str, Any] = {}
    while True:
        page = calls.call(verb, doing, expected, Prefix=prefix, **more)
        if "IsTruncated" not in page or page.get("Name", page.get("Bucket")) != calls.place.bucket:
            raise _wrong(calls, doing, "it is of something else")
        yield page
        if not page["IsTruncated"]:
            return
        before, more = more, following(page)
        if not all(more.values()) or more == before:
            raise _wrong(calls, doing, "it says that there is more, but not where")


def _next_objects(page: Answer) -> dict[str, Any]:
    return {"ContinuationToken": page.get("NextContinuationToken")}


def _next_uploads(page: Answer) -> dict[str, Any]:
    return {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}


def _wrong(calls: Calls, doing: str, why: str) -> BackendError:
    return BackendError(
        f"cannot {doing}: the listing by {calls.place.server} cannot be relied on: {why}; is a proxy between here and "
        "there?"
    )
