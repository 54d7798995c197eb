"""Tensors that nothing keeps equal on all ranks: they are compared before a save, and a snapshot says which differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from ckstore import Snapshot
from ckstore.errors import FormatError
from ckstore.ids import digest
from ckstore_torch.spread import Parameters, Tensors, owner_of, parameters_of, placements_of


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of some tensors of a snapshot, by name.

    `bound` are no buffers and differed from rank to rank. Of the optimizer state of sharded parameters, `plain` was not
    sharded, and `cut` has another shape than its parameter; of those it says how: "R" or the dimension, per mesh
    dimension.
    """

    bound: frozenset[str]
    plain: frozenset[str]
    cut: Mapping[str, Sequence[int | str]]

    @classmethod
    def of(cls, snapshot: Snapshot, rank: int) -> Header:
        run = snapshot.state(rank, keys="run")["run"]
        try:
            found = msgspec.convert(
                {name: run[name] for name in ("bound", "plain", "cut") if name in run}, type=_Names, strict=True
            )
        except msgspec.ValidationError as error:
            raise FormatError(f"what the snapshot says of its ranks is not what this version knows: {error}") from error
        return cls(frozenset(found.bound), frozenset(found.plain), found.cut)


class _Names(msgspec.Struct):
    bound: list[str] = []
    plain: list[str] = []
    cut: dict[str, list[int | str]] = {}


class Said(msgspec.Struct):
    """What the ranks tell each other before a save: digests of what they plan, and of what nothing keeps equal."""

    plan: bytes
    known: bytes
    names: bytes
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class Loose:
    """The tensors that nothing keeps equal on all ranks, such as buffers, by name, with a digest of each."""

    tensors: Tensors
    names: bytes
    digests: list[bytes]
    bound: frozenset[str]
    plain: list[str]
    cut: dict[str, list[int | str]]

    @classmethod
    def of(cls, tensors: Tensors, optimizers_by_name: bool, parameters: Parameters) -> Loose:
        owners = parameters_of(tensors)
        loose, bound, plain, cut = {}, set(), [], {}
        for name in sorted(tensors):
            tensor = tensors[name]
            owner = owner_of(name, owners, optimizers_by_name)
            if isinstance(tensor, DTensor):
                if owner is not None and owner.shape != tensor.shape:
                    cut[name] = placements_of(name, tensor)
                continue
            if owner is not None and isinstance(owner, DTensor) and tensor.ndim:
                plain.append(name)
            keeper = tensor if owner is None else owner
            if isinstance(keeper, DTensor) or keeper.data_ptr() not in parameters.kept_equal or not keeper.numel():
                loose[name] = tensor
                if owner is not None or tensor.data_ptr() in parameters.all:
                    bound.add(name)
        digests = [_digest_of(tensor) for tensor in loose.values()]
        return cls(loose, digest("\n".join(loose).encode()), digests, frozenset(bound), plain, cut)

    def differing(self, said: Sequence[Said]) -> Tensors:
        """Those that are not the same on all ranks."""
        if any(one.names != self.names for one in said):
            return self.tensors
        return {
            name: tensor
            for number, (name, tensor) in enumerate(self.tensors.items())
            if any(one.digests[number] != self.digests[number] for one in said)
        }

    def header(self, differing: Tensors) -> dict[str, Any]:
        """What a snapshot says of them; see `Header`."""
        return {"bound": sorted(self.bound & differing.keys()), "plain": self.plain, "cut": self.cut}


def _digest_of(tensor: torch.Tensor) -> bytes:
    """Of dtype, shape and bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return digest(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + digest(plain.numpy().data))
