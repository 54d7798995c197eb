"""What a store's raw objects mean, worked out anew and simply, to hold the engine against.

`Truth` sees every change of the raw objects as it happens, and says at once what must never be: a snapshot without
its packs, a removal of what must stay, a `latest` that goes back.
"""

from __future__ import annotations

from collections import defaultdict

from ckstore import layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreError, NotFoundError
from ckstore.format import records
from ckstore.ids import SaveName

Order = tuple[int, int, str]


def order_of(commit: records.Commit) -> Order:
    save = SaveName.parse(commit.save)
    return commit.epoch, save.sequence, save.nonce


class Truth:
    """Follows the objects of `raw`. `faults` holds what went wrong, in words."""

    def __init__(self, raw: MemoryBackend) -> None:
        self.raw = raw
        self.faults: list[str] = []
        self.commits: dict[SaveName, records.Commit] = {}
        self.relocations: dict[SaveName, records.Relocation] = {}
        self.removed: set[SaveName] = set()
        self.quarantined: set[SaveName] = set()
        self.relocated: set[str] = set()
        self.floor = records.Floor(0, 0, [])
        self.epochs: dict[str, dict[int, Order]] = defaultdict(dict)
        self.tags: dict[str, SaveName] = {}
        self.keep_every: int | None = None
        self.keep_last: int | None = None
        self.may_drop: set[SaveName] = set()
        self.may_force: set[SaveName] = set()
        self.condemned: set[SaveName] = set()
        """Whatever anybody ever condemned."""
        self.moved_back: set[str] = set()
        """Branches whose `latest` somebody moved back on purpose: by an epoch, by hand, or for damage."""
        self._latest: dict[str, Order] = {}
        for name in list(raw._objects):
            self.changed(name)
        self.faults.clear()

    # --- what is

    def live(self) -> dict[SaveName, records.Commit]:
        gone = self.removed
        return {save: commit for save, commit in self.commits.items() if save not in gone and not self.void(save)}

    def void(self, save: SaveName) -> bool:
        return save.sequence < self.floor.sequence and str(save) not in self.floor.live

    def fenced(self, commit: records.Commit) -> bool:
        """Followed back from the newest epoch: each goes on from a base, and all above that base is left behind."""
        epochs = self.epochs[commit.branch]
        number = max(epochs, default=0)
        while commit.epoch < number:
            base = epochs[number]
            if order_of(commit) > base:
                return True
            number = base[0] if base[0] in epochs else max((one for one in epochs if one <= base[0]), default=0)
        return False

    def good(self, branch: str) -> list[records.Commit]:
        """What `latest` may mean, the best last."""
        found = [
            commit
            for save, commit in self.live().items()
            if commit.branch == branch and save not in self.quarantined and not self.fenced(commit)
        ]
        return sorted(found, key=order_of)

    def latest(self, branch: str) -> records.Commit | None:
        return next(reversed(self.good(branch)), None)

    def needed(self) -> dict[str, int | None]:
        """Packs that live snapshots read now, with their sizes where those are recorded."""
        found: dict[str, int | None] = {}
        waiting: list[tuple[str, int | None]] = [
            (pack.name, pack.size) for commit in self.live().values() for pack in commit.packs
        ]
        while waiting:
            name, size = waiting.pop()
            if name in found:
                continue
            if name in self.relocated:
                moves = [moved for record in self.relocations.values() for moved in record.moved]
                waiting += [(moved.new, None) for moved in moves if moved.old == name]
            else:
                found[name] = size
        return found

    # --- what happens

    def changed(self, name: str, actor: str = "") -> None:
        """The raw object `name` was written or deleted."""
        house = name.partition("/")[0]
        data = self.raw._objects.get(name)
        if house == "snapshots":
            self._decided(SaveName.parse(name.partition("/")[2]), data)
        elif house == "marks":
            self._marked(name, data is not None, actor)
        elif house == "epochs" and data is not None:
            self._opened(records.decode(data, records.Epoch, name))
        elif house == "gc" and name.startswith(layout.FLOORS) and data is not None:
            floor = records.decode(data, records.Floor, name)
            self.floor = max(self.floor, floor, key=lambda one: one.number)
        elif house == "tags":
            self.tags.pop(name.partition("/")[2], None)
            if data is not None:
                self.tags[name.partition("/")[2]] = SaveName.parse(records.decode(data, records.Tag, name).snapshot)
        elif house == "packs" and data is None:
            self._check_packs(f"{actor or 'somebody'} deleted {name}", only=name)
        if house in ("snapshots", "marks", "epochs", "gc"):
            self._check_latest()

    def _decided(self, save: SaveName, data: bytes | None) -> None:
        self.commits.pop(save, None)
        self.relocations.pop(save, None)
        if data is None:
            return
        decision = records.decode_decision(data, save, str(save))
        if isinstance(decision, records.Commit):
            self.commits[save] = decision
            self._check_packs(f"save {save.nonce} was committed")
        if isinstance(decision, records.Relocation):
            self.relocations[save] = decision

    def _marked(self, name: str, present: bool, actor: str) -> None:
        save = SaveName.parse(name.split("/")[1])
        fact = name.split("/")[2]
        if fact == "removed" and present and save not in self.removed:
            if save in self.live():
                self._check_removal(save, self.commits[save], actor)
            self.removed.add(save)
        elif fact.startswith("condemned-") and present:
            self.condemned.add(save)
        elif fact.startswith("quarantined") and present:
            self.quarantined.add(save)
            self.moved_back.update(commit.branch for commit in self.commits.values())
        elif fact.startswith("cleared"):
            self.quarantined.discard(save)
        elif fact.startswith("relocated-"):
            self.relocated.add(f"{layout.PACKS}{save}/{fact.removeprefix('relocated-')}")
            self._check_packs(f"{name} was written")

    def _opened(self, epoch: records.Epoch) -> None:
        base = SaveName.parse(epoch.base) if epoch.base else None
        order = (epoch.base_epoch, base.sequence, base.nonce) if base else (-1, 0, "")
        self.epochs[epoch.branch][epoch.number] = order
        self.moved_back.add(epoch.branch)

    # --- what must never be

    def _check_packs(self, when: str, only: str = "") -> None:
        for pack, size in self.needed().items():
            if only in ("", pack):
                try:
                    found = self.raw.stat(pack)
                except NotFoundError:
                    self.faults.append(f"{when}, but a live snapshot needs {pack}")
                    continue
                if size is not None and found != size:
                    self.faults.append(f"{when}, but {pack} has {found} bytes where {size} are recorded")

    def _check_removal(self, save: SaveName, commit: records.Commit, actor: str) -> None:
        what = f"{actor} removed {save.nonce} (step {commit.step}, {commit.branch})"
        good = self.good(commit.branch)
        if save in self.may_force or (save in self.may_drop and good != [commit]):
            self.moved_back.add(commit.branch)
            return
        if good and good[-1].save == str(save):
            self.faults.append(f"{what}, the newest good one of its branch")
        if self.keep_every and commit.step % self.keep_every == 0 and save not in self.quarantined:
            self.faults.append(f"{what}, which keep_every={self.keep_every} keeps")
        if self.keep_last and commit in good[-self.keep_last :]:
            self.faults.append(f"{what}, one of the last {self.keep_last}")

    def _check_latest(self) -> None:
        for branch in {commit.branch for commit in self.commits.values()} | set(self._latest):
            found = self.latest(branch)
            now = order_of(found) if found else (-1, 0, "")
            before = self._latest.get(branch, (-1, 0, ""))
            if now < before and branch not in self.moved_back:
                self.faults.append(f"latest of {branch} went back from {before} to {now}")
            self._latest[branch] = now
        self.moved_back.clear()


def read_tag(raw: MemoryBackend, label: str) -> SaveName | None:
    """The snapshot that a raw tag names, None where there is no such tag."""
    try:
        data = raw.get(layout.tag(label), limit=1 << 20)
        return SaveName.parse(records.decode(data, records.Tag, label).snapshot)
    except CkstoreError:
        return None
