"""Errors as data, so that one in the writer process is raised in the trainer as what it is, with its fields and causes.

Only classes of ckstore and of Python itself are made again; any other becomes a RuntimeError that names it.
"""

from __future__ import annotations

import builtins
from typing import Any

from ckstore import errors
from ckstore.writer.messages import ErrorRow

_MOST = 8
_TEXT = 10_000


def encode(error: BaseException) -> list[ErrorRow]:
    """The error and its causes, the outermost first."""
    rows: list[ErrorRow] = []
    found: BaseException | None = error
    while found is not None and len(rows) < _MOST:
        args: list[Any] = list(found.args) if _is_plain(list(found.args)) else [str(found)[:_TEXT]]
        if isinstance(found, OSError) and found.filename is not None and _is_plain(found.filename):
            args += [found.filename]
        fields = {name: value for name, value in vars(found).items() if _is_plain(value)}
        rows.append(ErrorRow(type(found).__name__, args, fields, str(found)[:_TEXT]))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return rows


def decode(rows: list[ErrorRow]) -> BaseException:
    """The error that `encode` was given."""
    cause: BaseException | None = None
    for row in reversed(rows):
        made = _make(row)
        made.__cause__ = cause
        cause = made
    assert cause is not None
    return cause


def _make(row: ErrorRow) -> BaseException:
    kind = getattr(errors, row.kind, None) or getattr(builtins, row.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{row.kind}: {row.text}")
    try:
        # Those of ckstore are made from arguments that are not kept, those of Python from what is.
        ours = issubclass(kind, errors.CkstoreError)
        made: Exception = kind.__new__(kind) if ours else kind(*row.args[: 3 if issubclass(kind, OSError) else None])
    except TypeError:
        return RuntimeError(f"{row.kind}: {row.text}")
    if ours:
        made.args = tuple(row.args)
    # What a class keeps in fields of its own; lists were tuples, as everything in an error that is raised is.
    vars(made).update({name: _frozen(value) for name, value in row.fields.items() if name != "__notes__"})
    for note in row.fields.get("__notes__", []):
        made.add_note(note)
    return made


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | str | bytes | float) or (type(value) is int and abs(value) < 2**63)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
