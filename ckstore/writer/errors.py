"""Errors as data, so that one in the writer process is raised in the trainer as what it is, with its fields and causes.

Only classes of ckstore and of Python itself are made again; any other becomes a RuntimeError that names it. Any error
can be encoded: what cannot be told of it is left out, and text that is no text (a path, mostly) is escaped.
"""

from __future__ import annotations

import builtins
from contextlib import suppress
from typing import Any

import msgspec

from ckstore import errors
from ckstore.writer.messages import ErrorRow

_MOST = 8
_TEXT = 10_000
_VALUE = 16 << 20
"""Bytes of the largest argument or field that is sent."""


def encode(error: BaseException) -> list[ErrorRow]:
    """The error and its causes, the outermost first."""
    rows: list[ErrorRow] = []
    found: BaseException | None = error
    while found is not None and len(rows) < _MOST:
        rows.append(_row(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return rows


def decode(rows: list[ErrorRow]) -> BaseException:
    """The error that `encode` was given."""
    cause: BaseException | None = None
    for row in reversed(rows):
        try:
            made = _make(row)
        except Exception:
            made = RuntimeError(f"{row.kind}: {row.text}")
        made.__cause__ = cause
        cause = made
    assert cause is not None
    return cause


def escaped(text: str) -> str:
    """Text as it can be sent: what stands for bytes that are no text (`os.fsdecode`) is written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """What an error says, or its name if it says nothing; short enough to be sent."""
    text = ""
    with suppress(Exception):  # it may be of a class that cannot be shown
        text = escaped(str(error)[:_TEXT])
    return text or escaped(type(error).__name__)


def _row(error: BaseException) -> ErrorRow:
    text = text_of(error)
    args: list[Any] = [text]
    fields: dict[str, Any] = {}
    with suppress(Exception):
        args = _sendable(list(error.args))
    with suppress(Exception):
        if isinstance(error, OSError) and error.filename is not None:
            args = [*args, _sendable(error.filename)]
    for name, value in vars(error).items():
        with suppress(Exception):
            fields[escaped(name)] = _sendable(value)
    return ErrorRow(escaped(type(error).__name__), args, fields, text)


def _make(row: ErrorRow) -> BaseException:
    kind = getattr(errors, row.kind, None) or getattr(builtins, row.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{row.kind}: {row.text}")
    # Those of ckstore are made from arguments that are not kept, those of Python from what is.
    ours = issubclass(kind, errors.CkstoreError)
    made: Exception = kind.__new__(kind) if ours else kind(*row.args[: 3 if issubclass(kind, OSError) else None])
    if ours:
        made.args = tuple(row.args)
    # What a class keeps in fields of its own; lists were tuples, as everything in an error that is raised is.
    vars(made).update({name: _frozen(value) for name, value in row.fields.items() if name != "__notes__"})
    for note in row.fields.get("__notes__", []):
        made.add_note(note)
    return made


def _sendable(value: object) -> Any:
    """A value of plain types as it can be sent; ValueError for any other, and for a large one."""
    plain = _plain(value)
    if len(msgspec.msgpack.encode(plain)) > _VALUE:
        raise ValueError("too large")
    return plain


def _plain(value: object) -> Any:
    match value:
        case None | bool():
            return value
        case int() if abs(value) < 2**63:
            return int(value)
        case float():
            return float(value)
        case str():
            return escaped(value)
        case bytes():
            return bytes(value)
        case list() | tuple():
            return [_plain(item) for item in value]
    raise ValueError("not plain")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
