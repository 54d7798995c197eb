"""A plain Python value that can be given as `extra`: numbers, text and tuples cannot be filled in place."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ckstore.errors import FormatError

T = TypeVar("T")


class Box(Generic[T]):
    """Holds one value, which is saved and brought back.

        tokens = Box(0)
        Checkpointer(..., extra={"tokens": tokens})
        tokens.value += batch.numel()

    The value may be whatever a store keeps: numbers, text, bytes, None, tuples, lists and dicts of them, tensors.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Box({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """The value under one key."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the value that was saved."""
        if "value" not in state:
            raise FormatError("the snapshot holds something else than a Box here")
        self.value = state["value"]
