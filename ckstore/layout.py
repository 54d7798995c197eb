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
TEMPORARIES = "tmp/"

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


def owning_save(name: str) -> SaveName | None:
    """The save whose decision frees the temporaries of object `name`, if it belongs to one."""
    house, _, rest = name.partition("/")
    if house not in ("saves", "packs", "manifests", "parts", "snapshots"):
        return None
    try:
        return SaveName.parse(rest.partition("/")[0])
    except FormatError:
        return None
