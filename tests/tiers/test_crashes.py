"""A process that dies before any call of an eviction or a pull, and what the next one makes of what it left."""

from __future__ import annotations

import pytest

from ckstore import gc, layout
from tests.stateful.interleave import Actor, Deviating
from tests.stateful.world import single_threaded
from tests.tiers.test_interleaved import one, one_evicted, one_freed
from tests.tiers.world import COLD, HOT, Act, Base, Objects, TierWorld, base_objects, marks_of

pytestmark = pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")


def left_by(base: Base, act: str, where: str, call: int) -> tuple[Objects, bool]:
    """Both storages after an actor died before its `call`-th call; whether it did."""
    world = TierWorld(base_objects(base), Deviating(()))
    actor = world.add("dies", getattr(world, act)(1, where=where))
    actor.crash_at = call
    assert world.run(last_gc=False) == []
    for name in [name for name in world.raw._objects if "/freeing-" in name]:
        del world.raw._objects[name]  # it is certainly gone, which no actor of this process is
    return Objects(dict(world.raw._objects), dict(world.cold_raw._objects)), actor.crashed


def swept(world: TierWorld) -> Act:
    def act(actor: Actor) -> None:
        gc.give_up(world.context(actor), 0.0)
        gc.sweep(world.context(actor))

    return act


@pytest.mark.parametrize("then", ["evict", "pull", "save"])
@pytest.mark.parametrize(
    ("base", "act"), [(one, "evict"), (one_evicted, "pull"), (one_freed, "pull")], ids=["evict", "pull", "pull all"]
)
def test_whoever_dies_leaves_what_the_next_one_goes_on_from(base: Base, act: str, then: str) -> None:
    base_objects(base)
    call, crashed = 0, True
    with single_threaded():
        while crashed:
            call += 1
            objects, crashed = left_by(base, act, HOT, call)
            world = TierWorld(objects, Deviating(()), salt=1)
            acts = {"evict": [world.evict(1)], "pull": [world.pull(1)], "save": [world.save(2), world.sweep()]}[then]
            world.add("next", swept(world), *acts)
            assert world.run() == [], f"after it died before call {call}"
            marks = marks_of(world.raw)
            if then == "evict":
                assert marks.evicted and world.raw.list(layout.PACKS) == []
            if then == "pull":
                assert not marks.leaving and world.raw.list(layout.PACKS) == world.cold_raw.list(layout.PACKS)
    assert call > 15


def test_whoever_dies_on_the_copy_leaves_what_the_next_one_goes_on_from() -> None:
    def verified(world: TierWorld) -> list[Act]:
        return [*one(world), world.verify_on(1, HOT)]

    base_objects(verified)
    call, crashed = 0, True
    with single_threaded():
        while crashed:
            call += 1
            objects, crashed = left_by(verified, "evict", COLD, call)
            world = TierWorld(objects, Deviating(()), salt=1)
            world.add("next", world.pull(1, where=COLD), world.evict(1, where=COLD))
            assert world.run() == [], f"after it died before call {call}"
            assert marks_of(world.cold_raw).evicted and world.cold_raw.list(layout.PACKS) == []
    assert call > 15
