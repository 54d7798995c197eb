"""Random number generators come back exactly, as plain data (report: NumPy state not loadable without pickle)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore_torch import capture_rng, restore_rng


def global_draws(count: int = 100) -> list[Any]:
    """The next draws of every global generator, of kinds that keep a half-used state between draws."""
    return [
        [random.random() for _ in range(count)],
        [random.gauss(0, 1) for _ in range(count | 1)],
        np.random.random(count).tolist(),
        np.random.standard_normal(count | 1).tolist(),
        torch.rand(count).tolist(),
        torch.randn(count).tolist(),
        torch.randn(3).tolist(),
    ]


def through_a_store(folder: Path, state: dict[str, Any]) -> Any:
    """`state` as it comes back from a store, opened anew."""
    ckstore.save(folder / "store", state, step=1)
    return ckstore.restore(folder / "store")


def test_the_global_generators_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    global_draws(7)  # leaves each generator in the middle of its buffers
    state = through_a_store(tmp_path, capture_rng())
    expected = global_draws()
    global_draws(13)
    restore_rng(state)
    assert global_draws() == expected


def test_capturing_draws_nothing() -> None:
    capture_rng()
    before = capture_rng()
    after = capture_rng()
    assert [before["python"]["words"].tolist(), before["torch"].tolist(), before["numpy"]["state"]["pos"]] == [
        after["python"]["words"].tolist(), after["torch"].tolist(), after["numpy"]["state"]["pos"],
    ]  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PRIVATE: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda g: [g.gauss(0, 1) for _ in range(101)]),
    "torch.Generator": (seeded, lambda g: torch.randn(101, generator=g).tolist()),
    "RandomState": (np.random.RandomState, lambda g: g.standard_normal(101).tolist()),
    "RandomState on PCG64": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), lambda g: g.rand(101).tolist()),
    **{
        kind.__name__: (
            lambda seed, kind=kind: np.random.Generator(kind(seed)),  # type: ignore[misc]
            lambda g: [g.integers(0, 2**32, 101, dtype=np.uint32).tolist(), g.random(101).tolist()],
        )
        for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_a_private_generator_comes_back_into_a_fresh_one(tmp_path: Path, kind: str) -> None:
    make, draw = PRIVATE[kind]
    generator = make(5)
    draw(generator)
    state = through_a_store(tmp_path, capture_rng({"mine": generator}))
    expected = draw(generator)
    fresh = make(6)
    restore_rng(state, {"mine": fresh})
    assert draw(fresh) == expected


@pytest.mark.parametrize("seed", [None, 3, 2**100, [1, 2, 3]])
def test_a_numpy_generator_goes_on_spawning_the_same_children(tmp_path: Path, seed: Any) -> None:
    generator = np.random.default_rng(seed)
    generator.spawn(2)
    state = through_a_store(tmp_path, capture_rng({"mine": generator.spawn(1)[0]}))
    saved = through_a_store(tmp_path, capture_rng({"mine": generator}))
    expected = [child.random(3).tolist() for child in generator.spawn(2)]
    fresh = np.random.default_rng()
    restore_rng(saved, {"mine": fresh})
    assert [child.random(3).tolist() for child in fresh.spawn(2)] == expected
    assert state["named"]["mine"]["seed"]["spawn_key"] == [2]


def test_generators_of_other_names_or_kinds_are_refused_before_anything_changes() -> None:
    state = capture_rng({"a": random.Random(1), "b": torch.Generator()})
    random.random()
    expected = random.getstate()
    with pytest.raises(ckstore.InvalidInputError) as raised:
        restore_rng(state, {"b": np.random.default_rng(), "c": random.Random()})
    assert str(raised.value) == (
        "the random number generators differ from those saved: a was saved and is not here; "
        "b is a numpy.random.Generator(PCG64) here and was a torch.Generator(cpu); c was not saved"
    )
    assert random.getstate() == expected


def test_a_generator_without_state_is_refused_at_save() -> None:
    with pytest.raises(ckstore.InvalidInputError, match="SystemRandom has no state"):
        capture_rng({"system": random.SystemRandom()})


@pytest.mark.gpu
def test_cuda_generators_come_back(tmp_path: Path) -> None:
    private = torch.Generator("cuda").manual_seed(3)
    torch.rand(3, device="cuda")
    state = through_a_store(tmp_path, capture_rng({"mine": private}))
    expected = [torch.rand(100, device="cuda").tolist(), torch.rand(9, device="cuda", generator=private).tolist()]
    fresh = torch.Generator("cuda").manual_seed(4)
    restore_rng(state, {"mine": fresh})
    found = [torch.rand(100, device="cuda").tolist(), torch.rand(9, device="cuda", generator=fresh).tolist()]
    assert found == expected
