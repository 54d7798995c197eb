"""Random damage on two or three storages: what any of them has whole, frame by frame, is restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckstore import layout
from ckstore.errors import CkstoreError
from ckstore.history import read_marks
from ckstore.known import read_manifest
from ckstore.relocation import relocated_manifest
from tests.crash.world import fingerprint
from tests.repair.world import Objects, Whole, opened, quietly


def ranges_needed(whole: Whole, ref: str) -> dict[str, list[range]]:
    """What a restore of `ref` cannot do without: each range of an object, whole on at least one storage."""
    store = opened(Objects("looked into", whole.objects))
    commit, info = store._find(ref)
    save = store._save_name(info)
    found: dict[str, list[range]] = {}
    record = layout.snapshot(save)
    found[record] = [range(len(whole.objects[record]))]
    for entry in commit.manifests:
        name = layout.manifest(save, entry.rank)
        if name in whole.objects:
            found[name] = [range(len(whole.objects[name]))]
        manifest = read_manifest(store._context, save, entry)
        manifest = relocated_manifest(store._context, manifest, read_marks(store._context.backend).relocated)
        for place in manifest.locations:
            for frame in (place, *(base.place for base in place.chain())):
                found.setdefault(frame.pack, []).append(range(frame.offset, frame.offset + frame.stored))
    return found


def is_whole(whole: Whole, backends: list[Objects], name: str, needed: range) -> bool:
    """Whether some storage has these bytes as they were."""
    good = whole.objects[name][needed.start : needed.stop]
    return any(backend.objects.get(name, b"")[needed.start : needed.stop] == good for backend in backends)


@st.composite
def damages(draw: Callable[[Any], Any]) -> list[tuple[int, int, str, list[float]]]:
    """(storage, object, how, where): numbers are taken modulo what there is."""
    one = st.tuples(
        st.integers(0, 2),
        st.integers(0, 40),
        st.sampled_from(["flip", "flip", "flip", "cut", "delete"]),
        st.lists(st.floats(0, 0.999), min_size=1, max_size=4),
    )
    return draw(st.lists(one, min_size=1, max_size=14))


@given(damages(), st.sampled_from([2, 3]), st.sampled_from(["step:5", "step:4", "tag:moved"]))
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_one_storage_has_is_restored(
    whole: Whole, found: list[tuple[int, int, str, list[float]]], storages: int, ref: str
) -> None:
    needed = ranges_needed(whole, ref)
    names = sorted(name for name in whole.objects if name.startswith((layout.PACKS, layout.MANIFESTS, "snapshots/")))
    backends = [Objects(f"number{number}", whole.objects) for number in range(storages)]
    for storage, number, how, places in found:
        backend, name = backends[storage % storages], names[number % len(names)]
        data = backend.objects.get(name)
        if not data:
            continue
        if how == "flip":
            backend.flip(name, *{int(place * len(data)) for place in places})
        elif name.startswith(layout.SNAPSHOTS):
            continue  # a record that is not listed is not known to be missing
        elif how == "cut":
            backend.put(name, data[: int(places[0] * len(data))])
        else:
            backend.delete(name)
    expected = all(is_whole(whole, backends, name, part) for name, parts in needed.items() for part in parts)
    before = [dict(backend.objects) for backend in backends]
    store = opened(*backends)
    with quietly():
        try:
            value = fingerprint(store.restore(f"id:{opened(Objects('whole', whole.objects)).resolve(ref).id}"))
        except CkstoreError:
            value = None
    if value is not None:
        assert value == whole.values[ref]
    if expected:
        assert value is not None
    for backend, objects in zip(backends[1:], before[1:], strict=True):
        assert backend.objects == objects  # nobody touches the others
    # Nothing that was good here became worse.
    for name, parts in needed.items():
        for part in parts:
            if before[0].get(name, b"")[part.start : part.stop] == whole.objects[name][part.start : part.stop]:
                assert is_whole(whole, backends[:1], name, part)
