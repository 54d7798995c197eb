"""Names of objects: spelled in one place, safe in every backend."""

from __future__ import annotations

import pytest

from ckstore import layout
from ckstore.errors import FormatError
from ckstore.ids import SaveName

SAVE = SaveName(7, "0123456789abcdef")

SPELLED = {
    layout.announcement(SAVE): "saves/fffffffffffffff8-0123456789abcdef",
    layout.pin("p1"): "pins/p1",
    layout.pack(SAVE, 3, 12): "packs/fffffffffffffff8-0123456789abcdef/3-12",
    layout.manifest(SAVE, 3): "manifests/fffffffffffffff8-0123456789abcdef/3",
    layout.snapshot(SAVE): "snapshots/fffffffffffffff8-0123456789abcdef",
    layout.mark(SAVE, "condemned"): "marks/fffffffffffffff8-0123456789abcdef/condemned",
    layout.tag("best+1"): "tags/best+1",
    layout.epoch("main", 5): "epochs/main/0000000005",
    layout.CONFIG: "config",
    layout.floor(5): "gc/floor/0000000005",
    layout.proposed_floor("0123456789abcdef"): "gc/proposed/0123456789abcdef",
    layout.reserve(3): "reserve/3",
}


@pytest.mark.parametrize(("found", "expected"), SPELLED.items())
def test_every_name_is_spelled_so_and_is_valid(found: str, expected: str) -> None:
    assert found == expected
    assert layout.check_name(found) == found


def test_a_mark_is_below_the_prefix_of_its_save() -> None:
    assert layout.mark(SAVE, "removed").startswith(layout.marks(SAVE))
    assert layout.marks(SAVE).endswith("/")


@pytest.mark.parametrize(
    "name",
    ["", "/", "/a", "a/", "a//b", ".", "..", "../x", "a/..", "a/../b", "./a", ".a", "a/.b", "a\0b", "a b", "a\n", "é",
     "a\\b", "C:a", "~a", "a*", "%2e", "a" * 201, "a/" * 6 + "a"],
)  # fmt: skip
def test_a_name_that_could_leave_the_store_or_hide_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        layout.check_name(name)


@pytest.mark.parametrize("name", ["a", "a.b", "A-_+=9", "-a", "a/b/c/d/e/f", "a" * 200])
def test_a_plain_name_is_accepted(name: str) -> None:
    assert layout.check_name(name) == name


def test_newer_saves_sort_first() -> None:
    names = [layout.snapshot(SaveName(sequence, "0" * 16)) for sequence in (1, 2, 10, 100, 2**63)]
    assert sorted(names) == names[::-1]


def test_a_pack_knows_its_save() -> None:
    assert layout.save_of_pack(layout.pack(SAVE, 0, 0)) == SAVE


@pytest.mark.parametrize(
    "name",
    ["packs/x/0-0", f"packs/{SAVE}/0", f"packs/{SAVE}/0-0/1", f"packs/{SAVE}/-1-0", f"manifests/{SAVE}/0-0",
     f"packs/{SAVE}/0-0\n", f"packs/{str(SAVE).upper()}/0-0", f"packs/{SAVE}/1234567890-0",
     "packs/0000000000000000-0123456789abcdef/0-0", "packs/ffffffffffffffff-0123456789abcdef/0-0"],
)  # fmt: skip
def test_what_is_no_pack_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        layout.save_of_pack(name)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        (layout.announcement(SAVE), SAVE),
        (layout.pack(SAVE, 0, 0), SAVE),
        (layout.manifest(SAVE, 0), SAVE),
        (layout.snapshot(SAVE), SAVE),
        (layout.mark(SAVE, "condemned"), None),
        (layout.pin("p"), None),
        (layout.tag("best"), None),
        ("config", None),
        ("packs", None),
        ("packs/stranger/0-0", None),
    ],
)
def test_temporaries_belong_to_the_save_that_writes(name: str, owner: SaveName | None) -> None:
    assert layout.owning_save(name) == owner
