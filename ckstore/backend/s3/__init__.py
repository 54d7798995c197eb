"""An S3 bucket as a storage (SPEC §2): `s3://bucket/prefix?option=value`.

backend     the verbs
stream      an object in parts, some of them under way at once
reading     ranges into memory, in parallel where they are large
creation    one conditional PUT with one winner, whatever becomes of the answers
listing     names, page by page
look        what stands under a key, and who wrote it
calls       one request after the other until there is an answer or patience ends
verdict     what a failed request means, and whether it is worth another try
checksums   what the server checks of the bytes that it is sent
connection  the client of this process
place       what a URL says; no secrets are in it
"""

from __future__ import annotations

from ckstore.backend.s3.backend import S3Backend
from ckstore.backend.s3.place import Place


def open_url(url: str) -> S3Backend:
    """The backend that an `s3://` URL names; `InvalidInputError` says what is wrong with one."""
    return S3Backend(Place.parse(url))


__all__ = ["Place", "S3Backend", "open_url"]
