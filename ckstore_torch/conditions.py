"""What the bits of a training step depend on beside the state: recorded with each snapshot.

The record is flat, so that it can be checked, stored and compared without knowing what it holds:

    {"world_size": 4, "torch/version": "2.6.0", "cpu/threads": 8, "ddp/model/bucket_bytes_cap": 1048576, ...}

Everything is read from this process alone: no collective runs, and no environment variable is read, as what those of
CUDA, OpenMP and oneDNN led to is asked of torch. `reproducibility` compares two; `docs/bit-identical.md` says what
each entry means.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckstore_torch import buckets

Value: TypeAlias = bool | int | float | str | None
Conditions: TypeAlias = dict[str, Value]

LONGEST_TEXT = 1_000
"""Characters in a name or a text value."""


def capture(models: Mapping[str, Any], loaders: Mapping[str, Any] | None = None) -> Conditions:
    """The conditions of this process now.

    `models` are the modules by name as they are called in training, wrapped in DDP or compiled; what is no module is
    passed over. `loaders` are the data loaders by name; one whose sampler tells no rank is passed over, too.
    """
    modules = {name: model for name, model in models.items() if isinstance(model, torch.nn.Module)}
    found: Conditions = {**_process(), **_cpu(), **_flags()}
    found["devices"] = ",".join(sorted({p.device.type for model in modules.values() for p in model.parameters()}))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= _cuda(modules)
    for name, model in modules.items():
        found |= _model(name, model)
    for name, loader in (loaders or {}).items():
        found |= _data(name, loader)
    return found


def _process() -> Conditions:
    grouped = dist.is_available() and dist.is_initialized()
    return {
        "world_size": dist.get_world_size() if grouped else 1,
        "rank": dist.get_rank() if grouped else 0,
        "backend": str(dist.get_backend()) if grouped else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch/version": str(torch.__version__),
        "torch/git": str(torch.version.git_version),
        "torch/build": _build(),
    }


def _cpu() -> Conditions:
    return {
        "cpu/capability": torch.backends.cpu.get_cpu_capability(),
        "cpu/machine": _machine(),
        "cpu/threads": torch.get_num_threads(),
        "cpu/mkl_threads": _mkl_threads(),
        "cpu/interop_threads": torch.get_num_interop_threads(),
        # torch can set it and not tell it, and libraries built with -ffast-math set it when they are loaded.
        "cpu/flush_denormal": sys.float_info.min / 2 == 0.0,
    }


@functools.cache
def _build() -> str:
    """The compilers, libraries and options of torch, without what it found out about this CPU."""
    return _digest(line for line in torch.__config__.show().splitlines() if "CPU capability" not in line)


def _mkl_threads() -> int | None:
    """Those of MKL, which can be told apart from torch's; None where torch has no MKL."""
    told = re.search(r"mkl_get_max_threads\(\) : (\d{1,9})", torch.__config__.parallel_info())
    return int(told[1]) if told else None


@functools.cache
def _machine() -> str:
    """The CPU's name for people, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())[:LONGEST_TEXT]


_FLAGS = {
    "default_dtype": "get_default_dtype",
    "deterministic": "are_deterministic_algorithms_enabled",
    "deterministic_warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "fill_uninitialized_memory": "utils.deterministic.fill_uninitialized_memory",
    "float32_matmul_precision": "get_float32_matmul_precision",
    "fp32_precision": "backends.fp32_precision",
    "opt_einsum": "backends.opt_einsum.enabled",
    "opt_einsum_strategy": "backends.opt_einsum.strategy",
    "mkldnn.enabled": "backends.mkldnn.enabled",
    "mkldnn.deterministic": "backends.mkldnn.deterministic",
    "mkldnn.matmul": "backends.mkldnn.matmul.fp32_precision",
    "mkldnn.conv": "backends.mkldnn.conv.fp32_precision",
    "mkldnn.rnn": "backends.mkldnn.rnn.fp32_precision",
    "nnpack.enabled": "_C._get_nnpack_enabled",
    "cudnn.enabled": "backends.cudnn.enabled",
    "cudnn.deterministic": "backends.cudnn.deterministic",
    "cudnn.benchmark": "backends.cudnn.benchmark",
    "cudnn.allow_tf32": "backends.cudnn.allow_tf32",
    "cudnn.conv": "backends.cudnn.conv.fp32_precision",
    "cudnn.rnn": "backends.cudnn.rnn.fp32_precision",
    "cuda.matmul": "backends.cuda.matmul.fp32_precision",
    "cuda.matmul.allow_tf32": "backends.cuda.matmul.allow_tf32",
    "cuda.matmul.fp16_reduction": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.bf16_reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.fp16_accumulation": "backends.cuda.matmul.allow_fp16_accumulation",
    "cuda.flash_attention": "backends.cuda.flash_sdp_enabled",
    "cuda.memory_efficient_attention": "backends.cuda.mem_efficient_sdp_enabled",
    "cuda.math_attention": "backends.cuda.math_sdp_enabled",
    "cuda.cudnn_attention": "backends.cuda.cudnn_sdp_enabled",
}
"""Where torch tells its settings. Those that a version lacks are None."""


def _flags() -> Conditions:
    found = {f"flags/{name}": _read(path) for name, path in _FLAGS.items()}
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    found["flags/autocast"] = ",".join(f"{kind}:{torch.get_autocast_dtype(kind)}" for kind in on)
    return found


def _cuda(modules: Mapping[str, torch.nn.Module]) -> Conditions:
    """The cards that hold the models, else the current one."""
    held: set[Any] = {p.device for model in modules.values() for p in model.parameters() if p.device.type == "cuda"}
    cards = [torch.cuda.get_device_properties(card) for card in held or {torch.cuda.current_device()}]
    kinds = sorted({f"{card.name} {card.major}.{card.minor} of {card.multi_processor_count}" for card in cards})
    return {
        "cuda/version": torch.version.cuda or torch.version.hip,
        "cuda/cudnn": _read("backends.cudnn.version"),
        "cuda/nccl": _read("cuda.nccl.version"),
        "cuda/gpu": ", ".join(kinds),
        "cuda/count": torch.cuda.device_count(),
        # What CUBLAS_WORKSPACE_CONFIG asked for: cuBLAS chooses its algorithms by how much memory they may use.
        "cuda/cublas_workspace": _read("backends.cuda.cublas_workspace_size"),
        "cuda/blas": _read("backends.cuda.preferred_blas_library"),
        "cuda/linalg": _read("backends.cuda.preferred_linalg_library"),
    }


def _model(name: str, model: torch.nn.Module) -> Conditions:
    modules = list(model.modules())
    found: Conditions = {
        _name("compiled", name): hasattr(model, "_orig_mod")
        or any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    }
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            found |= {_name("ddp", name, path, entry): value for entry, value in buckets.describe(module).items()}
    sharded: list[tuple[str, Any]] = [(path, p) for path, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        from torch.distributed.fsdp import FSDPModule  # slow to import, and here only where it is used

        meshes = {"x".join(str(size) for size in p.device_mesh.shape) for _, p in sharded}
        found[_name("sharding", name, "mesh")] = ",".join(sorted(meshes))
        found[_name("sharding", name, "placements")] = _digest(f"{path} {p.placements}" for path, p in sharded)
        found[_name("sharding", name, "units")] = _digest(
            path for path, module in model.named_modules() if isinstance(module, FSDPModule)
        )
    return found


def _data(name: str, loader: object) -> Conditions:
    """Which part of the data this rank reads, as `DistributedSampler` calls it, or `ResumableSampler`."""
    for holder in _samplers(loader):
        rank = getattr(holder, "rank", None)
        replicas = getattr(holder, "num_replicas", getattr(holder, "world_size", None))
        if type(rank) is int and type(replicas) is int:
            return {_name("data", name, "rank"): rank, _name("data", name, "replicas"): replicas}
    return {}


def _samplers(loader: object, depth: int = 3) -> Iterator[object]:
    """A loader, and its samplers wherever they are wrapped."""
    yield loader
    for name in ("batch_sampler", "sampler", "order"):
        inner = getattr(loader, name, None)
        if inner is not None and depth:
            yield from _samplers(inner, depth - 1)


def _name(*parts: str) -> str:
    """Of an object that is the only one of its kind the name is empty."""
    return "/".join(part for part in parts if part)


def _read(path: str) -> Value:
    """What torch has at `path`, called if it is a function.

    None where there is no such thing, or where it is not told, as with the two ways to allow TF32 mixed.
    """
    try:
        found = operator.attrgetter(path)(torch)
        value = found() if callable(found) else found
    except (AttributeError, RuntimeError):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
