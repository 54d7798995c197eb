"""Random number generators as plain data, and back, without unpickling anything.

Kept: Python's `random`, NumPy's global generator, torch's CPU generator and that of every CUDA device; and, by name,
private ones: `random.Random`, `numpy.random.Generator` (with the sequence from which it spawns children),
`numpy.random.RandomState` and `torch.Generator`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
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
        else:
            found += _why_not(name, lambda name=name: _try(named[name], saved[name]))  # type: ignore[misc]
    here, there = np.random.get_state(legacy=False)["bit_generator"], state["numpy"]["bit_generator"]
    if here != there:
        found.append(f"NumPy's global generator is a {here} here and was a {there}")
    else:
        found += _why_not("NumPy's global generator", lambda: _try_numpy(state["numpy"]))
    found += _why_not("Python's global generator", lambda: random.Random().setstate(_python_tuple(state["python"])))
    found += _why_not("torch's global generator", lambda: _try_torch(state["torch"], is_cpu=True))
    for one in state["cuda"]:
        found += _why_not("a CUDA device's generator", lambda one=one: _try_torch(one, is_cpu=False))  # type: ignore[misc]
    return sorted(found)


def fitting(state: Plain, named: Mapping[str, NamedGenerator]) -> tuple[Plain, dict[str, NamedGenerator]] | None:
    """What of a state that differs can be restored, and into which of `named`; None if the global generators differ."""
    if differences({**state, "named": {}}, {}):
        return None
    alike = [
        name for name in named.keys() & state["named"].keys()
        if not differences({**state, "named": {name: state["named"][name]}}, {name: named[name]})
    ]  # fmt: skip
    return {**state, "named": {name: state["named"][name] for name in alike}}, {name: named[name] for name in alike}


def _why_not(name: str, attempt: Callable[[], object]) -> list[str]:
    """Why an attempt on a generator of no importance fails; a snapshot may hold anything."""
    try:
        attempt()
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        return [f"the state of {name} cannot be used ({type(error).__name__}: {error})"]
    return []


def _try(generator: NamedGenerator, saved: Plain) -> None:
    match generator:
        case random.Random():
            random.Random().setstate(_python_tuple(saved["state"]))
        case np.random.Generator() if type(generator.bit_generator).__module__.startswith("numpy."):
            _put_state(np.random.Generator(type(generator.bit_generator)()), saved)
        case np.random.Generator():  # how another library's is made is not known here
            pass
        case np.random.RandomState():
            _try_numpy(saved["state"])
        case _:
            _try_torch(saved["state"], is_cpu=generator.device.type == "cpu")


def _try_numpy(saved: Plain) -> None:
    bits = getattr(np.random, str(saved["bit_generator"]))
    if not issubclass(bits, np.random.BitGenerator):
        raise TypeError("it is of no bit generator of NumPy")
    np.random.RandomState(bits()).set_state(saved)


def _try_torch(saved: torch.Tensor, *, is_cpu: bool) -> None:
    if saved.dtype is not torch.uint8 or saved.dim() != 1:
        raise TypeError("it is no row of bytes")
    if is_cpu:
        torch.Generator().set_state(saved.cpu())


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
