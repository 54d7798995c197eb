"""The position of any loader with `state_dict` and `load_state_dict`, with what such a loader leaves out.

    {"state": its own state, "epochs": {"sampler": n, "dataset": n}}

torchdata's loader does not save the epoch of a DistributedSampler, and a dataset of Hugging Face takes a state only
while it is in the epoch that it was saved in. It also draws from torch's global generator when its iterator is made,
so the generators are to be put back after the loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from ckstore.errors import InvalidInputError
from ckstore_torch.torchdata_state import for_workers, is_torchdata

Position: TypeAlias = dict[str, Any]


class ResumableLoader(Protocol):
    """What a loader is known by."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def position_of(loader: ResumableLoader) -> Position:
    """Where the loader is, as plain data. torchdata's loader makes its iterator for it, if it has none, and draws."""
    state = loader.state_dict()
    return {"state": state, "epochs": {name: int(holder.epoch) for name, holder in _holders(loader)}}


def move_to(loader: ResumableLoader, position: Position) -> None:
    """Go to a saved position, with any number of workers if the dataset has no position of its own.

    When it returns, the loader has drawn from the global generators what the run that was saved had drawn for the epoch
    that goes on: put the generators back after this. `InvalidInputError` if it cannot go there.
    """
    state = position["state"]
    if is_torchdata(loader):
        state = for_workers(state, loader.num_workers)  # type: ignore[attr-defined]
    epochs = position.get("epochs", {})
    for name, holder in _holders(loader, untold=True):
        if name in epochs:
            holder.set_epoch(epochs[name])
    loader.load_state_dict(state)
    if is_torchdata(loader):
        loader.state_dict()  # makes the iterator, which the run that was saved had made already
        _settle(getattr(loader, "sampler", None), finished=bool(state.get("_iterator_finished")))


def of_rank(positions: Sequence[Position], rank: int, world_size: int, *, is_global: bool) -> Position:
    """The position that `rank` of `world_size` goes on from, given those that were saved, in the order of the ranks.

    With as many ranks as before each gets its own. Otherwise one position must hold for all of them: it does if the
    loader counts globally (`exactness.counts_globally`) and all ranks were at the same place, else `InvalidInputError`.
    A position may also be a mapping of positions of several loaders by name.
    """
    if not 0 <= rank < world_size:
        raise InvalidInputError(f"rank is from 0 to world_size - 1, not {rank} of {world_size}")
    if not positions:
        raise InvalidInputError("no position was saved")
    if len(positions) == world_size:
        return positions[rank]
    if not is_global:
        raise InvalidInputError(
            f"the data positions are those of {len(positions)} ranks each by itself, and {world_size} ranks cannot go "
            "on from them: start with as many ranks, or load with SeededLoader or through a ResumableSampler, whose "
            "position is that of all ranks"
        )
    if any(_place(position) != _place(positions[0]) for position in positions[1:]):
        raise InvalidInputError(
            f"the {len(positions)} ranks were saved at different places in the data, so {world_size} ranks cannot go "
            "on: save when all have done the same number of steps"
        )
    return positions[0]


def _place(position: Position) -> Any:
    """What says where all ranks are, without what each rank has for itself, such as the seed of its workers."""
    state = position.get("state")
    if not isinstance(state, dict):  # several loaders by name
        return {name: _place(one) for name, one in position.items() if isinstance(one, dict)}
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, dict):
        main = snapshot.get("_main_snapshot", {})
        return main.get("_sampler_iter_state"), state.get("_steps_since_snapshot"), position.get("epochs")
    return state.get("_sampler_iter_state", state), position.get("epochs")


def _holders(loader: Any, untold: bool = False) -> Iterator[tuple[str, Any]]:
    """The sampler and the dataset of a loader, if they are told the epoch: those that were, or all that can be."""
    for name in ("sampler", "dataset"):
        holder: Any = getattr(loader, name, None)
        if hasattr(holder, "set_epoch") and hasattr(holder, "epoch") and (untold or holder.epoch is not None):
            yield name, holder


def _settle(sampler: Any, *, finished: bool) -> None:
    """torchdata's StatefulDistributedSampler takes up what was loaded only when it is asked for a sample.

    Until then it says that it stands at the start; and what was loaded behind the end of an epoch, it would take up in
    the next one, all of which would be left out.
    """
    if getattr(sampler, "next_yielded", None) is not None:
        sampler.yielded = sampler.next_yielded
        if finished:
            sampler.next_yielded = None
