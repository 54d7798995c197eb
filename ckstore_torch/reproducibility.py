"""Whether a resumed run goes on bit by bit as the one that was saved would have: two records of conditions, compared.

What differs is named, with what it changes. Some of it breaks bit-identity, and some is only worth knowing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckstore.errors import FormatError, InvalidInputError
from ckstore_torch.conditions import LONGEST_TEXT, Conditions, Value

_MOST_ENTRIES = 10_000
_MOST_LISTED = 50
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """One condition that is not as it was, or not as it should be: then both values are the same.

    `exact`: bits of the next steps may differ; otherwise it is only worth knowing.
    """

    name: str
    saved: Value
    here: Value
    exact: bool
    meaning: str

    def __str__(self) -> str:
        if (self.saved, self.here) == (None, None):
            return f"{_shown(self.name)}: {self.meaning}"
        values = f"{self.here!r}" if self.saved == self.here else f"{self.saved!r} when saved, {self.here!r} here"
        return f"{_shown(self.name)}: {values}: {self.meaning}"


def compare(saved: object, here: Conditions) -> list[Difference]:
    """Every condition that differs, sorted by name. Pure. `saved` is untrusted: `FormatError` if it is no record.

    None is a snapshot that holds no record: one difference says so.
    """
    if saved is None:
        return [Difference("conditions", None, "recorded", True, "an older version recorded none; nothing is known")]
    there = _checked(saved)
    found = []
    for name in sorted(there.keys() | here.keys()):
        before, now = there.get(name), here.get(name)
        if (before, type(before)) != (now, type(now)) and not _is_unknown_layout(name, before, now):
            rule = _rule(name)
            found.append(Difference(name, before, now, rule.breaks(name, there, here), rule.meaning))
    return found


def hazards(here: Conditions) -> list[Difference]:
    """What keeps bits from being repeatable though nothing differs. Pure."""
    found = []
    if "cuda/gpu" in here and _computes_on("cuda", here):
        for name, wanted, meaning in _REPEATABLE:
            if here.get(name) is not wanted:
                found.append(Difference(name, here.get(name), here.get(name), True, meaning))
    world, wraps = here.get("world_size"), ("ddp/", "sharding/")
    if isinstance(world, int) and world >= 3 and not any(name.startswith(wraps) for name in here):
        meaning = "no DDP or sharded module was given, so how gradients are added up across ranks is not known"
        found.append(Difference("ddp", None, None, True, meaning))
    return found


def check(saved: object, here: Conditions, *, exact: bool, also: Iterable[Difference] = ()) -> None:
    """Before a restore: refuse with `exact`, else log, that the run will not go on bit by bit as it would have.

    One `InvalidInputError`, or one warning, lists every difference. Advisory ones alone are logged as information.
    `also` is what else keeps bits from being repeatable: like `hazards` refused with `exact`, and else passed over.
    """
    found = compare(saved, here)
    if exact:
        found = [*also, *hazards(here), *found]
    if not found:
        return
    breaking = [difference for difference in found if difference.exact]
    listed = _listed([*breaking, *(one for one in found if not one.exact)])
    if breaking and exact:
        raise InvalidInputError(
            f"exact=True, and the run would not go on bit by bit; nothing was restored. What to set right:\n{listed}"
        )
    if breaking:
        _log.warning("the resumed run may differ in its bits from the one that was saved:\n%s", listed)
    else:
        _log.info("the resumed run goes on elsewhere, which does not change its bits:\n%s", listed)


def wants_warmup(saved: object) -> bool:
    """Whether a warm-up leads to the buckets that the snapshot was made with, as far as its conditions tell.

    It does not if that run had not built its buckets again yet: it was saved before its first step. Pure; `FormatError`
    as with `compare`.
    """
    there = {} if saved is None else _checked(saved)
    told = [value for name, value in there.items() if name.startswith("ddp/") and name.endswith("/buckets")]
    return not told or any(value != "first" for value in told)


@dataclass(frozen=True, slots=True)
class _Rule:
    meaning: str
    breaks: Callable[[str, Conditions, Conditions], bool]


def _always(name: str, saved: Conditions, here: Conditions) -> bool:
    return True


def _never(name: str, saved: Conditions, here: Conditions) -> bool:
    return False


def _on_cpu(name: str, saved: Conditions, here: Conditions) -> bool:
    return _computes_on("cpu", saved) or _computes_on("cpu", here)


def _on_cuda(name: str, saved: Conditions, here: Conditions) -> bool:
    return _computes_on("cuda", saved) or _computes_on("cuda", here)


def _on_three_ranks(name: str, saved: Conditions, here: Conditions) -> bool:
    """Of two numbers there is one sum; of three it depends on which two are added first."""
    group = name.rpartition("/")[0] + "/ranks"  # a DDP module may be on some of the ranks
    sizes = [found.get(group, found.get("world_size")) for found in (saved, here)]
    return not all(isinstance(size, int) and size <= 2 for size in sizes)


def _computes_on(device: str, found: Conditions) -> bool:
    devices = found.get("devices")
    return not devices or not isinstance(devices, str) or device in devices.split(",")


_CPU_KERNELS = "kernels of the CPU divide and add up otherwise"
_CUDA_KERNELS = "kernels of the GPU may be others"
_PRECISION = "matrix products and convolutions are rounded otherwise"
_ALGORITHM = "other kernels are chosen"
_BUCKETS = "gradients are added up across ranks in another order"
_RULES: dict[str, _Rule] = {
    "world_size": _Rule("gradients are averaged over another number of ranks", _always),
    "rank": _Rule("this is the state of another rank", _always),
    "backend": _Rule(_BUCKETS, _on_three_ranks),
    "devices": _Rule("the model is computed on another kind of device", _always),
    "python": _Rule("arithmetic is the same; libraries may not be", _never),
    "numpy": _Rule("augmentation that uses NumPy may compute otherwise", _never),
    "torch/version": _Rule("any kernel may be another", _always),
    "torch/git": _Rule("any kernel may be another", _always),
    "torch/build": _Rule("torch was built with other libraries or options; any kernel may be another", _always),
    "cpu/capability": _Rule(_CPU_KERNELS, _on_cpu),
    "cpu/threads": _Rule(_CPU_KERNELS, _on_cpu),
    "cpu/mkl_threads": _Rule(_CPU_KERNELS, _on_cpu),
    "cpu/interop_threads": _Rule("which operations run side by side does not change what each computes", _never),
    "cpu/flush_denormal": _Rule("very small numbers become zero in one of them", _on_cpu),
    "cpu/machine": _Rule("oneDNN and MKL choose by model among kernels of one capability", _never),
    "cuda/count": _Rule("more or fewer cards are visible; what is computed on each is the same", _never),
    "ddp/bucket_bytes_cap": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/bucket_bytes_caps": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/first_bucket_bytes_cap": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/find_unused_parameters": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/static_graph": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/layout": _Rule(_BUCKETS, _on_three_ranks),
    "ddp/buckets": _Rule(
        f"{_BUCKETS}, as DDP builds its buckets anew after the first iteration; "
        "give resume(warmup=) one forward and backward, or DDP find_unused_parameters=True",
        _on_three_ranks,
    ),
    "ddp/gradient_as_bucket_view": _Rule("where gradients are kept does not change them", _never),
    "ddp/ranks": _Rule("gradients are averaged over another number of ranks", _always),
    "ddp/comm_hook": _Rule("gradients are sent in another form", _always),
    "sharding/mesh": _Rule("parameters are divided and gradients added up otherwise", _always),
    "sharding/placements": _Rule("parameters are divided and gradients added up otherwise", _always),
    "sharding/units": _Rule(_BUCKETS, _on_three_ranks),
    "compiled": _Rule("compiled code fuses operations and rounds otherwise", _always),
    "data/rank": _Rule("this rank reads other samples", _always),
    "data/replicas": _Rule("the samples are divided among another number of ranks", _always),
    "flags/default_dtype": _Rule("new tensors have another precision", _always),
    "flags/autocast": _Rule(_PRECISION, _always),
    "flags/deterministic": _Rule(_ALGORITHM, _always),
    "flags/deterministic_warn_only": _Rule("what cannot be repeated is an error or a warning", _never),
    "flags/fill_uninitialized_memory": _Rule("memory that nothing wrote is filled in one of them", _never),
    "flags/opt_einsum": _Rule("einsum multiplies in another order", _always),
    "flags/opt_einsum_strategy": _Rule("einsum multiplies in another order", _always),
    "flags/fp32_precision": _Rule(_PRECISION, _always),
    "flags/float32_matmul_precision": _Rule(_PRECISION, _always),
}
_GROUPS: dict[str, _Rule] = {
    "cuda": _Rule(_CUDA_KERNELS, _on_cuda),
    "flags/mkldnn": _Rule(_CPU_KERNELS, _on_cpu),
    "flags/nnpack": _Rule(_CPU_KERNELS, _on_cpu),
    "flags/cuda": _Rule(_CUDA_KERNELS, _on_cuda),
    "flags/cudnn": _Rule(_CUDA_KERNELS, _on_cuda),
}
_UNKNOWN = _Rule("another version of ckstore recorded it; what it changes is not known here", _always)
_NAMED = ("ddp", "sharding", "compiled", "data")
"""Kinds of entries of which there is one for each model or loader: kind/name/entry; the name may be any or none."""
_REPEATABLE = (
    ("flags/deterministic", True, "GPU kernels add up in any order; call torch.use_deterministic_algorithms(True)"),
    ("flags/cudnn.benchmark", False, "cuDNN takes what is fastest now; set torch.backends.cudnn.benchmark = False"),
)
"""Settings without which a GPU gives other bits each time, with their meaning."""


def _rule(name: str) -> _Rule:
    kind, *rest = name.split("/")
    if kind in _NAMED:
        return _RULES.get(kind if kind == "compiled" else f"{kind}/{rest[-1] if rest else ''}", _UNKNOWN)
    return _RULES.get(name) or _GROUPS.get(kind) or _GROUPS.get(name.partition(".")[0]) or _UNKNOWN


def _is_unknown_layout(name: str, saved: Value, here: Value) -> bool:
    """Whether one side cannot tell its buckets, as in DDP's first iterations; `ddp/…/buckets` speaks for it then."""
    return name.startswith("ddp/") and name.endswith("/layout") and None in (saved, here)


def _checked(saved: object) -> Conditions:
    if not isinstance(saved, dict) or len(saved) > _MOST_ENTRIES:
        raise FormatError(f"the conditions of the snapshot are no record of at most {_MOST_ENTRIES} entries")
    for name, value in saved.items():
        texts = [text for text in (name, value) if isinstance(text, str)]
        if not isinstance(name, str) or any(len(text) > LONGEST_TEXT for text in texts):
            raise FormatError("the conditions of the snapshot hold a name or a text that no version writes")
        plain = type(value) in (type(None), bool, int, float, str)
        if not plain or (type(value) is float and not math.isfinite(value)):
            raise FormatError(f"the condition {_shown(name)} of the snapshot is no plain value")
        if type(value) is int and value.bit_length() > 64:
            raise FormatError(f"the condition {_shown(name)} of the snapshot is a number that no version writes")
    return saved


def _listed(found: list[Difference]) -> str:
    more = f"\n  and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return "\n".join(f"  {difference}" for difference in found[:_MOST_LISTED]) + more


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)
