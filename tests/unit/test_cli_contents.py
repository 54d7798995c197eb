"""`show` and `diff` on the command line: what is summed up, what is ranked, and that hostile names stay text."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import ckstore
from ckstore.cli.app import app
from ckstore.cli.changes import Moved, entry_rows, ranked, value_rows
from ckstore.cli.contents import detail
from ckstore.cli.text import count, number
from ckstore.diff import Change
from ckstore.state.capture import capture
from ckstore.state.describe import Entry
from ckstore.state.modules import MAX_DEPTH, depth_for, module_tree
from ckstore.state.movement import Movement
from ckstore.state.training import Weight, training_run
from ckstore.testing.states import decoded

HOSTILE = "\x1b[31mred\x07[bold]\n\u202e:smile:\udc80"


def scalar(path: str, before: object, after: object) -> Change:
    return Change(path, Entry(path, "int", value=str(before)), Entry(path, "int", value=str(after)), True)


def weight(name: str, elements: int = 1, **more: Any) -> Weight:
    given = {"kind": "torch tensor", "dtype": "float32", "shape": (elements,), "use": "", "tied_to": None, **more}
    return Weight(name=name, elements=elements, nbytes=4 * elements, **given)


# --- what is summed up ----------------------------------------------------------------------------


def test_values_that_change_alike_are_one_row() -> None:
    steps = [scalar(f"optimizer/state/{name}/step", 1, 2) for name in "abcde"]
    lone = scalar("optimizer/state/f/step", 1, 3)
    assert value_rows([*steps, lone, scalar("step", 1, 2)]) == [
        ("optimizer/state/*/step", "1", "2 (5 of them)"),
        ("optimizer/state/f/step", "1", "3"),
        ("step", "1", "2"),
    ]
    assert len(value_rows(steps[:4])) == 4


def test_many_values_of_one_list_are_one_row() -> None:
    losses = [scalar(f"losses/{i}", i, i + 1) for i in range(6)]
    assert value_rows(losses) == [("losses/*", "0, …", "1, … (6 values)")]
    assert value_rows(losses[:2]) == [("losses/0", "0", "1"), ("losses/1", "1", "2")]
    entries = [one.before for one in losses]
    assert entry_rows(entries) == [("losses/*", "int 0, … (6 values)")]
    assert entry_rows(entries[:2]) == [("losses/0", "int 0"), ("losses/1", "int 1")]
    tensors = [Entry(f"w/{i}", "numpy array", "float32", (3,)) for i in range(6)]
    assert entry_rows(tensors)[5] == ("w/5", "numpy array float32 [3]")


def test_floats_rank_before_integers_and_by_what_is_asked() -> None:
    def one(path: str, kind: str, norm: float, before: float, largest: float) -> Moved:
        return Moved(path, Entry(path, "", ""), Movement(kind, 9, 9, norm, before, largest))

    tensors = [
        one("rng", "int", 1e9, 1.0, 1e9),
        one("far", "float", 5.0, 100.0, 0.5),
        one("relatively", "complex", 1.0, 0.1, 0.1),
        one("spike", "float", 3.0, 30.0, 3.0),
        one("from zero", "float", 0.1, 0.0, 0.1),
    ]
    order = {by: [moved.path for moved in ranked(tensors, by)] for by in ("norm", "relative", "largest")}
    assert order["norm"] == ["far", "spike", "relatively", "from zero", "rng"]
    assert order["relative"] == ["from zero", "relatively", "spike", "far", "rng"]
    assert order["largest"] == ["spike", "far", "from zero", "relatively", "rng"]


def test_plurals_and_numbers() -> None:
    assert [count(2, noun) for noun in ("key", "entry", "branch", "value")] == [
        "2 keys",
        "2 entries",
        "2 branches",
        "2 values",
    ]
    shown = {0.00025: "0.00025", 1e-8: "1e-08", 1234567.0: "1.23457e+06", math.inf: "inf"}
    assert {value: number(value) for value in shown} == shown


# --- modules --------------------------------------------------------------------------------------


def test_modules_are_those_of_the_names() -> None:
    tied = weight("head.weight", 6, tied_to="embed.weight", use="trained")
    weights = [weight("embed.weight", 6, use="trained"), weight("h.0.w", 2), weight("h.1.w", 3, dtype="float16"), tied]
    root = module_tree(weights)
    assert (root.elements, root.nbytes, root.uses) == (11, 44, {"trained": 6, "": 5})
    assert [(one.name, one.depth, one.elements) for one in root.walk(9)] == [
        ("embed", 1, 6), ("weight", 2, 6), ("h", 1, 5), ("0", 2, 2), ("w", 3, 2), ("1", 2, 3), ("w", 3, 3),
        ("head", 1, 0), ("weight", 2, 0),
    ]  # fmt: skip
    assert root.inner["h"].dtypes == {"float32", "float16"}
    assert [sum(1 for _ in root.walk(depth)) for depth in (1, 2, 3)] == [3, 7, 9]
    assert [depth_for(root, rows) for rows in (1, 3, 6, 7, 8, 9, 99)] == [1, 1, 1, 2, 2, 3, 3]


def test_a_name_of_many_dots_is_cut() -> None:
    root = module_tree([weight("a." * 100_000 + "b")])
    assert sum(1 for _ in root.walk(10**6)) == MAX_DEPTH
    assert depth_for(root, 10**6) == MAX_DEPTH


@pytest.mark.parametrize(
    "state",
    [
        7,
        {},
        {"model": {"w": np.ones(3)}, "step": 3},
        {"layout": "1", "step": 1, "metrics": {}, "mappings": []},
        {"layout": 1, "step": 1.0, "metrics": {}, "mappings": []},
        {"layout": 1, "step": True, "metrics": {}, "mappings": []},
        {"layout": 1, "step": 1, "metrics": {}, "mappings": {}},
        {"layout": 1, "step": 1, "mappings": []},
    ],
)
def test_another_state_is_no_run(state: Any) -> None:
    captured = capture(state, chunk_size=4096)
    assert training_run(decoded(captured), captured.order) is None


ODD = {
    "layout": 99,
    "step": 1,
    "metrics": {HOSTILE: np.float32(2), "n": 10**400},
    "mappings": ["model", 3, HOSTILE],
    "frozen": 7,
    "model": {"a": np.ones(2), HOSTILE: {HOSTILE: np.ones(3), "deep": [{"x": np.ones(4)}], "text": "y" * 5000}},
    "optimizer": {"kind": [1], "groups": {"x": {"params": 3, HOSTILE: HOSTILE}, "y": 5}, "state": "none"},
    "scheduler": [1, 2],
    "dataloader": 4,
    "rng": [b"x"],
    "extra": 5,
    HOSTILE: np.ones(1),
    b"key": 1,
}


def test_a_run_that_is_built_oddly_is_told_as_far_as_it_goes() -> None:
    captured = capture(ODD, chunk_size=4096)
    run = training_run(decoded(captured), captured.order)
    assert run is not None
    assert [model.name for model in run.models] == ["a", HOSTILE]
    assert [(one.name, one.elements, one.nbytes) for one in run.models[1].weights] == [
        (HOSTILE, 3, 24),
        ("deep", 4, 32),
        ("text", 0, 5000),
    ]
    assert [(one.kind, len(one.groups), one.with_state) for one in run.optimizers] == [("(list)", 2, 0)]
    assert [one.name for one in run.others] == [HOSTILE, 'b"key"']


# --- the commands ---------------------------------------------------------------------------------


class Shell:
    """The command line on a store of two snapshots."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.env = {"CKSTORE_CACHE": str(place.parent / "cache"), "CKSTORE_STORE": None, "COLUMNS": "200"}

    def save(self, *states: Any) -> None:
        with ckstore.open(self.place, create=True, cache_dir=self.place.parent / "cache", chunk_size=4096) as store:
            for step, state in enumerate(states, 1):
                store.save(state, step=step)

    def run(self, command: str, *words: str) -> Result:
        return CliRunner().invoke(app, [command, str(self.place), *words], env=self.env)

    def lines(self, command: str, *words: str) -> list[str]:
        found = self.run(command, *words)
        assert (found.exit_code, found.stderr) == (0, "")
        return found.stdout.splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "store")


def test_what_is_not_finite_is_shown(shell: Shell) -> None:
    before = {"m": {"w": np.array([1.0, np.nan, 3.0]), "same": np.array([np.inf])}}
    shell.save(before, {"m": {**before["m"], "w": np.array([np.nan, np.nan, np.inf])}})
    lines = [line.split() for line in shell.lines("diff", "1", "2", "--deep")]
    assert ["~", "m/w", "float64", "[3]", "0", "0", "0", "1→2", "0→1"] in lines
    assert ["!", "m/same", "0", "1"] in lines
    assert ["!", "m/w", "2", "1"] in lines
    census = json.loads("\n".join(shell.lines("diff", "1", "2", "--deep", "--json")))["census"]
    assert census == {
        "tensors": 2,
        "elements": 4,
        "not_finite": [{"path": "m/same", "nan": 0, "inf": 1}, {"path": "m/w", "nan": 2, "inf": 1}],
    }
    assert "NOT FINITE" not in shell.run("diff", "1", "2").stdout
    finite = shell.run("diff", "1", "1", "--deep").stdout
    assert "NOT FINITE IN AFTER" in finite


def test_forms_are_shown_before_and_after(shell: Shell) -> None:
    rows = np.arange(6.0).reshape(2, 3)
    before = {"a": np.zeros(2, "f4"), "b": rows, "c": [1], "d": 1}
    shell.save(before, {"a": np.zeros(2, "f2"), "b": np.asfortranarray(rows), "c": (1,), "d": "1"})
    lines = [line.split(maxsplit=2) for line in shell.lines("diff", "1", "2") if line.startswith("~")]
    assert [(path, " ".join(what.split())) for _, path, what in lines] == [
        ("a", "numpy array float32 [2] numpy array float16 [2]"),
        ("b", "numpy array float64 [2, 3] in another order in memory"),
        ("d", "int 1 str '1'"),
        ("c", "list tuple"),
    ]


def test_top_by_and_values_choose_what_is_listed(shell: Shell) -> None:
    draw = np.random.default_rng(1)
    before = {f"w{i}": draw.standard_normal(9) for i in range(20)}
    shell.save(before, {key: value * (1 + int(key[1:]) / 10) for key, value in before.items()})

    def listed(*words: str) -> list[str]:
        return [line.split()[1] for line in shell.lines("diff", "1", "2", *words) if line.startswith("~  w")]

    # Each is also a part of the state, which has a row of its own among the sums.
    assert len(listed()) == 15 + 19
    assert listed("--top", "2", "--by", "relative")[:2] == ["w19", "w18"]
    assert len(listed("--top", "0")) == 19 + 19
    rows = [line.split() for line in shell.lines("diff", "1", "2", "--no-values") if line.startswith("~")]
    assert len(rows) == 19
    assert rows[0][1:] == ["w1", "numpy", "array", "float64", "[9]", "another", "content"]


def test_of_several_ranks_the_lowest_is_shown(shell: Shell) -> None:
    shell.save({**ODD, "model": {"a": {"w": np.ones(3)}}})
    with ckstore.open(shell.place, cache_dir=shell.place.parent / "cache") as store:
        found = store.show()
    page = Console(file=io.StringIO(), width=100)
    several = replace(found, ranks=(0, 1, 2), runs={2: replace(found.runs[0], models=()), 1: found.runs[0]})
    detail(page, several, None, None)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    assert ["ranks", "3"] in [line.split() for line in shown.splitlines()]
    assert "rank 1 of 3" in shown
    assert "model a: 3 elements in 1 tensor, 24 B" in shown


def test_what_is_tied_counts_once_in_sums(shell: Shell) -> None:
    def state(value: float) -> dict[str, Any]:
        whole = np.full(4, value)
        return {"m": {"a": whole, "b": whole}}

    shell.save(state(1.0), state(2.0))
    rows = [line.split() for line in shell.lines("diff", "1", "2") if line.startswith("~")]
    assert rows[-1] == ["~", "m", "1", "4", "of", "4", "2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--by", "size"), "--by is one of norm, relative, largest, not 'size'"),
        (("--deep", "--no-values"), "--deep reads values"),
    ],
)
def test_wrong_options_are_refused(shell: Shell, words: tuple[str, ...], says: str) -> None:
    shell.save({"w": 1}, {"w": 2})
    found = shell.run("diff", "1", "2", *words)
    assert (found.exit_code, found.stdout) == (2, "")
    assert says in found.stderr


def test_damage_ends_the_comparison_with_its_code_and_the_path(shell: Shell) -> None:
    draw = np.random.default_rng(1)
    shell.save({"m": {"w": draw.standard_normal(4000)}}, {"m": {"w": draw.standard_normal(4000)}})
    for pack in (shell.place / "packs").rglob("0-0"):
        data = bytearray(pack.read_bytes())
        data[5000] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    found = shell.run("diff", "1", "2")
    assert (found.exit_code, found.stdout) == (4, "")
    assert "(needed by m/w)" in found.stderr
    assert shell.run("diff", "1", "2", "--no-values").exit_code == 0


def test_an_odd_run_and_hostile_names_are_shown_as_text(shell: Shell) -> None:
    other = {**ODD, "step": 2, "model": {"a": np.zeros(2), HOSTILE: {HOSTILE: np.zeros(3)}}, HOSTILE: np.zeros(1)}
    shell.save(ODD, other, {HOSTILE: {HOSTILE: np.ones(3), "long" * 99: HOSTILE}})
    shows = [["show", "1"], ["show", "3"], ["show", "3", "--depth", "1"], ["show", "3", "-k", "**"]]
    for words in (*shows, ["diff", "1", "2", "--deep"], ["diff", "2", "3"]):
        found = shell.run(*words)
        assert (found.exit_code, found.stderr) == (0, ""), words
        assert [char for char in ("\x1b", "\x07", "\u202e", "\udc80") if char in found.stdout] == []
        assert "[31mred" in found.stdout
        assert max(map(len, found.stdout.splitlines())) <= 1000
        assert json.loads(shell.run(*words, "--json").stdout)
