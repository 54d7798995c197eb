"""A checkpoint folder as Hugging Face's Trainer, `save_pretrained` or Accelerate write it.

    model                weights: safetensors or torch.save, one file or several with an index
    optimizer, scheduler, scaler    what torch.save wrote
    rng                  one state, or a dict of them by rank
    trainer_state, config, generation_config, adapter_config    JSON

What is there becomes a key of the state. Files that can only be unpickled (`training_args.bin`), and files of other
kinds (tokenizers, notes), are left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import index_file, json_file, safetensors_files, torch_file
from ckstore_torch.convert.contents import Contents, LeftOut, NeedsCodeError
from ckstore_torch.convert.region import is_file

_STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
WEIGHTS = tuple(f"{stem}{suffix}" for suffix in (".safetensors", ".bin") for stem in _STEMS)
"""Names of the weights in one file; each may have an index instead. The first that is there is taken."""
_TORCH = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin"),
    "scaler": ("scaler.pt", "scaler.bin"),
}
_JSON = ("trainer_state", "config", "generation_config", "adapter_config")
_RNG = re.compile(r"(?:rng_state|random_states)(?:_(\d{1,9}))?\.(?:pth|pkl)\Z")


def is_one(folder: Path) -> bool:
    """Whether there are weights in a folder under a name that Hugging Face gives them."""
    return _weights(folder) is not None


def read(folder: Path) -> Contents:
    """What a folder holds, as far as it can be read without running code."""
    found = _weights(folder)
    if found is None:
        raise InvalidInputError(f"there are no weights in {folder}")
    weights = _read_weights(found)
    taken = _Taken(folder, {"model": weights.state}, list(weights.files))
    for key, names in _TORCH.items():
        if (path := next((folder / name for name in names if is_file(folder / name)), None)) is not None:
            taken.take(key, path, torch_file.load)
    taken.take_rng()
    for key in _JSON:
        if is_file(folder / f"{key}.json"):
            taken.take(key, folder / f"{key}.json", json_file.load)
    taken.name_the_rest()
    return Contents(taken.state, tuple(taken.files), tuple(taken.left_out), weights.ties, weights.metadata)


def step_of(folder: Path) -> int | None:
    """The step that the trainer noted, where it did."""
    path = folder / "trainer_state.json"
    noted = json_file.load(path) if is_file(path) else None
    step = noted.get("global_step") if isinstance(noted, dict) else None
    return step if type(step) is int else None


class _Taken:
    """What was read of a folder so far."""

    def __init__(self, folder: Path, state: dict[str, Any], files: list[Path]) -> None:
        self.folder = folder
        self.state = state
        self.files = files
        self.left_out: list[LeftOut] = []

    def take(self, key: str, path: Path, load: Callable[[Path], Any]) -> None:
        """Read a file into the state, or name it as left out when that would take running code."""
        try:
            self.state[key] = load(path)
            self.files.append(path)
        except NeedsCodeError as error:
            self.left_out.append(LeftOut(path.name, str(error).removeprefix(f"{path}: ")))

    def take_rng(self) -> None:
        ranks: dict[int, Any] = {}
        for path in sorted(self.folder.iterdir()):
            named = _RNG.match(path.name)
            if named is None or not is_file(path):
                continue
            alone = _Taken(self.folder, {}, [])
            alone.take("rng", path, torch_file.load)
            self.left_out += alone.left_out
            self.files += alone.files
            if alone.state and named[1] is None:
                self.state["rng"] = alone.state["rng"]
            elif alone.state:
                ranks[int(named[1])] = alone.state["rng"]
        if ranks and "rng" in self.state:
            raise InvalidInputError(f"{self.folder} has random states both of one process and of several")
        if ranks:
            self.state["rng"] = dict(sorted(ranks.items()))

    def name_the_rest(self) -> None:
        named = {path.name for path in self.files} | {one.name for one in self.left_out}
        for path in sorted(self.folder.iterdir()):
            if path.name not in named:
                self.left_out.append(LeftOut(path.name + ("/" if path.is_dir() else ""), _why_not(path.name)))


def _why_not(name: str) -> str:
    if name == "training_args.bin":
        return "a pickled object of the trainer, which can only be read by running code"
    other = name.removesuffix(index_file.SUFFIX) in WEIGHTS
    return "other weights of this folder were taken" if other else "of no kind that is imported"


def _weights(folder: Path) -> Path | None:
    names = (name + suffix for name in WEIGHTS for suffix in ("", index_file.SUFFIX))
    return next((folder / name for name in names if is_file(folder / name)), None)


def _read_weights(path: Path) -> Contents:
    sharded = path.name.endswith(index_file.SUFFIX)
    if safetensors_files.SUFFIX in path.name:
        return safetensors_files.read_sharded(path) if sharded else safetensors_files.read(path)
    return read_torch_shards(path) if sharded else torch_file.read(path)


def read_torch_shards(index: Path) -> Contents:
    """The weights in several files of torch.save that an index names."""
    state: dict[str, Any] = {}
    shards = index_file.load(index)
    for file, names in shards.items():
        part = torch_file.load(index.with_name(file))
        if not isinstance(part, dict):
            raise InvalidInputError(f"{index.with_name(file)} holds no dict of tensors")
        index_file.check_names(index.with_name(file), names, [str(name) for name in part])
        state |= part
    return Contents(state, (index, *(index.with_name(file) for file in shards)))
