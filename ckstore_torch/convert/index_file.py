"""The index of a checkpoint in several files: which tensor is in which.

    {"metadata": {...}, "weight_map": {"embed.weight": "model-00001-of-00002.safetensors", ...}}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import json_file

SUFFIX = ".index.json"
_FEW = 5


def load(path: Path) -> dict[str, list[str]]:
    """The names of tensors by the file that they are in, files in order; each is a plain name beside the index."""
    found = json_file.load(path)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise InvalidInputError(f"{path} has no weight_map")
    files: dict[str, list[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or not is_plain(file):
            raise InvalidInputError(f"{path}: {str(file)[:100]!r} is not the name of a file beside it")
        files.setdefault(file, []).append(name)
    return dict(sorted(files.items()))


def is_plain(name: str) -> bool:
    """Whether a name stays in its folder."""
    return name not in ("", ".", "..") and not any(char in "/\\\0" for char in name)


def check_names(path: Path, promised: Collection[str], there: Collection[str]) -> None:
    """`InvalidInputError` unless the file at `path` holds exactly the tensors that the index promises."""
    missing, extra = sorted(set(promised) - set(there)), sorted(set(there) - set(promised))
    if missing:
        raise InvalidInputError(f"{path} lacks {_some(missing)}, which the index says are in it")
    if extra:
        raise InvalidInputError(f"{path} holds {_some(extra)}, which the index does not name or says are elsewhere")


def document(files: Mapping[str, Collection[str]], total_size: int) -> dict[str, object]:
    """An index as transformers writes it."""
    weights = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weights.items()))}


def _some(names: list[str]) -> str:
    return ", ".join(name[:100] for name in names[:_FEW]) + (f" and {len(names) - _FEW} more" if names[_FEW:] else "")
