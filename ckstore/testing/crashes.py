"""What a crash of the machine could leave of a `SimFs`, after any prefix of its log.

The model asks for nothing that POSIX does not promise:
- bytes of a file written since its last fsync may be absent, zeroed or torn; bytes fsynced stay;
- an entry (create, rename, link, unlink, mkdir, rmdir) since the last fsync of its directory may have reached the
  disk or not, in any subset; a rename is one such entry, of the directory it leads to, and takes the old name away
  at the same instant;
- an fsync of a file says nothing about its name, one of a directory nothing about that directory's own name.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from ckstore.testing.simfs import ROOT, Change, Image, Operation, SimFs

Tear = Callable[[str, bytes, bytes], Sequence[bytes]]
"""From a path, the bytes last fsynced and the bytes written since, to what may be found after a crash."""

PAGE = 4096


def torn(path: str, durable: bytes, current: bytes) -> Sequence[bytes]:
    """Whole, as last fsynced, absent, zeroed, or cut at the first, middle and last byte and at pages.

    A cut leaves either a shorter file or zeros behind it; at a page also zeros before it, as pages reach the disk in
    any order. Of many pages the first and last four are taken. Bytes fsynced earlier stay.
    """
    size = len(current)
    kept = len(durable)
    pages = list(range(PAGE, size, PAGE))
    cuts = {1, size // 2, size - 1, *pages[:4], *pages[-4:]}
    found = [current, durable]
    if kept == 0:
        found += [b"", bytes(size)]
    for cut in sorted(cut for cut in cuts if kept <= cut < size and cut > 0):
        found += [current[:cut], current[:cut] + bytes(size - cut)]
        if cut % PAGE == 0:
            found.append(durable + bytes(cut - kept) + current[cut:])
    if kept:
        found += [current[:cut] + durable[cut:] for cut in sorted(cuts) if 0 < cut < kept]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class CrashRules:
    """How states are enumerated.

    `ignore`: fsyncs that shall have no effect, by ordinal (from 0, in the order of the log) or by predicate.
    `tear`: what may be left of bytes not fsynced. `together`: operations with the same key (not None) reach the disk
    all or none, which keeps names that nobody depends on from multiplying the states. Up to `exhaustive` pending
    entries every subset is taken, above it `samples` of them; of combinations of torn files at most `combinations`.
    """

    ignore: Collection[int] | Callable[[int, Operation], bool] = ()
    tear: Tear = torn
    together: Callable[[Operation], Hashable] = lambda operation: None
    exhaustive: int = 8
    samples: int = 128
    combinations: int = 64


@dataclass(slots=True)
class CrashCounts:
    """What was enumerated: `states` distinct ones out of `candidates`, from `prefixes`; `sampled` of these had too
    many pending entries, and `combined` subsets too many torn files, to be taken whole."""

    prefixes: int = 0
    candidates: int = 0
    states: int = 0
    sampled: int = 0
    combined: int = 0

    def __str__(self) -> str:
        caps = f"{self.sampled} prefixes sampled, {self.combined} subsets with torn files sampled"
        return f"{self.states} distinct of {self.candidates} crash states after {self.prefixes} prefixes ({caps})"


def crash_states(fs: SimFs, prefix: int, rules: CrashRules | None = None) -> Iterator[SimFs]:
    """Every distinct state that a crash could leave after the first `prefix` operations of `fs.log`."""
    return CrashExplorer(fs, rules).after(prefix)


class CrashExplorer:
    """Enumerates crash states of one run; none is given twice, whatever prefix it comes from."""

    def __init__(self, fs: SimFs, rules: CrashRules | None = None) -> None:
        self.rules = rules or CrashRules()
        self.counts = CrashCounts()
        self._fs = fs
        self._log = list(fs.log)
        self._disk = _Disk(fs.start)
        self._done = 0
        self._fsyncs = 0
        self._seen: set[bytes] = set()
        self._whole: dict[int, _Content] = {}
        self._variants: dict[int, tuple[str, bytes, list[_Content]]] = {}

    @property
    def length(self) -> int:
        """How many operations the log had; prefixes run from 0 to this."""
        return len(self._log)

    def all(self) -> Iterator[tuple[int, SimFs]]:
        """Each distinct state with the first prefix that it can follow."""
        for prefix in range(self._done, len(self._log) + 1):
            for state in self.after(prefix):
                yield prefix, state

    def after(self, prefix: int) -> Iterator[SimFs]:
        """The states after `prefix` operations that were not given before (see `forget`). Prefixes must not fall."""
        if not self._done <= prefix <= len(self._log):
            raise ValueError(f"prefix {prefix} is not between {self._done} and {len(self._log)}")
        while self._done < prefix:
            self._replay(self._log[self._done])
            self._done += 1
        self.counts.prefixes += 1
        for pending in self._subsets():
            directories = self._disk.with_changes(pending)
            paths = _paths(directories)
            for contents in self._contents(paths):
                self.counts.candidates += 1
                if self._is_new(paths, contents):
                    self.counts.states += 1
                    files = {inode: content.data for inode, content in contents.items()}
                    yield SimFs(Image(directories, files), capacity=self._fs.capacity)

    def forget(self) -> None:
        """Give states anew from here on: more is expected of the same state once something was acknowledged."""
        self._seen.clear()

    def _replay(self, operation: Operation) -> None:
        if operation.verb == "fsync":
            ordinal, self._fsyncs = self._fsyncs, self._fsyncs + 1
            ignore = self.rules.ignore
            if ignore(ordinal, operation) if callable(ignore) else ordinal in ignore:
                return
        self._disk.apply(operation, self.rules.together(operation))

    def _subsets(self) -> Iterator[list[_Pending]]:
        """Which pending entries reached the disk, each in the order of the log."""
        pending = self._disk.pending
        keys = [
            ("alone", number) if entry.key is None else ("together", entry.key) for number, entry in enumerate(pending)
        ]
        groups = list(dict.fromkeys(keys))
        if len(groups) <= self.rules.exhaustive:
            choices: Sequence[tuple[bool, ...]] = list(itertools.product((True, False), repeat=len(groups)))
        else:
            self.counts.sampled += 1
            choices = _sample(len(groups), self.rules.samples, seed=self._done)
        for choice in choices:
            taken = set(itertools.compress(groups, choice))
            yield [entry for entry, key in zip(pending, keys, strict=True) if key in taken]

    def _contents(self, paths: dict[str, int]) -> Iterator[dict[int, _Content]]:
        """Bytes of every reachable file, in every combination of what a crash may leave of the dirty ones."""
        files = {inode: path for path, inode in paths.items() if inode in self._disk.files}
        dirty = [inode for inode in files if self._disk.is_dirty(inode)]
        whole = {inode: self._fsynced(inode) for inode in files}
        if not dirty:
            yield whole
            return
        variants = [self._torn(files[inode], inode) for inode in dirty]
        if math.prod(len(found) for found in variants) <= self.rules.combinations:
            chosen: Iterator[tuple[_Content, ...]] = itertools.product(*variants)
        else:
            self.counts.combined += 1
            chosen = _one_at_a_time(variants)
        for contents in chosen:
            yield whole | dict(zip(dirty, contents, strict=True))

    def _fsynced(self, inode: int) -> _Content:
        data = self._disk.files[inode]
        known = self._whole.get(inode)
        if known is None or known.data is not data:
            known = self._whole[inode] = _Content.of(data)
        return known

    def _torn(self, path: str, inode: int) -> list[_Content]:
        current = self._disk.current(inode)
        known = self._variants.get(inode)
        if known is None or known[0] != path or known[1] is not current:
            found = [_Content.of(data) for data in self.rules.tear(path, self._disk.files[inode], current)]
            known = self._variants[inode] = (path, current, found)
        return known[2]

    def _is_new(self, paths: dict[str, int], contents: Mapping[int, _Content]) -> bool:
        parts = []
        for path, inode in sorted(paths.items()):
            content = contents.get(inode)
            parts += [path.encode(), b"\0directory" if content is None else content.digest]
        found = blake3(b"\0".join(parts)).digest()
        if found in self._seen:
            return False
        self._seen.add(found)
        return True


@dataclass(frozen=True, slots=True)
class _Content:
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> _Content:
        return cls(data, b"\0file" + blake3(data).digest())


@dataclass(slots=True)
class _Pending:
    """Entries that an fsync of directory `home` makes durable."""

    home: int
    changes: tuple[Change, ...]
    key: Hashable


class _Disk:
    """What is durable and what is pending, as operations are replayed."""

    def __init__(self, image: Image) -> None:
        self.directories: dict[int, dict[str, int]] = {inode: dict(found) for inode, found in image.directories.items()}
        self.files: dict[int, bytes] = dict(image.files)
        self.pending: list[_Pending] = []
        self._written: dict[int, bytearray] = {}
        self._current: dict[int, bytes] = {}

    def is_dirty(self, inode: int) -> bool:
        return inode in self._written

    def current(self, inode: int) -> bytes:
        """The bytes of a dirty file; the same object until it is written again."""
        if inode not in self._current:
            self._current[inode] = bytes(self._written[inode])
        return self._current[inode]

    def apply(self, operation: Operation, key: Hashable) -> None:
        """Take in the next operation of the log."""
        if operation.verb == "write":
            self._write(operation.inode, operation.offset, operation.data)
        elif operation.verb == "resize":
            content = self._dirty(operation.inode)
            del content[operation.size :]
            content.extend(bytes(operation.size - len(content)))
        elif operation.verb == "fsync" and operation.inode in self.files:
            self._fsync_file(operation.inode)
        elif operation.verb == "fsync":
            self._make_durable(lambda entry: entry.home == operation.inode)
        elif operation.verb == "sync":
            self._make_durable(lambda entry: True)
            for inode in list(self._written):
                self._fsync_file(inode)
        else:
            self._enter(operation, key)

    def with_changes(self, pending: list[_Pending]) -> dict[int, Mapping[str, int]]:
        """The directories once the entries of `pending` have reached the disk too."""
        found: dict[int, Mapping[str, int]] = dict(self.directories)
        copied: dict[int, dict[str, int]] = {}
        for entry in pending:
            for directory, name, inode in entry.changes:
                if directory not in copied:
                    found[directory] = copied[directory] = dict(self.directories[directory])
                _set(copied[directory], name, inode)
        return found

    def _enter(self, operation: Operation, key: Hashable) -> None:
        if operation.verb == "mkdir":
            self.directories[operation.inode] = {}
        elif operation.verb == "create":
            self.files[operation.inode] = b""
        home = operation.changes[-1][0]  # of a rename: where it leads to
        self.pending.append(_Pending(home, operation.changes, key))

    def _dirty(self, inode: int) -> bytearray:
        self._current.pop(inode, None)
        if inode not in self._written:
            self._written[inode] = bytearray(self.files[inode])
        return self._written[inode]

    def _write(self, inode: int, offset: int, data: bytes) -> None:
        content = self._dirty(inode)
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data

    def _fsync_file(self, inode: int) -> None:
        if inode in self._written:
            self.files[inode] = self.current(inode)
            del self._written[inode], self._current[inode]

    def _make_durable(self, wanted: Callable[[_Pending], bool]) -> None:
        kept: list[_Pending] = []
        for entry in self.pending:
            if not wanted(entry):
                kept.append(entry)
                continue
            for directory, name, inode in entry.changes:
                self.directories[directory] = entries = dict(self.directories[directory])  # states share the old one
                _set(entries, name, inode)
                # What happened to this name before is settled by what happened last.
                for earlier in kept:
                    earlier.changes = tuple(change for change in earlier.changes if change[:2] != (directory, name))
        self.pending = [entry for entry in kept if entry.changes]


def _set(entries: dict[str, int], name: str, inode: int | None) -> None:
    if inode is None:
        entries.pop(name, None)
    else:
        entries[name] = inode


def _paths(directories: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Every path that leads to something, with its inode; directories end with `/`."""
    found = {}
    waiting = [("/", ROOT)]
    while waiting:
        above, directory = waiting.pop()
        for name, inode in directories[directory].items():
            if inode in directories:
                found[f"{above}{name}/"] = inode
                waiting.append((f"{above}{name}/", inode))
            else:
                found[above + name] = inode
    return found


def _sample(count: int, samples: int, *, seed: int) -> list[tuple[bool, ...]]:
    """Subsets to try where all would be too many: every journal order, one missing, one alone, then by lot."""
    numbers = range(count)
    found = [tuple(number < length for number in numbers) for length in range(count, -1, -1)]
    found += [tuple(number != missing for number in numbers) for missing in numbers]
    found += [tuple(number == alone for number in numbers) for alone in numbers]
    lots = random.Random(seed)
    while len(found) < samples:
        found.append(tuple(lots.random() < 0.5 for _ in numbers))
    return list(dict.fromkeys(found))


def _one_at_a_time(variants: Sequence[Sequence[_Content]]) -> Iterator[tuple[_Content, ...]]:
    """Each variant of each file, with all others as they are at their best (first) and as last fsynced (second)."""
    for base in (0, 1):
        basis = [found[min(base, len(found) - 1)] for found in variants]
        yield tuple(basis)
        for number, found in enumerate(variants):
            for variant in found:
                yield (*basis[:number], variant, *basis[number + 1 :])
