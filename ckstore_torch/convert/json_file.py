"""JSON files of other programs: capped, and no key twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore_torch.convert.torch_file import opened

MAX_BYTES = 64 << 20


def load(path: Path) -> Any:
    """What a file holds; NaN and infinities, which Python writes, are read."""
    with opened(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidInputError(f"{path} is over the limit of {MAX_BYTES} bytes")
    try:
        return json.loads(data, object_pairs_hook=_once)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not JSON: {str(error)[:200]}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise InvalidInputError(f"the key {twice[:100]!r} is there twice")
    return made
