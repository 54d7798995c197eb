"""The small records of a store: what it is, who is at work on it, what was decided (SPEC §5).

Each is a msgpack map in an envelope. `encode` and `decode` are the only doors; what `decode` returns is valid, and
`encode` refuses what `decode` would refuse: a record that nobody can read must never be published.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ckstore.errors import FormatError
from ckstore.format import envelope
from ckstore.host import HOST_PATTERN
from ckstore.ids import HASH_BYTES, LABEL_PATTERN, SAVE_PATTERN, SaveName
from ckstore.layout import PACK_PATTERN
from ckstore.process import Owner

FORMAT = 1
MAX_MEMBERS = 16
"""Storages of one store."""
MAX_RECORD = 64 << 20
"""Largest record read, in bytes: a commit of half a million packs is below it."""

StoreId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""It names a cache directory, so it must not be a path."""
Save = Annotated[str, Meta(pattern=rf"\A{SAVE_PATTERN}\Z")]
Pack = Annotated[str, Meta(pattern=rf"\A{PACK_PATTERN}\Z")]
Branch = Annotated[str, Meta(pattern=rf"\A{LABEL_PATTERN}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Host = Annotated[str, Meta(pattern=rf"\A{HOST_PATTERN}\Z")]
Url = Annotated[str, Meta(pattern=r"\A[^\x00-\x20\x7f@]{1,2000}\Z")]
"""Without a user or a password, which would stand before an `@`; one of the place itself is percent-encoded."""
TermNumber = Annotated[int, Meta(ge=1, le=2**32 - 2)]
"""In the upper half of a sequence: the saves of each authority have a range of their own."""
Seconds = Annotated[float, Meta(ge=0, le=253402300799)]
"""A duration, or a time since 1970 that a calendar can show (until the year 9999)."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a store is. Written once at `init`."""

    store: StoreId
    format: int = FORMAT
    hash: str = "blake3-256"
    ids: str = "plain"
    chunk_size: int = 4 << 20
    reader_features: list[str] = []
    writer_features: list[str] = []


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A save under way and the snapshots it depends on. `counter` moves while it lives."""

    save: Save
    branch: Branch
    step: Count
    epoch: Count
    parents: list[Save]
    owner: Owner
    world: Count = 1
    attempt: Count = 0
    counter: Count = 0


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reader and the snapshots it depends on."""

    purpose: str
    snapshots: list[Save]
    owner: Owner
    counter: Count = 0


class ManifestRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one rank's manifest is: in `manifests/<save>/<rank>`, or in `inline` when it is small.

    `host` is the machine that wrote it and the rank's packs, empty where that is not known.
    """

    rank: Count
    size: Count
    hash: Hash
    inline: bytes | None = None
    host: Host = ""


class PackRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A pack that a snapshot needs, and its size in bytes."""

    name: Pack
    size: Count


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="commit", tag_field="record"):
    """A snapshot: everything a reader needs to find the rest. Times are seconds since 1970, for people only."""

    save: Save
    branch: Branch
    epoch: Count
    step: Count
    created: Seconds
    manifests: list[ManifestRef]
    packs: list[PackRef]
    content: Hash
    logical_bytes: Count
    stored_bytes: Count
    full: bool = False
    parent: Save | None = None
    meta: bytes = b"\xc0"
    seconds: Seconds = 0.0


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank wrote of a save: its manifest, and the packs that its chunks need, bases included."""

    manifest: ManifestRef
    packs: list[PackRef]
    content: Hash
    logical_bytes: Count
    stored_bytes: Count


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a rank is with its part of a save by several: `counter` moves while it writes, `done` is what it wrote.

    `step` and `epoch` are those that it was told to save.
    """

    save: Save
    rank: Count
    step: Count
    epoch: Count
    owner: Owner
    counter: Count = 0
    done: Contribution | None = None


class Abort(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="abort", tag_field="record"
):
    """A save that is not and never will be a snapshot; `rank` is the one that failed, of several, if that is known."""

    save: Save
    reason: str
    by: Owner
    rank: Count | None = None


class Moved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frames that left the pack `old` for the pack `new`: 32-byte ids and 8-byte little-endian offsets."""

    old: Pack
    new: Pack
    ids: bytes
    offsets: bytes


class Relocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="relocation", tag_field="record"):
    """A repack: the live frames of old packs stand in new ones."""

    save: Save
    packs: list[PackRef]
    moved: list[Moved]


Decision = Commit | Abort | Relocation


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact about a save: what was seen, by whom, and when (seconds since 1970, for people only)."""

    fact: str
    at: Seconds
    by: Owner
    evidence: dict[str, str] = {}


class Damage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A damaged range of a pack: readers look elsewhere, writers treat its chunk as unknown.

    `host` is the machine that saw it, `storage` where the pack was read.
    """

    pack: Pack
    offset: Count
    length: Count
    what: str
    at: Seconds
    by: Owner
    host: Host = ""
    storage: str = ""


class Tag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that people gave to a snapshot."""

    snapshot: Save
    at: Seconds


class Epoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A run took over a branch, going on from `base`; later records of older epochs are fenced.

    `chosen` when the base was named: then they are left behind on purpose, else by chance.
    """

    branch: Branch
    number: Count
    base: Save | None
    base_epoch: int
    owner: Owner
    chosen: bool = False


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of saves whose sequence is below `sequence` are void unless listed in `live`. Floors are numbered."""

    number: Count
    sequence: Annotated[int, Meta(ge=0)]
    live: list[Save]


class TierRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a storage of several is for: its place in their order, and what it keeps the packs of (SPEC §14).

    `keep` newest of each branch and steps that are multiples of `every` stay. Of the others those go that are older
    than `max_age` seconds and, as long as more than the share `evict_above` of the filesystem or more than `budget`
    bytes are used, the oldest; without any of these three, all that `keep` leaves.
    """

    order: Annotated[int, Meta(ge=0, le=99)] = 0
    keep: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    every: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    max_age: Annotated[float, Meta(gt=0, le=253402300799)] | None = None
    evict_above: Annotated[float, Meta(gt=0, lt=1)] | None = None
    budget: Count | None = None


class StoragePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of the storages of a store: a name that never changes, and where it is, without secrets."""

    name: Branch
    url: Url
    role: Literal["authority", "copy"] = "copy"
    tier: TierRules | None = None


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Storages that hold a store, and on how many of them a snapshot must be complete before a save reports success."""

    members: Annotated[list[StoragePlace], Meta(min_length=1, max_length=MAX_MEMBERS)]
    required: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who is the authority among several storages, where saves are decided; each term has a number of its own.

    `promoted` is the number of the term in which the authority became it. `former` are configurations that snapshots
    saved earlier may still depend on, the oldest first: what is counted must count in each of them too.
    """

    number: TermNumber
    promoted: TermNumber
    authority: Branch
    members: Annotated[list[StoragePlace], Meta(min_length=1, max_length=MAX_MEMBERS)]
    required: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]
    owner: Owner
    at: Seconds
    former: Annotated[list[Configuration], Meta(max_length=MAX_MEMBERS)] = []


_KINDS: dict[type, bytes] = {
    Config: b"C", Announcement: b"S", Pin: b"P", Part: b"W",
    Mark: b"K", Damage: b"D", Tag: b"T", Epoch: b"E", Floor: b"F", Term: b"A",
}  # fmt: skip
_DECISION = b"R"

R = TypeVar("R")


def encode(record: msgspec.Struct) -> bytes:
    """The bytes of a record's object."""
    kind = _DECISION if isinstance(record, Decision) else _KINDS[type(record)]
    payload = msgspec.msgpack.encode(record, order="deterministic")
    _decode(payload, type(record), f"the {type(record).__name__} to be written")
    return envelope.wrap(kind, payload)


def decode(data: bytes, kind: type[R], name: str) -> R:
    """The record of type `kind` in an object's bytes, checked; `name` is the object's, for errors."""
    return _decode(envelope.unwrap(_KINDS[kind], data, name), kind, name)


def decode_decision(data: bytes, save: SaveName, name: str) -> Decision:
    """What was decided about `save`; a record of another save under its name is refused."""
    record: Decision = _decode(envelope.unwrap(_DECISION, data, name), Decision, name)  # type: ignore[arg-type]
    if record.save != str(save):
        raise FormatError(f"{name} holds the record of save {record.save!r}")
    return record


def _decode(payload: bytes | memoryview, kind: type[R], name: str) -> R:
    try:
        record = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{name} is whole but not a record that this version can read: {error}") from error
    if isinstance(record, Commit):
        _check_commit(record, name)
    if isinstance(record, Relocation):
        _check_relocation(record, name)
    if isinstance(record, Part) and record.done is not None:
        _check_done(record.rank, record.done, name)
    if isinstance(record, Term):
        _check_term(record, name)
    return record


def _check_commit(record: Commit, name: str) -> None:
    ranks = [entry.rank for entry in record.manifests]
    if not ranks or ranks != list(range(len(ranks))):
        raise FormatError(f"{name} does not list the manifests of ranks 0 to n-1 once each")
    if any(entry.inline is not None and len(entry.inline) != entry.size for entry in record.manifests):
        raise FormatError(f"{name} holds a manifest of another size than it says")
    if len({pack.name for pack in record.packs}) != len(record.packs):
        raise FormatError(f"{name} lists a pack twice")


def _check_done(rank: int, done: Contribution, name: str) -> None:
    if done.manifest.rank != rank:
        raise FormatError(f"{name} names the manifest of rank {done.manifest.rank} for what rank {rank} wrote")
    if done.manifest.inline is not None and len(done.manifest.inline) != done.manifest.size:
        raise FormatError(f"{name} holds a manifest of another size than it says")
    if len({pack.name for pack in done.packs}) != len(done.packs):
        raise FormatError(f"{name} lists a pack twice")


def _check_relocation(record: Relocation, name: str) -> None:
    for moved in record.moved:
        if len(moved.ids) % HASH_BYTES or len(moved.offsets) * (HASH_BYTES // 8) != len(moved.ids):
            raise FormatError(f"{name} holds tables of different lengths")


def _check_term(record: Term, name: str) -> None:
    shapes: list[Term | Configuration] = [record, *record.former]
    for one in shapes:
        names, urls = {member.name for member in one.members}, {member.url for member in one.members}
        if len(names) < len(one.members) or len(urls) < len(one.members):
            raise FormatError(f"{name} lists a storage twice")
        if one.required > len(one.members):
            raise FormatError(f"{name} asks for {one.required} of {len(one.members)} storages")
    leading = [member.name for member in record.members if member.role == "authority"]
    if leading != [record.authority] or record.promoted > record.number:
        raise FormatError(f"{name} does not name one authority")
