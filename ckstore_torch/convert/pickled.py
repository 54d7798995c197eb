"""Pickles read as data: nothing is imported, called or set.

A pickle is a program for a small stack machine. Its dangerous instructions look up a name, call it, and set attributes.
Here a name that is looked up is a `Name`, a call is a `Call` that remembers what was called with what, and setting
attributes fills its `state`. Nothing that can be called is ever on the stack, so whatever the instructions are, nothing
can come of them but lists, tuples, dicts, plain scalars and these records. What a record may mean is for the reader to
check.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckstore.errors import InvalidInputError

MAX_BYTES = 64 << 20
"""Largest pickle read. Tensors are not in it: a model of a million of them takes a tenth of that."""
MAX_INSTRUCTIONS = 20_000_000

_LITERALS = frozenset({
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "STRING", "SHORT_BINSTRING", "BINSTRING",
})  # fmt: skip
_IGNORED = frozenset({"PROTO", "FRAME"})


@dataclass(frozen=True, slots=True)
class Name:
    """Something that the pickle looks up: `torch.Size`."""

    path: str


@dataclass(slots=True, eq=False)
class Call:
    """A call that the pickle makes: of what, with which arguments; the state and items given to what it returned."""

    what: object
    args: object
    state: object = None
    items: list[tuple[object, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something outside the pickle."""

    key: object


@dataclass(frozen=True, slots=True)
class Pickled:
    """What a pickle holds, every name that it looks up, every reference to the outside and every call that it makes."""

    value: Any
    names: frozenset[str]
    references: tuple[Any, ...]
    calls: tuple[Call, ...]


def read(data: bytes) -> Pickled:
    """Read a pickle; `InvalidInputError` says why it cannot be."""
    if len(data) > MAX_BYTES:
        raise InvalidInputError(f"a pickle of {len(data)} bytes; the limit is {MAX_BYTES}")
    machine = _Machine()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_INSTRUCTIONS:
                raise InvalidInputError(f"a pickle of over {MAX_INSTRUCTIONS} instructions")
            machine.step(instruction.name, argument)
        found = machine.result()
        return Pickled(found, frozenset(machine.names), tuple(machine.references), tuple(machine.calls))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, AttributeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"a damaged pickle: {str(error)[:200]}") from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: set[str] = set()
        self.references: list[Any] = []
        self.calls: list[Call] = []

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in _IGNORED:
            raise InvalidInputError(f"a pickle with the instruction {name}, which no checkpoint needs")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.below:
            raise InvalidInputError("a pickle that ends in the middle")
        return self.stack[0]

    def marked(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def look_up(self, argument: str) -> None:
        module, _, attribute = argument.partition(" ")
        self._name(module, attribute)

    def look_up_on_stack(self, _: Any) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self._name(module, attribute)

    def _name(self, module: object, attribute: object) -> None:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise InvalidInputError("a pickle that looks up what is no name")
        path = f"{module}.{attribute}"
        self.names.add(path)
        self.stack.append(Name(path))

    def refer(self, _: Any) -> None:
        self.stack.append(Persistent(self.stack.pop()))
        self.references.append(self.stack[-1].key)

    def call(self, _: Any) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def call_with_names(self, _: Any) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self._call(self.stack.pop(), (args, named))

    def _call(self, what: object, args: object) -> None:
        self.calls.append(Call(what, args))
        self.stack.append(self.calls[-1])

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        self._record().state = state

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self.marked())

    def _extend(self, values: list[Any]) -> None:
        top = self.stack[-1]
        if type(top) is not list:
            raise InvalidInputError("a pickle that appends to what is no list")
        top.extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self, _: Any) -> None:
        self._update(self.marked())

    def _update(self, flat: list[Any]) -> None:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        if type(self.stack[-1]) is dict:
            self.stack[-1].update(pairs)
        else:
            self._record().items += pairs

    def _record(self) -> Call:
        top = self.stack[-1]
        if not isinstance(top, Call):
            raise InvalidInputError(f"a pickle that fills a {type(top).__name__}")
        return top

    def make_list(self, _: Any) -> None:
        items = self.marked()
        self.stack.append(items)

    def make_dict(self, _: Any) -> None:
        flat = self.marked()
        self.stack.append(dict(zip(flat[::2], flat[1::2], strict=True)))

    def make_tuple(self, _: Any) -> None:
        items = self.marked()
        self.stack.append(tuple(items))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise InvalidInputError("a pickle that takes what is not there")
        self.stack[-count:] = [tuple(self.stack[-count:])]


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "STOP": lambda machine, _: None,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.look_up,
    "STACK_GLOBAL": _Machine.look_up_on_stack,
    "BINPERSID": _Machine.refer,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "NEWOBJ_EX": _Machine.call_with_names,
    "BUILD": _Machine.build,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
}
