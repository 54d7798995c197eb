"""Where every object of a store is: the only place in which object names are spelled.

    config                      what the store is
    saves/<save>                a save announced            (removed once it is decided)
    pins/<pin>                  a reader and the snapshots it depends on
    packs/<save>/<rank>-<n>     chunks
    manifests/<save>/<rank>     one rank's tensors and where their chunks are
    parts/<save>/<rank>         how far a rank is with its part of a save by several   (removed once it is decided)
    snapshots/<save>            COMMIT, ABORT or RELOCATION: one name, created once
    marks/<save>/<fact>         facts about a save, added and never edited
    tags/<tag>                  a name for a snapshot
    epochs/<branch>/<n>         who may write the branch
    gc/floor/<n>                records below the newest floor that it does not list are void
    gc/proposed/<nonce>         a floor about to be raised: no new save may begin below it
    reserve/<n>                 space that only prune and gc may spend
    terms/<n>, <n>+ready        which of several storages is the authority; whether that one is ready for saves
    terms/<n>+mirrored          this copy holds nothing that the authority since term n does not know
    terms/filled                this storage has held all there was
    orphaned/<save>             a decision that a newer term does not know: set aside, never live
    evidence/<name>/<nonce>     a damaged object as it was found
    encryption/<n>, …-copy      on an encrypted storage, the only plain objects: its data keys, wrapped by a master key

Names are `/`-separated components of `[A-Za-z0-9._+=-]`, none of them empty, `.` or `..`.
"""

from __future__ import annotations

import re

from ckstore.errors import FormatError
from ckstore.ids import SAVE_PATTERN, SaveName

CONFIG = "config"
SAVES = "saves/"
PINS = "pins/"
PACKS = "packs/"
MANIFESTS = "manifests/"
PARTS = "parts/"
SNAPSHOTS = "snapshots/"
MARKS = "marks/"
TAGS = "tags/"
EPOCHS = "epochs/"
FLOORS = "gc/floor/"
PROPOSED_FLOORS = "gc/proposed/"
RESERVE = "reserve/"
TERMS = "terms/"
FILLED = f"{TERMS}filled"
"""There once a storage has held all there was, since it was made or wiped."""
ORPHANED = "orphaned/"
EVIDENCE = "evidence/"
ENCRYPTION = "encryption/"
TEMPORARIES = "tmp/"
HOUSES = (
    CONFIG, SAVES, PINS, PACKS, MANIFESTS, PARTS, SNAPSHOTS, MARKS, TAGS, EPOCHS, FLOORS, PROPOSED_FLOORS, RESERVE,
    TERMS, ORPHANED, EVIDENCE, ENCRYPTION, TEMPORARIES,
)  # fmt: skip
"""Everything that stands where a store is."""

_NAME = re.compile(r"(?:[A-Za-z0-9_+=-][A-Za-z0-9._+=-]{0,199}/){0,5}[A-Za-z0-9_+=-][A-Za-z0-9._+=-]{0,199}\Z")
PACK_PATTERN = rf"packs/(?P<save>{SAVE_PATTERN})/(?P<rank>[0-9]{{1,9}})-(?P<number>[0-9]{{1,9}})"
"""The name of a pack, as a regular expression."""

_PACK = re.compile(PACK_PATTERN + r"\Z")


def check_name(name: str) -> str:
    """Validate an object name, whoever it came from; `FormatError` names the offender.

    No empty, `.`, `..` or hidden component, so that a name can never leave the store or shadow another.
    """
    if not _NAME.match(name):
        raise FormatError(f"not a valid object name: {name[:200]!r}")
    return name


def is_name(name: str) -> bool:
    """Whether a store may have given it: in a listing any other is passed over."""
    return _NAME.match(name) is not None


def announcement(save: SaveName) -> str:
    return f"{SAVES}{save}"


def pin(pin_id: str) -> str:
    return f"{PINS}{pin_id}"


def pack(save: SaveName, rank: int, number: int) -> str:
    return f"{PACKS}{save}/{rank}-{number}"


def save_of_pack(name: str) -> SaveName:
    """The save that wrote the pack `name`; `FormatError` if that is no pack's name."""
    found = _PACK.match(name)
    if not found:
        raise FormatError(f"not the name of a pack: {name[:200]!r}")
    return SaveName.parse(found["save"])


def manifest(save: SaveName, rank: int) -> str:
    return f"{MANIFESTS}{save}/{rank}"


def part(save: SaveName, rank: int) -> str:
    return f"{PARTS}{save}/{rank}"


def snapshot(save: SaveName) -> str:
    return f"{SNAPSHOTS}{save}"


def marks(save: SaveName) -> str:
    """The prefix of every fact about `save`."""
    return f"{MARKS}{save}/"


def mark(save: SaveName, fact: str) -> str:
    return f"{MARKS}{save}/{fact}"


def tag(label: str) -> str:
    return f"{TAGS}{label}"


def epoch(branch: str, number: int) -> str:
    return f"{EPOCHS}{branch}/{number:010d}"


def floor(number: int) -> str:
    return f"{FLOORS}{number:010d}"


def proposed_floor(nonce: str) -> str:
    return f"{PROPOSED_FLOORS}{nonce}"


def reserve(number: int) -> str:
    return f"{RESERVE}{number}"


def term(number: int) -> str:
    return f"{TERMS}{number:010d}"


def term_ready(number: int) -> str:
    """Beside a term that made another storage the authority: that one holds all that it has to."""
    return f"{TERMS}{number:010d}+ready"


def term_mirrored(number: int) -> str:
    """Beside it, on a copy: nothing is there that the authority of the reign that this term began does not know."""
    return f"{TERMS}{number:010d}+mirrored"


def orphaned(save: SaveName) -> str:
    return f"{ORPHANED}{save}"


def evidence(name: str, nonce: str) -> str:
    return f"{EVIDENCE}{name}/{nonce}"


def encryption(number: int) -> str:
    return f"{ENCRYPTION}{number:010d}"


def encryption_copy(number: int) -> str:
    return f"{ENCRYPTION}{number:010d}-copy"


def is_foreign(name: str) -> bool:
    """Whether `name`, which stands at the top of a place, was put there by no store and by no system.

    Hidden names and `lost+found` come with filesystems, desktops and tools: they are in nobody's way.
    """
    tops = {house.partition("/")[0] for house in HOUSES}
    return name not in tops and not name.startswith(".") and name != "lost+found"


def owning_save(name: str) -> SaveName | None:
    """The save whose decision frees the temporaries of object `name`, if it belongs to one."""
    house, _, rest = name.partition("/")
    if house not in ("saves", "packs", "manifests", "parts", "snapshots"):
        return None
    try:
        return SaveName.parse(rest.partition("/")[0])
    except FormatError:
        return None
