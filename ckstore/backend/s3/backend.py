"""The verbs of a storage over a bucket (SPEC §2).

S3 makes an object visible whole, durably and at once, and lists what is there; there are no directories to make
durable. What a writer that died leaves behind are uploads that were never completed.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ckstore import layout
from ckstore.backend.base import Capabilities, check_object, check_prefix, writable
from ckstore.backend.s3 import archive, listing, reading
from ckstore.backend.s3.calls import Calls, Clock, Refused
from ckstore.backend.s3.checksums import Checksums
from ckstore.backend.s3.creation import checked, create
from ckstore.backend.s3.look import Found, look
from ckstore.backend.s3.place import Place
from ckstore.backend.s3.stream import S3Stream
from ckstore.backend.s3.verdict import NO_UPLOAD, UNKNOWN_VERB
from ckstore.errors import CkstoreWarning, CorruptionError, InvalidInputError
from ckstore.ids import new_nonce
from ckstore.threads import submit

_RACERS = 8


class S3Backend:
    """A `Backend` over the objects below a prefix of a bucket. It asks nothing of the server before the first verb."""

    def __init__(self, place: Place, clock: Clock | None = None) -> None:
        self.place = place
        self._calls = Calls(place, clock)
        self._checksums = Checksums(place)
        self._more: dict[str, Any] = {}
        if place.sse:
            self._more["ServerSideEncryption"] = place.sse
        if place.sse_key:
            self._more["SSEKMSKeyId"] = place.sse_key

    @property
    def url(self) -> str:
        return self.place.url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=not self.place.single_writer, single_writer=self.place.single_writer)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._put(check_object(name), bytes(data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        check_object(name)
        if not self.place.single_writer:
            return create(self._calls, self._checksums, self.place.key(name), bytes(data), self._more)
        if self._look(name) is not None:
            return False
        self._put(name, bytes(data))
        return True

    def put_stream(self, name: str, size_hint: int) -> S3Stream:
        return S3Stream(self._calls, self._checksums, check_object(name), self._more)

    def get(self, name: str, *, limit: int) -> bytes:
        return reading.whole(self._calls, check_object(name), limit)

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.get_parts(name, start, [view])

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        check_object(name)
        flat = [writable(view, start) for view in views]
        if any(map(len, flat)):
            reading.into(self._calls, name, start, flat)
        elif start > (size := self.stat(name)):
            raise CorruptionError(f"ends at {size} where {start} bytes are needed", name=name, offset=start)

    def stat(self, name: str) -> int:
        found = self._look(check_object(name))
        if found is None:
            raise reading.absent(self._calls, name)
        return found.size

    def list(self, prefix: str) -> builtins.list[str]:
        check_prefix(prefix)
        if prefix.startswith(layout.TEMPORARIES):
            return []
        return [name for name, _ in listing.objects(self._calls, prefix)]

    def first(self, prefix: str) -> str | None:
        check_prefix(prefix)
        return next((name for name, _ in listing.objects(self._calls, prefix)), None)

    def sizes(self, prefix: str) -> dict[str, int]:
        check_prefix(prefix)
        return dict(listing.objects(self._calls, prefix))

    def delete(self, name: str) -> bool:
        if self._look(check_object(name)) is None:
            return False
        self._calls.call("delete_object", f"delete {name}", Key=self.place.key(name))
        return True

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def sweep_temporaries(self, decided: set[str]) -> int:
        """Abort the uploads of saves in `decided`. Those that belong to no save are left to a rule of the bucket."""
        freed = 0
        try:
            for name, upload in listing.uploads(self._calls):
                if str(layout.owning_save(name)) in decided:
                    freed += self._drop_upload(name, upload)
        except Refused:
            pass  # the server does not list uploads
        return freed

    def close(self) -> None:
        self._calls.connections.close()

    def thaw(self, name: str) -> bool:
        return archive.thaw(self._calls, check_object(name))

    def probe(self) -> None:
        """See that of eight creations of one name, all at once, one wins; `InvalidInputError` if not.

        It also shows whether objects may be written and deleted at all, and warns of a bucket that keeps old versions.
        """
        name = f"{layout.TEMPORARIES}probe-{new_nonce()}"
        key = self.place.key(name)
        if not self.place.single_writer:
            pool = self._calls.connections.get().pool
            racers = [submit(pool, self._try_to_create, key, str(i).encode()) for i in range(_RACERS)]
            won = [racer.result() for racer in racers]
            if won.count(True) != 1:
                raise InvalidInputError(self._unconditional(won.count(True)))
        else:
            self._put(name, b"probe")
        answer = self._calls.call("delete_object", "delete what was written to try the bucket out", Key=key)
        if answer.get("VersionId", "null") != "null":
            warnings.warn(
                f"the bucket {self.place.bucket} keeps old versions: what prune and gc delete takes up room until a "
                "lifecycle rule expires noncurrent versions (docs/storages.md)",
                CkstoreWarning,
                stacklevel=2,
            )

    def foreign(self) -> builtins.list[str]:
        """What else than a store's stands at the top of the place, sorted, a few of it."""
        found = (name.rstrip("/") for name in listing.top(self._calls))
        return sorted(name for name in found if layout.is_foreign(name))[:20]

    def _look(self, name: str) -> Found | None:
        return look(self._calls, self.place.key(name), f"look for {name}")

    def _put(self, name: str, data: bytes) -> None:
        sums = self._checksums.of(data)
        parameters = {"Key": self.place.key(name), "Body": data, **self._more, **sums}
        doing = f"put {name}"
        self._checksums.learn(sums, checked(self._calls.call("put_object", doing, **parameters), doing, self._calls))

    def _drop_upload(self, name: str, upload: str) -> int:
        """Abort an upload; the bytes that it had, 0 if it is gone."""
        size = 0
        with suppress(Refused):
            size = listing.upload_size(self._calls, name, upload)
            self._calls.call(
                "abort_multipart_upload", f"abort the upload of {name}", NO_UPLOAD,
                Key=self.place.key(name), UploadId=upload,
            )  # fmt: skip
        return size

    def _try_to_create(self, key: str, data: bytes) -> bool:
        try:
            return create(self._calls, self._checksums, key, data, self._more, UNKNOWN_VERB)
        except Refused:
            return False

    def _unconditional(self, winners: int) -> str:
        return (
            f"{self.place.url} is no place for a store that several processes use: {winners} of {_RACERS} were told "
            f"that they created one object, as {self.place.server} does not honour a conditional PUT (If-None-Match). "
            "Use a server that does, or, if one process at a time writes, add single_writer=true to the URL "
            "(docs/storages.md)"
        )
