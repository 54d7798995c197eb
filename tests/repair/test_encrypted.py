"""Damage on an encrypted storage whose other storage is plain: mended, with the stored bytes as evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.backend.encrypted import encrypted
from tests.repair.world import Objects, Whole, opened, pack_of, restored


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("42" * 32)
    path.chmod(0o600)
    return f"file:{path}"


def test_an_encrypted_storage_is_mended_from_a_plain_one(whole: Whole, there: Objects, key: str) -> None:
    raw = Objects("sealed")
    here = encrypted(raw, key, create=True)
    for name, data in whole.objects.items():
        here.put(name, data)
    pack = pack_of(whole, "step:5", "own")[0]
    before = raw.objects[pack]
    raw.flip(pack, len(before) // 2)
    damaged = raw.objects[pack]
    with opened(here, there) as store:
        assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
        assert here.get(pack, limit=1 << 30) == whole.objects[pack]
        (kept,) = (name for name in here.list("evidence/") if not name.endswith(".about"))
        assert kept.startswith(f"evidence/{pack}/")
        assert here.get(kept, limit=1 << 30) == damaged


def test_a_plain_storage_is_mended_from_an_encrypted_one(whole: Whole, here: Objects, key: str) -> None:
    raw = Objects("sealed")
    there = encrypted(raw, key, create=True)
    for name, data in whole.objects.items():
        there.put(name, data)
    pack = pack_of(whole, "step:5", "own")[0]
    here.flip(pack, 100)
    with opened(here, there) as store:
        assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert here.objects[pack] == whole.objects[pack]
