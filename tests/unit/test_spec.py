"""The worked example of SPEC.md is what the code writes, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ckstore.format import manifest, records
from ckstore.format import pack as packs
from ckstore.format.manifest import Location
from ckstore.ids import SaveName, digest
from ckstore.state.build import build
from ckstore.state.capture import capture
from ckstore.state.tree import decode

SPEC = (Path(__file__).parents[2] / "SPEC.md").read_text()
SAVE = SaveName(1, "00000000000000ab")
PACK = f"packs/{SAVE}/0-0"
STATE = {"step": 7, "w": np.array([1, -2], "<f4")}


def example(name: str) -> bytes:
    (block,) = re.findall(rf"```hex {name}\n(.*?)```", SPEC, flags=re.DOTALL)
    return bytes.fromhex("".join(block.split()))


def encoded() -> dict[str, bytes]:
    captured = capture(STATE, chunk_size=4096)
    (blob,) = captured.blobs
    plain = bytes(blob.load())
    chunk = digest(plain)
    content = manifest.encode_content(captured.tree, [len(plain)], 4096, [chunk])
    place = Location(PACK, 64, 8, 0, 0)
    footer = packs.encode_footer(PACK, [packs.Frame(chunk, 64, 8, 8, 0, 0, packs.check_of(plain))])
    written = manifest.encode(SAVE, 0, content, captured.order, [place])
    commit = records.Commit(
        save=str(SAVE),
        branch="main",
        epoch=0,
        step=7,
        created=0.0,
        manifests=[records.ManifestRef(0, len(written), digest(written), written)],
        packs=[records.PackRef(PACK, 4096)],
        content=digest(content),
        logical_bytes=len(plain),
        stored_bytes=4096 + len(written),
    )
    return {
        "tree": captured.tree,
        "plain": plain,
        "id": chunk,
        "content": content,
        "content-id": digest(content),
        "pack-start": packs.HEADER + plain,
        "footer": footer,
        "trailer": packs.encode_end(footer, 72)[-64:],
        "manifest": written,
        "commit": records.encode(commit),
        "config": records.encode(records.Config(store="0123456789abcdef0123456789abcdef", chunk_size=4096)),
        "tag": records.encode(records.Tag(str(SAVE), 0.0)),
    }


@pytest.mark.parametrize("name", list(encoded()))
def test_the_code_writes_what_the_specification_shows(name: str) -> None:
    assert encoded()[name] == example(name)


def test_every_example_of_the_specification_is_checked() -> None:
    elsewhere = {"key-record", "encrypted-object"}  # tests/encryption
    assert set(re.findall(r"```hex (\S+)", SPEC)) == set(encoded()) | elsewhere


def test_what_the_specification_shows_reads_back() -> None:
    found = manifest.decode(example("manifest"), SAVE, 0, "example")
    tree = decode(found.tree, found.blob_sizes)
    state = build(tree, found.order, {0: memoryview(bytearray(example("plain")))})
    assert isinstance(state, dict)
    assert state["step"] == STATE["step"]
    assert np.array_equal(state["w"], STATE["w"])
    assert found.content == example("content-id")


def test_the_records_of_the_specification_open_its_snapshot() -> None:
    commit = records.decode_decision(example("commit"), SAVE, "example")
    assert isinstance(commit, records.Commit)
    assert commit.manifests[0].inline == example("manifest")
    assert commit.manifests[0].hash == digest(example("manifest"))
    assert commit.content == example("content-id")
    config = records.decode(example("config"), records.Config, "config")
    assert (config.format, config.chunk_size, config.reader_features, config.writer_features) == (1, 4096, [], [])
