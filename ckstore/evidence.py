"""Damaged objects as they were found, kept aside when others take their place.

    evidence/<name>/<nonce>          the bytes, at most `MAX_KEPT` of them
    evidence/<name>/<nonce>.about    what was wrong with them, who saw it, who wrote them

The nonce is the beginning of the BLAKE3 of the bytes, so that the same damage is kept once, however often it is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3

from ckstore import layout
from ckstore.backend.base import Backend, size_of
from ckstore.backend.encrypted import encryption_of
from ckstore.context import Context
from ckstore.errors import CkstoreError, FormatError, NotFoundError
from ckstore.facts import MAX_TEXT
from ckstore.format import evidence as form
from ckstore.format.records import MAX_RECORD, Commit
from ckstore.history import read_decision
from ckstore.host import host_name
from ckstore.ids import SaveName

MAX_KEPT = 1 << 30
"""The most bytes that are kept of one object."""
_ABOUT = ".about"
_WINDOW = 4 << 20


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with an object, and the damaged ranges (offset, length) as far as they are known."""

    what: str
    ranges: tuple[tuple[int, int], ...] = ()


def keep(context: Context, name: str, wrong: Wrong, sources: Sequence[str]) -> str:
    """Keep the object `name` as it stands here, with what is wrong; the name of the evidence. Nothing is half kept.

    Of an encrypted storage that is the bytes as they are stored, as what is damaged can no longer be opened.
    """
    cipher = encryption_of(context.backend)
    stored = context.backend if cipher is None else cipher.inner
    size = size_of(stored, name)
    kept = min(size or 0, MAX_KEPT)
    place = layout.evidence(name, _nonce(stored, name, kept))
    if size is not None:
        _copy(stored, name, kept, context.backend, place)
    record = form.Evidence(
        name=name,
        what=wrong.what[:MAX_TEXT],
        ranges=[list(one) for one in wrong.ranges[: form.MAX_RANGES]],
        size=size,
        kept=kept,
        saw=host_name(),
        wrote=writer_of(context, name),
        storage=context.backend.url[:MAX_TEXT],
        sources=[url[:MAX_TEXT] for url in sources],
        at=context.now(),
    )
    context.backend.put(place + _ABOUT, form.encode(record))
    return place


def drop(context: Context, place: str) -> None:
    """Delete evidence that `keep` made."""
    for name in (place, place + _ABOUT):
        context.backend.delete(name)


def forget(context: Context) -> int:
    """Delete all evidence; how many bytes that were."""
    freed = 0
    for name in context.backend.list(layout.EVIDENCE):
        with suppress(NotFoundError):
            size = context.backend.stat(name)
            freed += size if context.backend.delete(name) else 0
    return freed


def kept_bytes(context: Context) -> int:
    """How many bytes all evidence takes."""
    sizes = (size_of(context.backend, name) for name in context.backend.list(layout.EVIDENCE))
    return sum(size or 0 for size in sizes)


def read_all(context: Context) -> list[form.Evidence]:
    """Every record that can be read, in order of name and nonce."""
    found = []
    for name in context.backend.list(layout.EVIDENCE):
        if name.endswith(_ABOUT):
            with suppress(CkstoreError):
                found.append(form.decode(context.backend.get(name, limit=MAX_RECORD), name))
    return found


def writer_of(context: Context, name: str) -> str:
    """The machine that wrote the object `name`, if the commit record of its save can be read and says so."""
    save = layout.owning_save(name)
    if save is None:
        return ""
    with suppress(CkstoreError):
        commit = read_decision(context, save)
        if isinstance(commit, Commit):
            return commit.manifests[_rank(name, save, len(commit.manifests))].host
    return ""


def _rank(name: str, save: SaveName, ranks: int) -> int:
    """The rank that wrote an object of `save`; the commit record is the first one's."""
    rank = 0 if name == layout.snapshot(save) else int(name.rpartition("/")[2].partition("-")[0])
    if rank >= ranks:
        raise FormatError(f"{name} is of no rank of its save")
    return rank


def _nonce(backend: Backend, name: str, size: int) -> str:
    hasher = blake3()
    window = memoryview(bytearray(min(size, _WINDOW)))
    for start in range(0, size, _WINDOW):
        piece = window[: size - start]
        backend.get_into(name, start, piece)
        hasher.update(piece)
    return hasher.hexdigest()[:16]


def _copy(source: Backend, name: str, size: int, target: Backend, to: str) -> None:
    if size_of(target, to) == size:
        return  # the same damage was met before
    stream = target.put_stream(to, size)
    window = memoryview(bytearray(min(size, _WINDOW)))
    try:
        for start in range(0, size, _WINDOW):
            piece = window[: size - start]
            source.get_into(name, start, piece)
            stream.append(piece)
    except BaseException:
        stream.abort()
        raise
    stream.commit()
