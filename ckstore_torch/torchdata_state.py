"""The state of torchdata's StatefulDataLoader, rewritten for a loader with another number of workers.

torchdata takes a state only with the number of workers that it was saved with. Over a map-style dataset without state
of its own the workers are alike, and the position is all in the main process: the sampler, and how much was handed out.
Known layouts are those of torchdata 0.10 and 0.11; anything else is refused rather than guessed at.
"""

from __future__ import annotations

from typing import Any

from ckstore.errors import InvalidInputError
from ckstore_torch.draws import derived_seed

_SAMPLER = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)
_FINISHED = "_iterator_finished"


def is_torchdata(loader: Any) -> bool:
    """Whether this is torchdata's loader, or made from it; it is known without importing torchdata."""
    return any(
        cls.__name__ == "StatefulDataLoader" and cls.__module__.startswith("torchdata.") for cls in type(loader).__mro__
    )


def for_workers(state: dict[str, Any], workers: int) -> dict[str, Any]:
    """`state`, as a loader with `workers` workers takes it; `InvalidInputError` if it cannot be.

    It cannot if the dataset has a position of its own, as iterable datasets have, each worker another one.
    """
    if not state:  # torchdata starts afresh from it
        return state
    try:
        saved = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
        if saved == workers:
            return state
        _refuse_positions(state, saved, workers)
        if saved and workers:
            return _among(state, state["_snapshot"], workers)
        return _to_none(state) if saved else _from_none(state, workers)
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidInputError(f"this state of a StatefulDataLoader is of no known layout: {error!r}") from error


def _refuse_positions(state: dict[str, Any], saved: int, workers: int) -> None:
    parts = state["_snapshot"]["_worker_snapshots"].values() if saved else [state]
    if any(part[name] is not None for part in parts for name in ("dataset_state", "fetcher_state")):
        raise InvalidInputError(
            f"the dataset has a position in each worker, and was saved with {saved} of them: it cannot go on with "
            f"{workers}; set num_workers={saved}"
        )
    if saved and not workers and state["_steps_since_snapshot"]:
        raise InvalidInputError(
            f"the loader was saved between two of its snapshots, so only {saved} workers can go on: set num_workers="
            f"{saved}, and use snapshot_every_n_steps=1 where their number is to change"
        )


def _among(state: dict[str, Any], snapshot: dict[str, Any], workers: int) -> dict[str, Any]:
    return {
        **state,
        "_snapshot": {
            **snapshot,
            "_main_snapshot": {**snapshot["_main_snapshot"], "_num_workers": workers},
            "_worker_snapshots": _fresh(workers),
            "_last_yielded_worker_id": workers - 1,  # the next batch is asked of the first one
        },
    }


def _to_none(state: dict[str, Any]) -> dict[str, Any]:
    main = state["_snapshot"]["_main_snapshot"]
    return {
        **{name: main[name] for name in _SAMPLER},
        "_num_yielded": state["_snapshot"]["_snapshot_step"],
        "fetcher_state": None,
        "dataset_state": None,
        _FINISHED: state[_FINISHED],
    }


def _from_none(state: dict[str, Any], workers: int) -> dict[str, Any]:
    # Without workers none had a seed; it is the same in each run that goes on from here.
    seed = derived_seed(state["_num_yielded"], "workers")
    main = {**{name: state[name] for name in _SAMPLER}, "_num_workers": workers, "_base_seed": seed}
    return {
        "_snapshot": {
            "_snapshot_step": state["_num_yielded"],
            "_last_yielded_worker_id": workers - 1,
            "_main_snapshot": main,
            "_worker_snapshots": _fresh(workers),
        },
        "_steps_since_snapshot": 0,
        _FINISHED: state[_FINISHED],
    }


def _fresh(workers: int) -> dict[str, Any]:
    return {
        f"worker_{number}": {"worker_id": number, "fetcher_state": None, "dataset_state": None}
        for number in range(workers)
    }
