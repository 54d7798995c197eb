"""Random number generators as plain data, and back, without unpickling anything.

Kept: Python's `random`, NumPy's global generator, torch's CPU generator and that of every CUDA device; and, by name,
private ones: `random.Random`, `numpy.random.Generator` (with the sequence from which it spawns children),
`numpy.random.RandomState` and `torch.Generator`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from ckstore.errors import InvalidInputError

Plain: TypeAlias = dict[str, Any]
NamedGenerator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

_log = logging.getLogger(__name__)


def capture_rng(named: Mapping[str, NamedGenerator] | None = None) -> Plain:
    """The state of every global generator, and of the `named` ones, as plain data. Draws nothing."""
    return {
        "python": _python_state(random.getstate()),
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_is_used() else [],
        "named": {name: _state_of(generator) for name, generator in (named or {}).items()},
    }


def restore_rng(state: Plain, named: Mapping[str, NamedGenerator] | None = None) -> None:
    """Put every generator where it was. `InvalidInputError`, and nothing changed, if `named` are not those saved."""
    named = named or {}
    found = differences(state, named)
    if found:
        raise InvalidInputError("the random number generators differ from those saved: " + "; ".join(found))
    random.setstate(_python_tuple(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    _restore_cuda(state["cuda"])
    for name, generator in named.items():
        _put_state(generator, state["named"][name])


def differences(state: Plain, named: Mapping[str, NamedGenerator]) -> list[str]:
    """Why `state` cannot be restored into the global generators and `named`; empty if it can."""
    saved: Plain = state["named"]
    found = [f"{name} was not saved" for name in named if name not in saved]
    found += [f"{name} was saved and is not here" for name in saved if name not in named]
    for name in named.keys() & saved.keys():
        here, there = _kind_of(named[name]), saved[name]["kind"]
        if here != there:
            found.append(f"{name} is a {here} here and was a {there}")
    here, there = np.random.get_state(legacy=False)["bit_generator"], state["numpy"]["bit_generator"]
    if here != there:
        found.append(f"NumPy's global generator is a {here} here and was a {there}")
    return sorted(found)


def _cuda_is_used() -> bool:
    # Without this a save would create a CUDA context in a process that never touches its cards.
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _restore_cuda(states: list[torch.Tensor]) -> None:
    here = torch.cuda.device_count() if states and torch.cuda.is_available() else 0
    if len(states) != here:
        _log.warning("the snapshot holds the generators of %d CUDA devices and %d are here", len(states), here)
    for device, state in enumerate(states[:here]):
        torch.cuda.set_rng_state(state.cpu(), device)


def _kind_of(generator: NamedGenerator) -> str:
    match generator:
        case random.SystemRandom():
            raise InvalidInputError("random.SystemRandom has no state that could be saved")
        case random.Random():
            return "random.Random"
        case np.random.Generator():
            return f"numpy.random.Generator({type(generator.bit_generator).__name__})"
        case np.random.RandomState():
            return f"numpy.random.RandomState({generator.get_state(legacy=False)['bit_generator']})"
        case _:
            return f"torch.Generator({generator.device.type})"


def _state_of(generator: NamedGenerator) -> Plain:
    kind = _kind_of(generator)
    match generator:
        case random.Random():
            return {"kind": kind, "state": _python_state(generator.getstate())}
        case np.random.Generator():
            bits = generator.bit_generator
            return {"kind": kind, "state": dict(bits.state), "seed": _seed_of(bits.seed_seq)}
        case np.random.RandomState():
            return {"kind": kind, "state": dict(generator.get_state(legacy=False))}
        case _:
            return {"kind": kind, "state": generator.get_state()}


def _put_state(generator: NamedGenerator, saved: Plain) -> None:
    match generator:
        case random.Random():
            generator.setstate(_python_tuple(saved["state"]))
        case np.random.Generator():
            if saved["seed"] is None:
                generator.bit_generator.state = saved["state"]
            else:  # the only way to set the sequence of a living bit generator; this is no unpickling
                sequence = np.random.SeedSequence(**saved["seed"])
                generator.bit_generator.__setstate__((saved["state"], sequence))  # type: ignore[attr-defined]
        case np.random.RandomState():
            generator.set_state(saved["state"])
        case _:
            generator.set_state(saved["state"].cpu())


def _seed_of(sequence: object) -> Plain | None:
    if not isinstance(sequence, np.random.SeedSequence):
        return None
    state: Plain = dict(sequence.state)
    entropy = state["entropy"]
    # Words come as int, None, or a sequence of them; NumPy accepts a list in place of any sequence.
    state["entropy"] = entropy if isinstance(entropy, int | None) else [int(word) for word in entropy]
    state["spawn_key"] = [int(word) for word in state["spawn_key"]]
    return state


def _python_state(state: tuple[Any, ...]) -> Plain:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_tuple(state: Plain) -> tuple[Any, ...]:
    return state["version"], tuple(int(word) for word in state["words"]), state["gauss"]
