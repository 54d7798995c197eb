"""A full save of a state in one process, synchronous, durable on return."""

from __future__ import annotations

from bench import limits, peers
from bench.harness import Contender, Result, Settings, speeds
from bench.states import State, incompressible_state, nbytes, real_state
from bench.subject import Subject

DIRECT = ("O_DIRECT write, 2 threads", "O_DIRECT write, 4 threads")


def incompressible(settings: Settings) -> Result:
    """Random bytes, profile `fast`: the disk is all that counts."""
    result = Result("save", "Full save of random bytes, profile `fast`, fsynced; GB/s of state")
    state = incompressible_state(settings.size)
    _race(result, settings, state, ("fast",))
    result.claim_best("of the O_DIRECT limit", "ckstore, fast", DIRECT, 0.9)
    result.claim_best("times the best peer at its defaults", "ckstore, fast", peers.DEFAULTS, 1.5)
    result.claim_ratio("times tuned DCP", "ckstore, fast", peers.TUNED, 1.0)
    return result


def real(settings: Settings) -> Result:
    """Real fp32 weights, profile `balanced`: smaller, and no slower than the best peer."""
    result = Result("save-real", "Full save of real fp32 weights, profile `balanced`, fsynced; GB/s of state")
    state = real_state(settings.size)
    _race(result, settings, state, ("balanced", "compact"))
    result.claim_best("times the best peer at its defaults", "ckstore, balanced", peers.DEFAULTS, 1.0)
    result.claim_ratio("times tuned DCP", "ckstore, balanced", peers.TUNED, 1.0)
    return result


def _race(result: Result, settings: Settings, state: State, profiles: tuple[str, ...]) -> None:
    subjects = [Subject(settings.folder, profile) for profile in profiles]
    contenders: list[Contender] = [
        *limits.writing(settings.folder, state),
        *(subject.saver(state) for subject in subjects),
        *peers.savers(settings.folder, state),
    ]
    speeds(result, contenders, settings, nbytes(state))
    for subject in subjects:
        result.add(f"times smaller, {subject.profile}", "x", subject.ratios)
        subject.store.close()
