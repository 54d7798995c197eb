"""What a path holds: one checkpoint, or a folder of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import dcp_folder, hf_folder, index_file, safetensors_files, steps, torch_file
from ckstore_torch.convert.contents import Contents, LeftOut
from ckstore_torch.convert.region import is_file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint that was found. `name` is that of its file or folder."""

    path: Path
    format: str
    step: int

    @property
    def name(self) -> str:
        return self.path.name

    def read(self) -> Contents:
        """Read it; `InvalidInputError` says what is wrong."""
        return _READERS[self.format](self.path)


@dataclass(frozen=True, slots=True)
class Found:
    """Checkpoints in the order of their steps, and what else is in the folder that held them."""

    checkpoints: tuple[Checkpoint, ...]
    passed_over: tuple[LeftOut, ...] = ()


_READERS: dict[str, Callable[[Path], Contents]] = {
    "torch": torch_file.read,
    "torch shards": hf_folder.read_torch_shards,
    "safetensors": safetensors_files.read,
    "safetensors shards": safetensors_files.read_sharded,
    "dcp": dcp_folder.read,
    "hf": hf_folder.read,
}


def discover(path: Path, step: int | None = None) -> Found:
    """What is at `path`. `step` is that of a single checkpoint, where its name does not say or says another.

    `InvalidInputError` when there is nothing that can be imported, or when several checkpoints are of one step.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise InvalidInputError(f"there is nothing at {path}")
    children = _children(path) if path.is_dir() else []
    numbered = [child for child in children if steps.spelled(child.name) and form(child)]
    own = form(path)
    if own is not None and not (own == "hf" and numbered):
        return Found((Checkpoint(path, own, _single_step(path, own, step)),))
    if not numbered:
        raise InvalidInputError(_nothing(path, children))
    if step is not None:
        raise InvalidInputError(f"--step is for a single checkpoint, and there are {len(numbered)} in {path}")
    names = {child.name: found for child in numbered if (found := steps.spelled(child.name))}
    steps.check_together(names)
    checkpoints = [Checkpoint(child, form(child) or "", names[child.name].number) for child in numbered]
    rest = [LeftOut(child.name, _why_not(child)) for child in children if child not in numbered]
    return Found(tuple(sorted(checkpoints, key=lambda one: one.step)), tuple(rest))


def form(path: Path) -> str | None:
    """The format of a checkpoint at `path`, None when there is none."""
    if path.is_dir():
        return "dcp" if dcp_folder.is_one(path) else "hf" if hf_folder.is_one(path) else None
    if not is_file(path):
        return None
    if path.name.endswith(index_file.SUFFIX):
        sharded = path.name.removesuffix(index_file.SUFFIX)
        return "safetensors shards" if sharded.endswith(safetensors_files.SUFFIX) else "torch shards"
    if path.suffix == safetensors_files.SUFFIX:
        return "safetensors"
    return "torch" if path.suffix in torch_file.SUFFIXES and torch_file.looks_right(path) else None


def _children(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if not child.name.startswith("."))


def _single_step(path: Path, form: str, step: int | None) -> int:
    if step is not None:
        return step
    named = steps.spelled(path.name)
    found = named.number if named else hf_folder.step_of(path) if form == "hf" else None
    if found is None:
        raise InvalidInputError(f"which step is {path.name} of? Its name does not say; say so with --step N")
    return found


def _nothing(path: Path, children: list[Path]) -> str:
    formats = "torch.save (torch 1.6 or later), safetensors, a DCP folder or a Hugging Face folder"
    unnumbered = [child.name for child in children if form(child)]
    if unnumbered:
        return f"no name in {path} has a step in it; import one at a time with --step, such as {unnumbered[0]}"
    return f"{path} is no checkpoint that can be read, nor a folder of them: {formats} can be"


def _why_not(path: Path) -> str:
    if form(path):
        return "no step in its name; import it by itself with --step"
    return "of no format that can be read"
