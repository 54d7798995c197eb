"""A whole store on an encrypted storage: saved, restored, pruned, verified, in the background too, and by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import ckstore
from ckstore import layout
from ckstore.backend.encrypted import encrypted, keyring
from ckstore.backend.encrypted.master import KeySource, make_key_file
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.cli.app import app
from ckstore.errors import CkstoreError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import records
from ckstore.store import Store, open_store
from ckstore.writer import messages

CHUNK = 4096
Open = Callable[..., Store]


@pytest.fixture
def open_here(tmp_path: Path, key: str) -> Iterator[Open]:
    """Opens the encrypted store of this test, and makes it; each opening is one of its own."""
    with ExitStack() as opened:

        def open_(where: Any = None, **options: Any) -> Store:
            options = {"create": True, "chunk_size": CHUNK, "encryption_key": key, **options}
            place = tmp_path / "store" if where is None else where
            return opened.enter_context(open_store(place, cache_dir=tmp_path / "cache", **options))

        yield open_


def state_of(step: int) -> dict[str, Any]:
    lots = np.random.default_rng(step)
    return {
        "model": {"frozen": np.arange(20_000, dtype="<f4"), "noise": lots.integers(0, 256, 50_000, dtype=np.uint8)},
        "weights": np.random.default_rng(0).standard_normal(5000).astype("<f4") * np.float32(1 + step * 1e-6),
        "step": step,
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    return bool(np.array_equal(found, expected))


@pytest.mark.parametrize("profile", ["fast", "balanced", "compact"])
def test_a_life_of_a_store(profile: str, open_here: Open) -> None:
    store = open_here(profile=profile)
    for step in range(6):
        store.save(state_of(step), step=step, tags=["first"] if step == 0 else ())
    again = open_here(create=False, profile=profile)
    for step in range(6):
        assert same(again.restore(step), state_of(step))
    into = state_of(3)
    into["weights"][:] = 0
    again.restore(5, into=into)
    assert same(into, state_of(5))
    assert again.verify().ok
    report = store.prune({"keep_last": 2})
    assert len(report.removed) == 3
    store.open_epoch()
    store.save(state_of(7), step=7)
    store.gc()
    assert [info.step for info in again.snapshots()] == [7, 5, 4, 0]
    for ref, step in (("latest", 7), ("tag:first", 0), (5, 5)):
        assert same(again.restore(ref), state_of(step))
    assert again.verify().ok


def test_what_a_store_holds_below_has_the_names_and_sizes_of_a_plain_one(open_here: Open, tmp_path: Path) -> None:
    """The wrapper changes neither names nor what the store records of sizes."""
    store = open_here()
    store.save(state_of(1), step=1)
    inner, outer = LocalBackend(tmp_path / "store"), store._context.backend
    names = [name for house in (layout.PACKS, layout.SNAPSHOTS, layout.RESERVE) for name in outer.list(house)]
    assert len(names) >= 18
    for name in ["config", *names]:
        size = outer.stat(name)
        assert inner.stat(name) == 80 + size + 32 * -(-size // 65536)
        assert len(outer.get(name, limit=1 << 26)) == size
    config = records.decode(outer.get("config", limit=4096), records.Config, "config")
    assert (config.ids, config.reader_features) == ("plain", [])


def test_a_store_over_a_backend_that_is_composed(key: str, open_here: Open) -> None:
    backend = BackendWrapper(encrypted(MemoryBackend(), key, create=True))
    store = open_here(backend, encryption_key=None)
    pending = store.save_async(state_of(1), step=1)
    pending.wait()
    assert same(store.restore(), state_of(1))
    assert store._context.index._ids_key is not None


def test_without_the_key_there_is_one_clear_error(open_here: Open, tmp_path: Path) -> None:
    open_here().save({"a": 1}, step=1)
    for create in (False, True):
        with pytest.raises(InvalidInputError, match=r"store at file://.* is encrypted: say where its key is with enc"):
            open_store(tmp_path / "store", create=create, cache_dir=tmp_path / "cache")
    (tmp_path / "store" / "config").unlink()  # or cut short while it was made: no plain store may come of it
    with pytest.raises(InvalidInputError, match="is encrypted"):
        open_store(tmp_path / "store", create=True, cache_dir=tmp_path / "cache")


def test_with_another_key_there_is_one_clear_error(open_here: Open, key: str, another_key: str) -> None:
    open_here().save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError) as caught:
        open_here(encryption_key=another_key)
    for source in (key, another_key):
        assert KeySource.parse(source).read().fingerprint in str(caught.value)


def test_a_key_for_a_plain_store_is_refused(open_here: Open, tmp_path: Path) -> None:
    """Else whoever can write could put a store of their own there."""
    open_here(encryption_key=None).save({"a": 1}, step=1)
    for create in (False, True):
        with pytest.raises(InvalidInputError, match="is not encrypted: open it without a key"):
            open_here(create=create)
    assert not (tmp_path / "store" / "encryption").exists()
    with pytest.raises(NotFoundError, match="no store at"):
        open_here(tmp_path / "nowhere", create=False)
    assert not (tmp_path / "nowhere").exists()


def test_rotated_while_it_is_open(tmp_path: Path, open_here: Open) -> None:
    path = tmp_path / "rotating.key"
    old = make_key_file(str(path))
    store = open_here(encryption_key=f"file:{path}")
    store.save(state_of(1), step=1)
    path.unlink()
    new = make_key_file(str(path))
    keyring.rotate(LocalBackend(tmp_path / "store"), old, new, new_data_key=True)
    store.save(state_of(2), step=2)
    later = open_here(encryption_key=f"file:{path}")
    later.save(state_of(3), step=3)
    assert [info.step for info in store.snapshots()] == [3, 2, 1]
    for step in (1, 2, 3):
        assert same(store.restore(step), state_of(step))
        assert same(later.restore(step), state_of(step))


# the process that writes


def test_saves_in_the_background(open_here: Open, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is told where the key is, and gets it from there."""
    sent: list[bytes] = []
    send = messages.Channel.send

    def watched(channel: Any, message: Any, *rest: Any) -> Any:
        sent.append(repr(message).encode())
        return send(channel, message, *rest)

    monkeypatch.setattr(messages.Channel, "send", watched)
    monkeypatch.setenv("THE_KEY", Path(key.removeprefix("file:")).read_text())
    for number, source in enumerate([key, "env:THE_KEY", f"command:cat {key.removeprefix('file:')}"]):
        store = open_here(tmp_path / f"store-{number}", encryption_key=source)
        pending = [store.save_async(state_of(step), step=step, keep={"keep_last": 2}) for step in range(3)]
        for one in pending:
            one.wait()
        store.close()
        reader = open_here(tmp_path / f"store-{number}", create=False)
        assert same(reader.restore(), state_of(2))
        assert [info.step for info in reader.snapshots()] == [2, 1]
        assert reader.verify().ok
    secret = KeySource.parse(key).read().reveal().hex().encode()
    assert len([text for text in sent if text.startswith(b"Open(")]) == 3
    assert not any(secret in text for text in sent)


def test_a_key_that_the_writer_cannot_read_is_the_error_of_the_save(open_here: Open, key: str) -> None:
    store = open_here()
    os.chmod(key.removeprefix("file:"), 0o644)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        store.save_async(state_of(1), step=1).wait()
    os.chmod(key.removeprefix("file:"), 0o600)
    store.save_async(state_of(2), step=2).wait()
    assert same(store.restore(), state_of(2))


# the command line


class Shell:
    def __init__(self, folder: Path) -> None:
        self.store, self.folder = folder / "gpt", folder

    def run(self, *words: object, env: dict[str, str | None] | None = None) -> Result:
        clean = {
            "CKSTORE_CACHE": str(self.folder / "cache"),
            "CKSTORE_STORE": None,
            "CKSTORE_KEY": None,
            "COLUMNS": "200",
        }
        return CliRunner().invoke(app, [str(word) for word in words], env={**clean, **(env or {})})

    def json(self, *words: object, code: int = 0, **env: str) -> Any:
        found = self.run(*words, "--json", env=dict(env))
        assert (found.exit_code, found.stderr) == (code, "")
        return json.loads(found.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_key_and_a_store_made_by_command(shell: Shell) -> None:
    path = shell.folder / "made.key"
    made = shell.json("key", "make", path)
    assert made == {"file": str(path), "fingerprint": KeySource.parse(f"file:{path}").read().fingerprint}
    assert shell.json("init", shell.store, "--key", f"file:{path}")["created"] is True
    assert shell.json("ls", shell.store, "--key", f"file:{path}")["snapshots"] == []
    assert shell.json("ls", shell.store, CKSTORE_KEY=f"file:{path}")["snapshots"] == []
    refused = shell.run("ls", shell.store)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--key or CKSTORE_KEY" in refused.stderr
    empty = shell.run("ls", shell.store, "--key", "", env={"CKSTORE_KEY": f"file:{path}"})
    assert (empty.exit_code, empty.stderr) == (2, refused.stderr)
    assert shell.run("key", "make", path).exit_code == 2


def test_keys_checked_and_rotated_by_command(shell: Shell, key: str, another_key: str) -> None:
    with open_store(shell.store, create=True, cache_dir=shell.folder / "cache", encryption_key=key) as store:
        store.save(state_of(1), step=1)
    first = shell.json("key", "check", shell.store, "--key", key)
    assert (first["record"], first["segment"], first["faults"], len(first["data_keys"])) == (1, 65536, [], 1)
    rotated = shell.json("key", "rotate", shell.store, "--key", key, "--new", another_key, "--data")
    assert rotated["data_keys"][0]["id"] == first["data_keys"][0]["id"]
    assert (rotated["record"], len(rotated["data_keys"])) == (2, 2)
    assert rotated["master"] == KeySource.parse(another_key).read().fingerprint != first["master"]
    refused = shell.run("ls", shell.store, "--key", key)
    assert refused.exit_code == 2
    assert first["master"] in refused.stderr
    assert rotated["master"] in refused.stderr
    os.unlink(key.removeprefix("file:"))
    assert [one["step"] for one in shell.json("ls", shell.store, "--key", another_key)["snapshots"]] == [1]
    (shell.store / layout.encryption_copy(2)).unlink()
    hurt = shell.json("key", "check", shell.store, "--key", another_key, code=1)
    assert [layout.encryption_copy(2) in fault for fault in hurt["faults"]] == [True]
    shown = shell.run("key", "check", shell.store, "--key", another_key)
    assert (shown.exit_code, "fault" in shown.stdout) == (1, True)
    assert shell.run("key", "rotate", shell.store, "--key", another_key).exit_code == 0
    assert shell.json("key", "check", shell.store, "--key", another_key)["faults"] == []


def test_damage_found_by_command_without_a_key(shell: Shell, key: str) -> None:
    options = {"cache_dir": shell.folder / "cache", "encryption_key": key}
    with open_store(shell.store, True, "fast", **options) as store:  # type: ignore[arg-type]
        store.save(state_of(1), step=1)
        (pack,) = store._context.backend.list(layout.PACKS)
    whole = shell.json("key", "scrub", shell.store)
    assert (whole["findings"], whole["faults"], whole["objects"] > 18) == ([], [], True)
    damaged = bytearray((shell.store / pack).read_bytes())
    damaged[100_000] ^= 1
    (shell.store / pack).write_bytes(damaged)
    (finding,) = shell.json("key", "scrub", shell.store, code=1)["findings"]
    assert (finding["name"], finding["offset"]) == (pack, 80 + 65568)
    shown = shell.run("key", "scrub", shell.store)
    assert (shown.exit_code, f"damaged: {pack} at stored byte 65648" in shown.stdout) == (1, True)
    assert shell.run("verify", shell.store, "--key", key).exit_code == 1


@pytest.mark.parametrize("words", [("check",), ("rotate",), ("scrub",)])
def test_keys_of_what_is_not_encrypted(words: tuple[str, ...], shell: Shell, key: str) -> None:
    given = [] if words == ("scrub",) else ["--key", key]
    assert shell.run("key", *words, shell.store, *given).exit_code == 3
    assert shell.run("init", shell.store).exit_code == 0
    refused = shell.run("key", *words, shell.store, *given)
    assert (refused.exit_code, "is not encrypted" in refused.stderr) == (2, True)
    if given:
        assert "CKSTORE_KEY" in shell.run("key", *words, shell.store).stderr


def test_the_group_shows_its_commands(shell: Shell) -> None:
    found = shell.run("key")
    assert (found.exit_code, found.stderr) == (0, "")
    for name in ("make", "check", "rotate", "scrub"):
        shown = shell.run("key", name, "-h")
        assert f"$ ckstore key {name}" in shown.stdout
        assert "--json" in shown.stdout
        assert f"  {name} " in found.stdout


def test_a_key_given_in_place_of_its_source_is_not_repeated(shell: Shell, key: str) -> None:
    secret = KeySource.parse(key).read().reveal().hex()
    for words in (
        ("init", shell.store, "--key", secret),
        ("key", "rotate", shell.store, "--key", key, "--new", secret),
    ):
        found = shell.run(*words)
        assert found.exit_code == 2
        assert secret not in found.output
        assert "never the key itself" in found.stderr


# the library


def test_where_the_library_is_missing_one_error_says_what_to_install(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'ckstore\[encryption\]'"):
        open_store(tmp_path / "store", create=True, encryption_key=key)
    assert not (tmp_path / "store").exists()


def test_a_library_that_is_too_old_is_told_likewise(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", object)
    with pytest.raises(InvalidInputError, match="cryptography, 47 or later"):
        encrypted(MemoryBackend(), key, create=True)


def test_a_plain_store_loads_no_library(tmp_path: Path) -> None:
    script = f"""
import sys, ckstore
ckstore.save({str(tmp_path / "store")!r}, {{"a": 1}}, step=1)
assert ckstore.restore({str(tmp_path / "store")!r}) == {{"a": 1}}
assert not any(name.startswith("cryptography") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_records_of_a_store_are_those_of_its_own(open_here: Open, tmp_path: Path) -> None:
    """An encrypted object put where a store wants another: errors, never another store's values."""
    one, other = open_here(), open_here(tmp_path / "other")
    one.save(state_of(1), step=1)
    other.save(state_of(2), step=2)
    (tmp_path / "store" / "config").write_bytes((tmp_path / "other" / "config").read_bytes())
    with pytest.raises(FormatError, match="config was encrypted under the data key"):
        open_here()
    assert issubclass(FormatError, CkstoreError)
    assert ckstore.FormatError is FormatError
