"""The archive that torch.save writes, checked: which bytes are whose, and that its pickle claims no more than is there.

torch trusts an archive: it takes the size of a storage from the pickle and not from the record that holds it. So
everything is looked at here first, without torch. Records are stored as they are (nothing to inflate), lie within the
archive and do not overlap, no two have a name in common, and the archive ends with its directory, so that there is but
one to read. Of the calls that torch would make for a pickle, those are refused that make memory of any size out of a
number, or more of some bytes than there are.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import pickled
from ckstore_torch.convert.pickled import Call, Name, Pickled
from ckstore_torch.convert.region import Region

MAGIC = b"PK\x03\x04"
_MAX_RECORDS = 1_000_000
_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_HEADER = struct.Struct("<4s22x2H")
"""Of a record: magic, lengths of its name and of what is before its bytes besides."""

_ELEMENTS = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    "ComplexDouble": 16,
}
"""Bytes of an element, by kind of storage."""
STORAGES: dict[str, int] = {
    **{f"torch.{kind}Storage": size for kind, size in _ELEMENTS.items()},
    "torch.storage.UntypedStorage": 1,
}


_REBUILD = "torch._utils._rebuild_"
_MAKES_MEMORY = re.compile(
    r"_codecs\.encode|.*\bbytearray|torch\.(?:\w+\.)*\w*(?:Tensor|Storage)|torch\._tensor\._rebuild_from_type_v2"
)
"""Names that torch calls for a pickle, and that can be called for memory that is not in the file."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A checked archive. `storages` are first byte and size of each storage that its pickle refers to, by its key."""

    pickle: Pickled
    storages: Mapping[str, tuple[int, int]]
    little_endian: bool


def read(region: Region) -> Archive:
    """Check what stands in `region`; `InvalidInputError` says what is wrong with it. No storage is read."""
    records = _records(region)
    if "constants.pkl" in records:
        raise InvalidInputError("a TorchScript archive, not what torch.save wrote: save its state_dict with torch.save")
    if "data.pkl" not in records:
        raise InvalidInputError("a zip archive, but not what torch.save wrote: there is no data.pkl in it")
    start, size = records["data.pkl"]
    if size > pickled.MAX_BYTES:
        raise InvalidInputError(f"a pickle of {size} bytes; the limit is {pickled.MAX_BYTES}")
    found = pickled.read(region.at(start, size))
    for call in found.calls:
        _check_call(call)
    storages = dict(_storage(key, records) for key in found.references)
    order = region.at(*records["byteorder"]) if "byteorder" in records else b"little"
    return Archive(found, storages, order == b"little")


def element_size(kind: object) -> int:
    """Bytes of an element of a storage that the pickle names so."""
    size = STORAGES.get(kind.path) if isinstance(kind, Name) else None
    if size is None:
        raise InvalidInputError(f"a storage of an unknown kind: {str(kind)[:100]}")
    return size


def _check_call(call: Call) -> None:
    match call:
        case Call(Name("_codecs.encode"), (str(), "latin1")):  # how bytes are pickled by the oldest protocols
            return
        case Call(Name("torch._tensor._rebuild_from_type_v2"), (Name(inner), *_)) if inner.startswith(_REBUILD):
            return
        case Call(Name(path)) if _MAKES_MEMORY.fullmatch(path):
            raise InvalidInputError(f"a call of {path[:100]}, which no checkpoint needs")


def _storage(reference: object, records: Mapping[str, tuple[int, int]]) -> tuple[str, tuple[int, int]]:
    """Key, first byte and size of the storage that is referred to."""
    match reference:
        case ("storage", kind, str(key), str(_), int(count)) if type(count) is int and count >= 0:
            name, claimed = f"data/{key}", count * element_size(kind)
            if name not in records:
                raise InvalidInputError(f"the bytes of storage {key[:100]!r} are missing")
            start, size = records[name]
            if claimed > size:
                raise InvalidInputError(f"storage {key[:100]!r} is said to have {claimed} bytes, and there are {size}")
            return key, (start, size)
    raise InvalidInputError("a reference to something that is no storage")


def _records(region: Region) -> dict[str, tuple[int, int]]:
    """First byte and size of each record, by its name below the one folder that holds them all."""
    infos = _directory(region)
    prefix = infos[0].filename.partition("/")[0] + "/" if infos else ""
    found: dict[str, tuple[int, int]] = {}
    extents = []
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise InvalidInputError(f"record {info.filename[:100]!r} is compressed, which torch.save never does")
        magic, name_size, extra_size = _HEADER.unpack(_exactly(region, info.header_offset, _HEADER.size))
        start = info.header_offset + _HEADER.size + name_size + extra_size
        if magic != MAGIC or start + info.file_size > region.size:
            raise InvalidInputError(f"record {info.filename[:100]!r} is not where it should be")
        name = info.filename.removeprefix(prefix)
        if not info.filename.startswith(prefix) or name in found:
            raise InvalidInputError(f"record {info.filename[:100]!r} is there twice, or in a folder of its own")
        found[name] = start, info.file_size
        extents.append((info.header_offset, start + info.file_size))
    if any(end > start for (_, end), (start, _) in pairwise(sorted(extents))):
        raise InvalidInputError("records that overlap")
    return found


def _directory(region: Region) -> list[zipfile.ZipInfo]:
    end = _END.unpack(_exactly(region, region.size - _END.size, _END.size))
    if end[0] != _END_MAGIC or end[-1]:
        raise InvalidInputError("it is cut off, or something was added behind its end")
    region.seek(0)
    stream = io.BufferedReader(region)
    try:
        infos = zipfile.ZipFile(stream).infolist()
    except (zipfile.BadZipFile, OSError, struct.error, ValueError, NotImplementedError) as error:
        raise InvalidInputError(f"its directory is damaged: {error}") from error
    finally:
        stream.detach()
    if len(infos) > _MAX_RECORDS:
        raise InvalidInputError(f"{len(infos)} records; the limit is {_MAX_RECORDS}")
    return infos


def _exactly(region: Region, offset: int, count: int) -> bytes:
    data = region.at(offset, count) if offset >= 0 else b""
    if len(data) != count:
        raise InvalidInputError("it is cut off")
    return data
