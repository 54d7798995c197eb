"""Makes a large store that nobody trained: `python -m bench.scale_store FOLDER CHUNKS SNAPSHOTS`.

Records, names and the index are real; packs are sparse files of the right length, and manifests are left out, as
nothing that `scale` measures reads either.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ckstore
from ckstore import layout
from ckstore.format import records
from ckstore.format.manifest import Location
from ckstore.ids import SaveName
from ckstore.index import ChunkIndex

CHUNK = 4 << 20
CHUNKS_IN_PACK = 64
PACK_BYTES = CHUNKS_IN_PACK * CHUNK + 8192


def make(folder: Path, chunks: int, snapshots: int) -> None:
    """`chunks` spread over `snapshots`, each of which needs its own packs and those of the one before."""
    with ckstore.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        index = ChunkIndex.open(folder / "cache" / store.id)
    before: list[records.PackRef] = []
    for number in range(1, snapshots + 1):
        save = SaveName(number, f"{number:016x}")
        count = chunks * number // snapshots - chunks * (number - 1) // snapshots
        ids = [os.urandom(32) for _ in range(count)]
        packs = [layout.pack(save, 0, n) for n in range(-(-count // CHUNKS_IN_PACK))]
        places = [
            Location(packs[i // CHUNKS_IN_PACK], 4096 + i % CHUNKS_IN_PACK * CHUNK, CHUNK, 0, 0) for i in range(count)
        ]
        own = [records.PackRef(name, PACK_BYTES) for name in packs]
        for name in packs:
            path = folder / "store" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, PACK_BYTES)
        record = records.Commit(
            save=str(save), branch="main", epoch=0, step=number, created=0.0,
            manifests=[records.ManifestRef(0, 1 << 20, os.urandom(32))],
            packs=sorted([*before, *own], key=lambda pack: pack.name),
            content=os.urandom(32), logical_bytes=count * CHUNK, stored_bytes=count * CHUNK,
        )  # fmt: skip
        path = folder / "store" / layout.snapshot(save)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(records.encode(record))
        index.add(save, ids, places)
        with (folder / "some-ids").open("ab") as out:
            out.write(b"".join(ids[:: max(1, count // 10)]))
        before = own
    index.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
