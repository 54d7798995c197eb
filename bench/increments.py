"""Saves of what has hardly changed: nothing at all, and one chunk in a hundred."""

from __future__ import annotations

from bench import peers
from bench.harness import Claim, Contender, Result, Settings, alternate
from bench.states import State, incompressible_state
from bench.subject import Subject

CHUNK = 4 << 20


def increments(settings: Settings) -> Result:
    """A parent is there; peers write everything again."""
    result = Result("increments", "A save of an unchanged state, and of one with 1 % of its chunks changed; seconds")
    state = incompressible_state(settings.size)
    shares: dict[str, list[float]] = {"unchanged": [], "1 % changed": []}
    contenders: list[Contender] = []
    subjects = [Subject(settings.folder, profile) for profile in ("fast", "balanced")]
    for subject in subjects:
        subject.save(state)
        contenders += _ours(subject, state, shares)
    contenders += peers.savers(settings.folder, state)
    for name, times in alternate(result, contenders, settings.rounds).items():
        result.add(name, "s", times)
    for what, share in shares.items():
        result.add(f"bytes, {what}", "% of full", share)
    best = min(
        (peer for peer in peers.SAVES if result.value(peer)), key=lambda peer: result.value(peer) or 0, default=""
    )
    result.claim_ratio(f"times faster than the best peer ({best}), unchanged", best, "fast, unchanged", 5.0)
    result.claims += [_most(result, "bytes, unchanged", 0.1), _most(result, "bytes, 1 % changed", 1.1)]
    for subject in subjects:
        subject.store.close()
    return result


def _most(result: Result, name: str, percent: float) -> Claim:
    return Claim(f"% of full, {name}", result.value(name) or 0.0, percent, at_least=False)


def _ours(subject: Subject, state: State, shares: dict[str, list[float]]) -> list[Contender]:
    def save(what: str) -> None:
        info = subject.save(state)
        shares[what].append(100 * info.stored_bytes / info.logical_bytes)

    return [
        Contender(f"{subject.profile}, unchanged", lambda: save("unchanged"), before=lambda: subject.save(state),
                  after=subject.keep_one),
        Contender(f"{subject.profile}, 1 % changed", lambda: save("1 % changed"),
                  before=lambda: _before(subject, state), after=subject.keep_one),
    ]  # fmt: skip


def _before(subject: Subject, state: State) -> None:
    """Everything is saved but what changes now: an element in one chunk of a hundred, spread over the state."""
    subject.save(state)
    tensors = list(state.values())
    chunks = [(tensor, at) for tensor in tensors for at in range(0, tensor.nbytes, CHUNK)]
    wanted = max(1, len(chunks) // 100)
    for tensor, at in chunks[:: len(chunks) // wanted][:wanted]:
        tensor.view(-1)[at // tensor.element_size()] += 1
