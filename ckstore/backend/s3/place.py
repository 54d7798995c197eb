"""What an `s3://` URL says: which bucket, which server, how. Pure, and without secrets."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, fields

from ckstore.backend import options
from ckstore.errors import InvalidInputError
from ckstore.layout import is_name

_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]\Z")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_CHECKSUMS = ("auto", "crc32", "md5", "none")
_SSE = ("AES256", "aws:kms", "aws:kms:dsse")
_MOST_PREFIX = 600
"""Bytes of a prefix: a key has at most 1,024, and the names of a store need some of them."""
_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket, a prefix of keys in it (without slashes around it), and how they are reached.

    `path_style` None leaves that to the library: by path where `endpoint` is given. `timeout` is how many seconds may
    pass without a byte before a request counts as lost, `retry` for how many a failing request is tried again.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    path_style: bool | None = None
    sse: str = ""
    sse_key: str = ""
    checksum: str = "auto"
    single_writer: bool = False
    timeout: int = 30
    retry: int = 120

    @classmethod
    def parse(cls, url: str) -> Place:
        """Read a URL; `InvalidInputError` says what is wrong with it."""
        where, query = options.split_url(url)
        bucket, _, prefix = where[len(_SCHEME) :].partition("/")
        if ":" in bucket:  # the beginning of a password that holds a slash or a question mark
            raise options.holds_password(where)
        if not _BUCKET.match(bucket):
            raise InvalidInputError(f"{where}: {bucket[:80]!r} is not the name of a bucket; use s3://bucket/prefix")
        prefix = _prefix(where, prefix.rstrip("/"))
        where = _spelled(bucket, prefix)
        found = options.parse(where, query, _OPTIONS)
        place = cls(
            bucket,
            prefix,
            endpoint=_endpoint(where, found["endpoint"]) if "endpoint" in found else "",
            region=_word(where, "region", found.get("region")),
            profile=found.get("profile", ""),
            path_style=options.flag(where, "path_style", found["path_style"]) if "path_style" in found else None,
            sse=_one_of(where, "sse", found.get("sse", ""), ("", *_SSE)),
            sse_key=found.get("sse_key", ""),
            checksum=_one_of(where, "checksum", found.get("checksum", "auto"), _CHECKSUMS),
            single_writer=options.flag(where, "single_writer", found.get("single_writer", "false")),
            timeout=options.seconds(where, "timeout", found.get("timeout", "30"), _HOUR),
            retry=options.seconds(where, "retry", found.get("retry", "120"), _HOUR),
        )
        if place.sse_key and not place.sse.startswith("aws:kms"):
            raise InvalidInputError(f"{where}: sse_key names a key of KMS; it goes with sse=aws:kms")
        return place

    @property
    def url(self) -> str:
        """The URL that leads here again."""
        given: dict[str, str] = {}
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                given[field.name] = str(value).lower() if isinstance(value, bool) else str(value)
        return options.joined(_spelled(self.bucket, self.prefix), given)

    @property
    def server(self) -> str:
        """Which server that is, for people."""
        return self.endpoint or (f"AWS in {self.region}" if self.region else "AWS")

    @property
    def root(self) -> str:
        """What every key begins with."""
        return f"{self.prefix}/" if self.prefix else ""

    def key(self, name: str) -> str:
        """The key of an object's valid name, or of a listing's prefix."""
        return self.root + name

    def name(self, key: str) -> str | None:
        """The name that stands under `key`; None where it is none of a store's, or not below the prefix."""
        if not key.startswith(self.root):
            return None
        name = key[len(self.root) :]
        return name if is_name(name) else None


_OPTIONS = frozenset(field.name for field in fields(Place)[2:])


def _spelled(bucket: str, prefix: str) -> str:
    return f"{_SCHEME}{bucket}/{prefix}" if prefix else f"{_SCHEME}{bucket}"


def _prefix(where: str, prefix: str) -> str:
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable() or "\\" in prefix:
        raise InvalidInputError(
            f"{where!r}: between slashes a prefix has printable characters other than \\, and is never empty, . or .."
        )
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{where!r}: a prefix is text") from error
    if size > _MOST_PREFIX:
        raise InvalidInputError(f"{where[:80]}…: a prefix has at most {_MOST_PREFIX} bytes, and this one {size}")
    return prefix


def _endpoint(where: str, text: str) -> str:
    if "@" in text:
        raise InvalidInputError(f"{where}: the endpoint must not hold a user or a password; take both out of it")
    try:
        parts = urllib.parse.urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        known = known and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, a bracket that is not closed
        known = False
    if not known:
        raise InvalidInputError(f"{where}: endpoint is a URL such as https://s3.example.org:9000, not {text[:80]!r}")
    return text.rstrip("/")


def _word(where: str, name: str, text: str | None) -> str:
    if text is not None and not _WORD.match(text):
        raise InvalidInputError(f"{where}: {text[:40]!r} is not the name of a {name}")
    return text or ""


def _one_of(where: str, name: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise InvalidInputError(f"{where}: {name} is one of {', '.join(filter(None, known))}, not {text[:40]!r}")
    return text
