"""How much memory a save and a restore take beyond the state itself."""

from __future__ import annotations

import torch

from bench.harness import Claim, Result, Settings
from bench.pss import peak_beyond
from bench.states import change, incompressible_state, like, nbytes, real_state
from bench.subject import Subject
from ckstore import pack_writer

MIB = 1 << 20


def memory(settings: Settings) -> Result:
    """The greatest summed PSS of all processes during the call, less what was there before: imports do not count."""
    result = Result("memory", "Peak memory beyond the state (summed PSS); MiB")
    # What torch and the store load on their first use is there before anything is measured.
    warm = Subject(settings.folder, "balanced", name="warm-up")
    small = {"w": torch.randn(1 << 22)}
    warm.save(small)
    warm.store.restore(into=small)
    warm.store.close()
    states = {"fast": incompressible_state(settings.size), "compact": real_state(settings.size // 4)}
    for profile, state in states.items():
        subject = Subject(settings.folder, profile)
        target = like(state)
        for what, act in {
            "first save": lambda: subject.save(state),  # noqa: B023 - called at once
            "save of a changed state": lambda: subject.save(state),  # noqa: B023
            "restore into": lambda: subject.store.restore(into=target),  # noqa: B023
        }.items():
            change(state)
            name = f"{profile}, {what}"
            result.add(name, "MiB", [peak_beyond(act) / MIB])
            result.claims.append(Claim(f"MiB beyond the state, {name}", result.value(name) or 0.0, 256, at_least=False))
        result.add(f"{profile}, the state", "MiB", [nbytes(state) / MIB])
        subject.store.close()
    return result


SHRUNK = 1024
"""Chunks and packs so much smaller stand for real ones: a state of 1 GiB then has the metadata of one of 1 TiB."""


def terabyte(settings: Settings) -> Result:
    """The same for the metadata of a very large state, which is as many chunks of a small size."""
    chunks = settings.size // (4 * MIB)
    state = incompressible_state(settings.size // SHRUNK)
    tib = settings.size / 2**40
    about = f"Peak memory (summed PSS) beyond a state of {chunks:,} chunks, as one of {tib:g} TiB has; MiB"
    result = Result("terabyte", about)
    subject = Subject(settings.folder, "fast", chunk_size=4 * MIB // SHRUNK)
    pack_writer.PACK_SIZE //= SHRUNK
    subject.save({"w": torch.ones(4)})
    target = like(state)
    for what, act in {
        "first save": lambda: subject.save(state),
        "save of the same state": lambda: subject.save(state),
        "restore into": lambda: subject.store.restore(into=target),
    }.items():
        result.add(what, "MiB", [peak_beyond(act) / MIB])
        claim = Claim(f"MiB beyond the state, {what}", result.value(what) or 0.0, 256, at_least=False)
        result.claims.append(claim)
    subject.store.close()
    return result
