"""Parts of a snapshot of a Checkpointer, read beside it: the weights alone, or one thing in `extra`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ckstore.errors import FormatError
from ckstore_torch.containers import from_plain
from ckstore_torch.group_state import RUN, SKELETON, GroupState
from ckstore_torch.parts import Differences, ModulePart
from ckstore_torch.shards import Sharded
from ckstore_torch.spread import empty_like, places, put_together, read_tensors

if TYPE_CHECKING:
    from ckstore import Snapshot, Store

Tensors = dict[str, torch.Tensor]


def load_weights(
    store: Store, snapshot: str, model: torch.nn.Module, group: GroupState, *, non_persistent: bool = False
) -> None:
    """Put the weights of `snapshot` (an id) into `model` on every rank, however many saved them.

    `MismatchError` lists what does not fit; nothing is changed then.
    """
    part = ModulePart(model, non_persistent=non_persistent)

    def read() -> Any:
        with store.snapshot(f"id:{snapshot}") as opened:
            saved = _weights(opened, part.capture())
        found = Differences()
        part.compare(saved, "model", found)
        found.raise_if_any()
        return saved

    part.load(group.together(read))


def read_extra(store: Store, snapshot: str, name: str) -> Any:
    """The value of a `Box` that was given as `extra` under `name`, which holds no tensors."""
    with store.snapshot(f"id:{snapshot}") as opened:
        prefix = f"{SKELETON}/" if _is_parted(opened) else ""
        state = opened.state(0, keys=f"{prefix}extra/{name}/**")
    try:
        return from_plain((state[SKELETON] if prefix else state)["extra"][name]["state"]["value"])
    except (KeyError, TypeError) as error:
        raise FormatError(f"snapshot {snapshot} holds nothing that a trainer remembers") from error


def _is_parted(opened: Snapshot) -> bool:
    """Whether several ranks saved it, each a part."""
    return any(path.startswith(f"{RUN}/") for path in opened.leaves(0))


def _weights(opened: Snapshot, here: Tensors) -> Any:
    """What was saved of the model, cut as the tensors `here` are."""
    if not _is_parted(opened):
        saved = opened.state(0, keys="model/**")["model"]
        return {name: _spread(tensor, here.get(name)) for name, tensor in saved.items()}
    skeleton = opened.state(0, keys=f"{SKELETON}/model/**")[SKELETON]["model"]
    sharded = Sharded(opened)
    known: Any = sharded.metadata.state_dict_metadata
    wanted: Tensors = {}
    for name, place in skeleton.items():
        for path in places(place):
            about, own = known[path], here.get(name)
            like = own if own is not None and own.shape == about.size else torch.empty(about.size, device="meta")
            wanted[path] = empty_like(like, about.properties.dtype) if not like.is_meta else _empty(about)
    read_tensors(sharded, wanted)
    return put_together(skeleton, wanted.__getitem__)


def _spread(whole: Any, here: torch.Tensor | None) -> Any:
    """A tensor that one process saved, cut as `here` is; every rank has read the whole of it."""
    if isinstance(here, DTensor) and isinstance(whole, torch.Tensor) and whole.shape == here.shape:
        whole = whole.to(here.device)
        return distribute_tensor(whole, here.device_mesh, here.placements, src_data_rank=None)
    return whole


def _empty(about: Any) -> torch.Tensor:
    return torch.empty(about.size, dtype=about.properties.dtype)
