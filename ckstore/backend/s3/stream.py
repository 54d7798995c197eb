"""An object written piece by piece: one PUT if it is small, else parts, a few of them under way at once.

A part is copied to memory of the stream's own and sent from there, as the caller's may change at once. The first part
goes when more is known to follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from ckstore import aligned
from ckstore.backend.base import flat
from ckstore.backend.s3.calls import Answer, Calls, Refused
from ckstore.backend.s3.checksums import Checksums
from ckstore.backend.s3.creation import checked, new_write_id
from ckstore.backend.s3.look import WRITE_ID, Found, look
from ckstore.backend.s3.verdict import FAILURES, NO_UPLOAD
from ckstore.errors import BackendError, CkstoreError, InvalidInputError
from ckstore.threads import submit

PART = 16 << 20
"""Bytes of the first parts of a stream; a smaller stream is no upload in parts."""
UNDER_WAY = 2
"""Parts of one stream that are being sent while the next is gathered."""
_PARTS_OF_A_SIZE = 1200
_STEP = 256 << 10
"""Bytes handed to the connection at a time: each has the whole time-out for itself."""


def part_size(number: int) -> int:
    """Bytes of part `number` (from 1): they grow, so that 10,000 hold the largest object there is."""
    return PART << (number - 1) // _PARTS_OF_A_SIZE


class Body:
    """Memory as a file that the library can send and, should it have to, send again."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        """Up to `size` bytes, or a few more: whoever asks takes what there is."""
        found = self._view[self._at :] if size < 0 else self._view[self._at : self._at + max(size, _STEP)]
        self._at += len(found)
        return found

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at


class S3Stream:
    """A `PutStream`. `more` are parameters that go with every object."""

    def __init__(self, calls: Calls, checksums: Checksums, name: str, more: Mapping[str, Any]) -> None:
        self._calls = calls
        self._checksums = checksums
        self._name = name
        self._key = calls.place.key(name)
        self._id = new_write_id()
        self._more = {"Metadata": {WRITE_ID: self._id}, **more}
        self._begun: Answer | None = None
        self._buffer: memoryview | None = None
        self._filled = 0
        self._size = 0
        self._sent: list[Future[dict[str, Any]]] = []
        self._ended = False

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._check_open()
        rest = flat(piece)
        try:
            while rest:
                if self._filled == part_size(len(self._sent) + 1):
                    self._send()
                if self._buffer is None:
                    self._buffer = aligned.take(part_size(len(self._sent) + 1))
                room = self._buffer[self._filled : part_size(len(self._sent) + 1)]
                taken = rest[: len(room)]
                aligned.copy(taken, room[: len(taken)])
                self._filled += len(taken)
                self._size += len(taken)
                rest = rest[len(taken) :]
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        self._check_open()
        try:
            if self._begun is None:
                self._put()
            else:
                self._send()
                self._complete(self._begun, [future.result() for future in self._sent])
                self._begun = None
        finally:
            self.abort()

    def abort(self) -> None:
        self._ended = True
        for future in self._sent:
            future.cancel()
        wait(self._sent)
        self._sent = []
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            aligned.give(buffer)
        begun, self._begun = self._begun, None
        if begun is not None:
            with suppress(CkstoreError, *FAILURES):  # what stays is swept once its save is decided
                self._calls.once("abort_multipart_upload", {"Key": self._key, "UploadId": begun["UploadId"]})

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidInputError(f"the stream of {self._name} has ended")

    def _put(self) -> None:
        """A stream that is no longer than a part: one object at once."""
        view = memoryview(b"") if self._buffer is None else self._buffer[: self._filled]
        sums = self._checksums.of(view)
        parameters = {"Key": self._key, **self._more, **sums}
        doing = f"write {self._name}"

        def once() -> None:
            answer = self._calls.once("put_object", {**parameters, "Body": Body(view)})
            self._checksums.learn(sums, checked(answer, doing, self._calls))

        try:
            self._calls.repeat(doing, once)
        except BackendError:
            if not self._is_there():
                raise

    def _send(self) -> None:
        """Let the buffer go as the next part, as soon as few enough are under way."""
        if self._begun is None:
            doing = f"begin {self._name}"
            begun = self._calls.call(
                "create_multipart_upload", doing, Key=self._key, **self._more, **self._checksums.of_upload()
            )
            if not begun.get("UploadId"):
                raise BackendError(f"cannot {doing}: {self._calls.place.server} gave no upload id")
            self._begun = begun
        number, buffer = len(self._sent) + 1, self._buffer
        assert buffer is not None
        if number > UNDER_WAY:
            self._sent[-UNDER_WAY].result()
        pool = self._calls.connections.get().pool
        self._sent.append(submit(pool, self._send_part, self._begun, number, buffer, self._filled))
        self._buffer, self._filled = None, 0

    def _send_part(self, begun: Answer, number: int, buffer: memoryview, size: int) -> dict[str, Any]:
        """What completing the upload has to say of this part."""
        try:
            view = buffer[:size]
            doing = f"write part {number} of {self._name}"
            sums = self._checksums.of_part(begun, view)
            parameters = {"Key": self._key, "UploadId": begun["UploadId"], "PartNumber": number, **sums}

            def once() -> Answer:
                if self._ended:
                    raise BackendError(f"{self._name} is not wanted any more")
                return checked(self._calls.once("upload_part", {**parameters, "Body": Body(view)}), doing, self._calls)

            answer = self._calls.repeat(doing, once, NO_UPLOAD)
        except Refused as refused:
            raise self._swept() from refused
        finally:
            aligned.give(buffer)
        kept = {name: value for name, value in sums.items() if name == "ChecksumCRC32"}
        return {"PartNumber": number, "ETag": answer["ETag"], **kept}

    def _complete(self, begun: Answer, parts: list[dict[str, Any]]) -> None:
        """Make one object of the parts. Where the answer does not prove it, the object itself does."""
        try:
            answer = self._calls.call(
                "complete_multipart_upload", f"complete {self._name}", NO_UPLOAD,
                Key=self._key, UploadId=begun["UploadId"], MultipartUpload={"Parts": parts},
            )  # fmt: skip
        except Refused as refused:  # completed by a try whose answer was lost, or swept
            if self._is_there():
                return
            raise self._swept() from refused
        except BackendError:
            if not self._is_there():
                raise
            return
        if not answer.get("ETag") and not self._is_there():
            raise BackendError(
                f"cannot complete {self._name}: {self._calls.place.server} says it is, and it is not there"
            )

    def _is_there(self) -> bool:
        """Whether the object is what this stream has written; False also if that cannot be seen."""
        try:
            return look(self._calls, self._key, f"look for {self._name}") == Found(self._size, self._id)
        except CkstoreError:
            return False

    def _swept(self) -> BackendError:
        return BackendError(
            f"the parts of {self._name} were removed while it was written; was its save decided elsewhere?",
            retryable=True,
        )
