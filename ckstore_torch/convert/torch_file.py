"""What torch.save wrote, read without running code that a file names, and written.

`archive` checks every claim first. torch then reads with `weights_only=True`, and maps the tensors instead of copying
them.
"""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import archive, numpy_values
from ckstore_torch.convert.archive import Archive
from ckstore_torch.convert.contents import Contents, NeedsCodeError
from ckstore_torch.convert.pickled import Call, Name, Persistent
from ckstore_torch.convert.region import Region, is_file, whole

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_UNKNOWN = re.compile(r"GLOBAL (\S{1,200}) (?:was not an allowed global|whose module)")


def read(path: Path) -> Contents:
    """The object in a file. Its tensors are mapped from it.

    `NeedsCodeError` when it can only be read by running code that it names, `InvalidInputError` when it is damaged.
    """
    return Contents(load(path), (path,))


def load(path: Path) -> Any:
    """As `read`, the object alone."""
    with opened(path) as file, blamed(path):
        if path.name.endswith(".safetensors"):  # which torch.load would take for such a file
            raise InvalidInputError("a file of torch.save does not have the name of one of safetensors")
        if not looks_right(path):
            raise InvalidInputError(
                "not what torch.save of torch 1.6 or later wrote; load it where you trust it, and torch.save it again"
            )
        found = archive.read(whole(file.fileno()))
        return _loaded(found, os.fspath(path), mmap=True)


def load_region(region: Region) -> Any:
    """The object in an archive within another file. Its tensors are copies."""
    found = archive.read(region)
    return _loaded(found, io.BytesIO(region.at(0, region.size)))


def looks_right(path: Path) -> bool:
    """Whether a file begins as those of torch.save do."""
    with opened(path) as file:
        return file.read(len(archive.MAGIC)) == archive.MAGIC


def _loaded(found: Archive, source: str | IO[bytes], *, mmap: bool = False) -> Any:
    with numpy_values.admitted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":  # of a module that nothing here imports
                raise
            raise NeedsCodeError(_why_not(error)) from error
    return numpy_values.settled(state) if any(name.startswith("numpy.") for name in found.pickle.names) else state


def _why_not(error: Exception) -> str:
    unknown = _UNKNOWN.search(str(error))
    what = f"it needs {unknown[1]}" if unknown else "it asks for more than tensors and plain values"
    return f"it can only be read by running code that it names: {what}"


def map_tensor(region: Region, mapping: torch.UntypedStorage) -> torch.Tensor:
    """The plain tensor in an archive within a file, as a view of `mapping`, which is the whole file.

    Its pickle is read as data, so nothing of it is run, and nothing is copied.
    """
    found = archive.read(region)
    match found.pickle.value:
        case Call(Name("torch._utils._rebuild_tensor_v2"), (Persistent(key), *place, _, _)) if len(place) == 3:
            kind = key[1] if isinstance(key, tuple) else None
            dtype = _DTYPES.get(kind.path) if isinstance(kind, Name) else None
        case Call(Name("torch._utils._rebuild_tensor_v3"), (Persistent(key), *place, _, _, Name(name))) if (
            len(place) == 3
        ):
            dtype = getattr(torch, name.removeprefix("torch."), None) if name.count(".") == 1 else None
        case _:
            raise InvalidInputError("an entry that is no plain tensor")
    if not isinstance(dtype, torch.dtype) or not found.little_endian:
        raise InvalidInputError("a tensor of a dtype or byte order that this version does not know")
    start, count = found.storages[key[2]]  # type: ignore[index]
    start += region.start
    try:
        tensor = torch.empty(0, dtype=torch.uint8).view(dtype).detach()
        offset, size, stride = cast(tuple[int, tuple[int, ...], tuple[int, ...]], place)
        return tensor.set_(mapping[start : start + count], offset, size, stride)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"an impossible tensor: {str(error)[:200]}") from error


_DTYPES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
}  # fmt: skip


_LIBRARY_ERRORS = (
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, EOFError,
    struct.error,
)  # fmt: skip


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; `InvalidInputError` for anything else."""
    if not is_file(path):
        raise InvalidInputError(f"there is no file {path}")
    with path.open("rb") as file:
        yield file


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Say of which file an error is; whatever a library raises over what is in a file becomes `InvalidInputError`."""
    try:
        yield
    except NeedsCodeError as error:
        raise NeedsCodeError(f"{path}: {error}") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except (MemoryError, RecursionError) as error:
        raise InvalidInputError(f"{path}: reading it takes more memory than there is") from error
    except _LIBRARY_ERRORS as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InvalidInputError(f"{path} cannot be read: {text}") from error


def write(state: object, path: Path) -> None:
    """Write `state` as torch.save does, to a file that is not there yet; it is durable when this returns."""
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
