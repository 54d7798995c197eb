"""Names of places in a state, and the patterns that select them.

A path is a tuple of steps: dict keys, list indexes, and `Part`s of a value that is stored in several pieces.
It is spelled with `/` between steps. A str key is bare when it cannot be taken for anything else, otherwise it
stands as a JSON string: `optimizer/state/0/exp_avg`, `tables/"0"`, `odd/"a/b"`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ckstore.errors import InvalidInputError

_BARE = re.compile(r"\w[\w.:+=@#-]*\Z")
_DECIMAL_BITS = 256
_HEXADECIMAL = re.compile(r"0x[0-9a-f]{65,}\Z")
_SPELLED_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]{65,}\Z")
"""An int of over 256 bits; a str that looks so would stand in quotes."""
_WORDS: dict[str, bool | None] = {"None": None, "True": True, "False": False}
_SPELLED_STEP = re.compile(r'b?"(?:[^"\\]|\\.)*"|[^/"]+')
_STEP = re.compile(r'(?:b?"(?:[^"\\]|\\.)*"|[^/"])+')


class Part(str):
    """A step into a value itself, such as the indices of a sparse tensor; spelled `.indices`."""

    __slots__ = ()


Step = None | bool | int | float | complex | str | bytes
Path = tuple[Step, ...]


def spell_step(step: Step) -> str:
    """The spelling of one step; different for different steps of one container."""
    if isinstance(step, Part):
        return "." + step
    if isinstance(step, str):
        return step if _is_bare(step) else json.dumps(step)
    if isinstance(step, bytes):
        return "b" + json.dumps(step.decode("latin-1"))
    return spell_int(step) if type(step) is int else repr(step)


def spell_int(number: int) -> str:
    """Decimal, or hexadecimal where that would be long: Python refuses to spell thousands of decimal digits."""
    return repr(number) if number.bit_length() <= _DECIMAL_BITS else hex(number)


def spell(path: Path) -> str:
    """The spelling of a path; the root is the empty string."""
    return "/".join(map(spell_step, path))


def parse(spelled: str) -> Path:
    """The path that is spelled so."""
    return tuple(_parse_step(text) for text in _SPELLED_STEP.findall(spelled))


def _parse_step(text: str) -> Step:
    if text.startswith('b"'):
        return str(json.loads(text[1:])).encode("latin-1")
    if text.startswith('"'):
        return str(json.loads(text))
    if text.startswith("."):
        return Part(text[1:])
    if text in _WORDS:
        return _WORDS[text]
    if _SPELLED_HEXADECIMAL.match(text):
        return int(text, 16)
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_bare(text: str) -> bool:
    if not _BARE.match(text) or text in _WORDS or _HEXADECIMAL.match(text):
        return False
    try:
        complex(text)
    except ValueError:
        return True
    return False


class Selection:
    """Patterns compiled to step matchers, followed down a tree one step at a time.

    `*` stands for any run of characters within a step, a step `**` for any number of steps. A pattern that
    matches a container selects everything below it. States are opaque; an empty one selects nothing below.
    """

    ALL: frozenset[tuple[int, int]] = frozenset({(-1, 0)})

    def __init__(self, patterns: Sequence[str] | str | None) -> None:
        if isinstance(patterns, str):
            patterns = [patterns]
        self.patterns = None if patterns is None else [_compile(pattern) for pattern in patterns]
        self.spelled = () if patterns is None else tuple(patterns)
        self.matched: set[int] = set()
        """Which patterns have selected something so far."""

    def start(self) -> frozenset[tuple[int, int]]:
        """The state at the root."""
        if self.patterns is None:
            return self.ALL
        return self._settle({(number, 0) for number in range(len(self.patterns))})

    def advance(self, state: frozenset[tuple[int, int]], step: Step) -> frozenset[tuple[int, int]]:
        """The state one step further down."""
        if self.patterns is None or state is self.ALL or not state:
            return state
        spelled = spell_step(step)
        following = set()
        for number, position in state:
            matcher = self.patterns[number][position]
            if matcher is None:
                following.add((number, position))
            elif matcher.match(spelled):
                following.add((number, position + 1))
        return self._settle(following)

    def _settle(self, state: set[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Add what `**` reaches without a step; `ALL` as soon as one pattern has matched."""
        assert self.patterns is not None
        reached, waiting = set(), list(state)
        while waiting:
            number, position = waiting.pop()
            reached.add((number, position))
            pattern = self.patterns[number]
            if position < len(pattern) and pattern[position] is None and (number, position + 1) not in reached:
                waiting.append((number, position + 1))
        done = {number for number, position in reached if position == len(self.patterns[number])}
        self.matched |= done
        return self.ALL if done else frozenset(reached)

    def unmatched(self) -> list[str]:
        """The patterns that have selected nothing."""
        return [text for number, text in enumerate(self.spelled) if number not in self.matched]


def _compile(pattern: str) -> list[re.Pattern[str] | None]:
    if not pattern:
        raise InvalidInputError(f"a pattern is a non-empty string such as 'model/**', not {pattern!r}")
    steps: list[re.Pattern[str] | None] = []
    at = 0
    while True:
        found = _STEP.match(pattern, at)
        if not found:
            raise InvalidInputError(f"pattern {pattern!r} has an empty step or an unbalanced quote at {at}")
        steps.append(_matcher(found[0]))
        at = found.end()
        if at == len(pattern):
            return steps
        if pattern[at] != "/":
            raise InvalidInputError(f"pattern {pattern!r} has an unbalanced quote at {at}")
        at += 1


def _matcher(step: str) -> re.Pattern[str] | None:
    if step == "**":
        return None
    if '"' in step:
        return re.compile(re.escape(_respelled(step)) + r"\Z")
    return re.compile(".*".join(map(re.escape, step.split("*"))) + r"\Z", re.DOTALL)


def _respelled(step: str) -> str:
    """A quoted step as `spell_step` would spell it, so that `"abc"` finds the bare key abc."""
    try:
        if step.startswith("b"):
            return spell_step(json.loads(step[1:]).encode("latin-1"))
        return spell_step(json.loads(step))
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"not a quoted step: {step!r}") from error
