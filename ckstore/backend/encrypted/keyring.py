"""The records of data keys on a storage: the newest one read, the first made, the next put in its place.

A record is created once under its number and never changed; the highest number counts. So of two who rotate at a time
one is told, and no data key is lost that something was written under. A second copy stands beside each.
"""

from __future__ import annotations

import re
import warnings

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.encrypted import form
from ckstore.backend.encrypted.master import MasterKey
from ckstore.backend.encrypted.record import MAX_RECORD, DataKey, KeyRecord, KeyRing, decode, encode, unwrap, wrap
from ckstore.errors import CkstoreWarning, ConflictError, CorruptionError, FormatError, InvalidInputError, NotFoundError

_ATTEMPTS = 8
_RECORD = re.compile(rf"{layout.ENCRYPTION}([0-9]{{10}})(-copy)?\Z")


def newest(backend: Backend) -> KeyRecord | None:
    """The record that counts; None if there is none. A `CkstoreWarning` when its copy had to be read."""
    for _ in range(_ATTEMPTS):
        numbers = _numbers(backend)
        if not numbers:
            return None
        try:
            return _read(backend, max(numbers))
        except NotFoundError:
            continue  # another one was put in its place since
    raise ConflictError(f"the keys of {backend.url} are being rotated again and again; try again")


def establish(backend: Backend, master: MasterKey, segment: int = form.SEGMENT) -> KeyRecord:
    """Make the storage an encrypted one, with a first data key; if somebody else is faster, it is as they made it.

    `InvalidInputError` or `FormatError` when a store stands there.
    """
    refuse_store(backend)
    record = wrap(1, segment, [DataKey.new()], master)
    if not _place(backend, record):
        found = newest(backend)
        if found is None:
            raise ConflictError(f"somebody is making and removing what is at {backend.url}; try again")
        return found
    return record


def refuse_store(backend: Backend) -> None:
    """An error if there is a store on this storage, which has no record of keys."""
    head = bytearray(len(form.MAGIC))
    try:
        backend.get_into(layout.CONFIG, 0, memoryview(head))
    except NotFoundError:
        if any(backend.list(house) for house in (layout.SNAPSHOTS, layout.PACKS)):
            raise FormatError(
                f"{backend.url} holds objects of a store but neither {layout.CONFIG} nor a record of keys: it is "
                "damaged, not new"
            ) from None
        return
    except CorruptionError:
        head = bytearray()  # shorter than any
    if head == form.MAGIC:
        raise FormatError(
            f"the store at {backend.url} is encrypted, but the record of its data keys is missing, without which "
            f"nothing there can be read: put back {layout.encryption(1)} (or a later number) from a copy"
        )
    raise InvalidInputError(f"what is at {backend.url} is not encrypted: open it without a key")


def rotate(backend: Backend, old: MasterKey, new: MasterKey, *, new_data_key: bool = False) -> KeyRing:
    """Wrap the data keys by `new`, with `new_data_key` one more; afterwards `old` opens nothing that is there.

    Until the one call that creates the next record everything is as it was; from then on `new` is needed. Who is
    interrupted does the same again. `ConflictError` when somebody else was faster.
    """
    record = newest(backend)
    if record is None:
        refuse_store(backend)
        raise NotFoundError(f"there is no encrypted store at {backend.url}")
    again = record.master == new.fingerprint != old.fingerprint
    ring = unwrap(record, new if again else old, backend.url)
    if new_data_key or not again:  # else all that may be left to do is to clear away
        keys = [*ring.keys, DataKey.new()] if new_data_key else ring.keys
        record = wrap(ring.number + 1, ring.segment, keys, new)
        if not _place(backend, record):
            raise ConflictError(f"somebody else is rotating the keys of {backend.url}; do it again if need be")
        ring = unwrap(_read(backend, record.number), new, backend.url)
    _put_copy(backend, record)
    for number in _numbers(backend):
        if number < record.number:
            backend.delete(layout.encryption_copy(number))  # first, or who reads meanwhile would take it for a lost one
            backend.delete(layout.encryption(number))
    return ring


def leftovers(backend: Backend) -> list[str]:
    """What is not as a finished rotation leaves it, in words: copies that are missing, records that are still there."""
    numbers = _numbers(backend)
    last = max(numbers, default=0)
    found = [f"{layout.encryption(number)} is still there: its master key opens it" for number in numbers - {last}]
    whole = []
    for name in (layout.encryption(last), layout.encryption_copy(last)):
        try:
            whole.append(decode(backend.get(name, limit=MAX_RECORD), last, name))
        except (CorruptionError, NotFoundError) as error:
            found.append(f"{name} is damaged or missing, with which only one copy of the keys is left: {error}")
    if whole[1:] and whole[0] != whole[1]:
        found.append(f"{layout.encryption_copy(last)} is another record than {layout.encryption(last)}")
    return sorted(found)


def _numbers(backend: Backend) -> set[int]:
    found = (_RECORD.match(name) for name in backend.list(layout.ENCRYPTION))
    return {int(match[1]) for match in found if match}


def _read(backend: Backend, number: int) -> KeyRecord:
    name, copy = layout.encryption(number), layout.encryption_copy(number)
    try:
        return decode(backend.get(name, limit=MAX_RECORD), number, name)
    except (CorruptionError, NotFoundError) as error:
        try:
            record = decode(backend.get(copy, limit=MAX_RECORD), number, copy)
        except (CorruptionError, NotFoundError):
            raise error from None
        warnings.warn(
            f"{name} is damaged or missing ({error}): its copy was read; `ckstore key rotate` writes both anew",
            CkstoreWarning,
            stacklevel=2,
        )
        return record


def _place(backend: Backend, record: KeyRecord) -> bool:
    """Create the record under its number, then its copy; False if the number is taken."""
    if not backend.put_if_absent(layout.encryption(record.number), encode(record)):
        return False
    _put_copy(backend, record)
    return True


def _put_copy(backend: Backend, record: KeyRecord) -> None:
    backend.put(layout.encryption_copy(record.number), encode(record))
