"""The command line: what it prints, how it ends, and that nothing out of a store is taken for more than text."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import ckstore
from ckstore import errors
from ckstore.announce import announced, pinned
from ckstore.backend.local import LocalBackend
from ckstore.cli import exits, meter, places, text
from ckstore.cli.app import app
from ckstore.cli.stores import parse_size
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.process import _start_of, current_owner
from ckstore.state.paths import Part, parse, spell
from ckstore.store import Store

COMMANDS = [
    "init", "status", "ls", "show", "diff", "tag", "quarantine", "clear", "verify", "prune", "gc", "copy", "import",
    "export", "replicate", "promote",
]  # fmt: skip
HOSTILE = "\x1b[31mred\x07[bold]\n\u202e:smile:\udc80"
ESCAPED = "\\x1b[31mred\\x07[bold]\\n\\u202e:smile:\\udc80"


@dataclass
class Shell:
    """A store with three snapshots, and the command line on it."""

    place: Path
    cache: Path

    def run(self, *words: object, env: Mapping[str, str | None] | None = None) -> Result:
        clean = {"CKSTORE_CACHE": str(self.cache), "CKSTORE_STORE": None, "NO_COLOR": None, "COLUMNS": "200"}
        return CliRunner().invoke(app, [str(word) for word in words], env={**clean, **(env or {})})

    def json(self, *words: object, code: int = 0) -> Any:
        found = self.run(*words, "--json")
        assert (found.exit_code, found.stderr) == (code, "")
        return json.loads(found.stdout)

    def open(self) -> Store:
        return ckstore.open(self.place, create=True, cache_dir=self.cache)

    def process(self, *words: object, code: str = "", **options: Any) -> subprocess.Popen[bytes]:
        """The command line in a process of its own, after the statements `code`."""
        script = f"{code}\nimport sys\nfrom ckstore.cli.main import main\nmain()"
        env = {**os.environ, "CKSTORE_CACHE": str(self.cache), "COLUMNS": "200", "PYTHONWARNINGS": "error"}
        env.pop("CKSTORE_STORE", None)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], env=env, **streams)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three snapshots, to be copied."""
    made = Shell(tmp_path_factory.mktemp("template") / "gpt", tmp_path_factory.mktemp("cache"))
    embed, head = np.arange(100_000, dtype="f4"), np.arange(50_000, dtype="f4")
    with made.open() as store:
        for step in (100, 200, 300):
            state: dict[str, Any] = {
                "model": {"embed": embed, "head": head * step},
                "step": step,
                "lr": 0.5,
                "note": "same",
            }
            if step == 300:
                state["extra"] = [1]
            store.save(state, step=step, tags=["best"] if step == 200 else [], meta={"loss": 4 - step / 100})
    return made.place


@pytest.fixture
def shell(template: Path, tmp_path: Path) -> Shell:
    shutil.copytree(template, tmp_path / "gpt")
    return Shell(tmp_path / "gpt", tmp_path / "cache")


def flip_a_byte(place: Path, save: SaveName) -> None:
    pack = place / "packs" / str(save) / "0-0"
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)


def save_of(shell: Shell, ref: str) -> SaveName:
    with shell.open() as store:
        _, sequence, nonce = store.resolve(ref).order
    return SaveName(sequence, nonce)


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1023 * 1024, "1023 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (1 << 60, "1.00 EiB"),
        (1 << 71, "2048 EiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(count: int, shown: str) -> None:
    assert text.size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "now"),
        (59, "59 s"),
        (61, "1 min"),
        (7200, "2 h"),
        (86400 * 6, "6 d"),
        (86400 * 400, "1 y"),
        (-300, "in 5 min"),
    ],
)
def test_ages(seconds: int, shown: str) -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert text.age(now - dt.timedelta(seconds=seconds), now) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0123, "0.012 s"), (4.56, "4.6 s"), (59.9, "60 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_what_is_not_printable_is_escaped_and_the_rest_is_left_alone() -> None:
    assert text.plain(HOSTILE) == ESCAPED
    assert text.plain("naïve/模型/é 🙂") == "naïve/模型/é 🙂"
    assert text.clipped("x" * 50, 10) == "x" * 9 + "…"


# --- which word is the store ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fewest", "most", "option", "environment", "found"),
    [
        (["a"], 0, 0, None, None, ("a", ())),
        (["a", "latest"], 0, 1, None, None, ("a", ("latest",))),
        (["latest"], 0, 1, "s", None, ("s", ("latest",))),
        (["latest"], 0, 1, "s", "e", ("s", ("latest",))),
        ([], 0, 1, None, "e", ("e", ())),
        (["latest"], 0, 1, None, "e", ("e", ("latest",))),
        (["./a"], 0, 1, None, "e", ("./a", ())),
        (["."], 0, 1, None, "e", (".", ())),
        (["a", "latest"], 0, 1, None, "e", ("a", ("latest",))),
        (["a"], 0, 0, None, "e", ("a", ())),
        (["1", "2"], 2, 2, None, "e", ("e", ("1", "2"))),
        (["a", "1", "2"], 2, 2, None, "e", ("a", ("1", "2"))),
    ],
)
def test_which_word_is_the_store(
    words: list[str], fewest: int, most: int, option: str | None, environment: str | None, found: object
) -> None:
    assert places.split(words, fewest, most, option, environment) == found


@pytest.mark.parametrize(
    ("words", "fewest", "most", "message"),
    [([], 0, 1, "which store"), (["a", "b"], 0, 0, "unexpected argument 'b'"), (["a", "b"], 2, 2, "2 arguments")],
)
def test_too_few_and_too_many_words_are_refused(words: list[str], fewest: int, most: int, message: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        places.split(words, fewest, most, None, None)


def test_the_environment_names_the_store_and_the_cache(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []

    def watched(place: str, create: bool, *, cache_dir: str | None) -> Store:
        caches.append(cache_dir)
        return ckstore.open(place, create, cache_dir=cache_dir)

    monkeypatch.setattr("ckstore.store.open_store", watched)
    env = {"CKSTORE_STORE": str(shell.place)}
    found = shell.run("show", "200", "--json", env=env)
    assert json.loads(found.stdout)["snapshot"]["step"] == 200
    assert shell.run("ls", "-s", shell.place.with_name("none"), env=env).exit_code == 3
    shell.run("ls", env={**env, "CKSTORE_CACHE": ""})
    assert caches == [str(shell.cache), str(shell.cache), None]


# --- exit codes -----------------------------------------------------------------------------------


def all_errors(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for below in kind.__subclasses__():
        yield below
        yield from all_errors(below)


def test_every_error_has_a_documented_code() -> None:
    made = {kind: kind.__new__(kind) for kind in all_errors(errors.CkstoreError)}
    codes = {kind.__name__: exits.code_of(error) for kind, error in made.items() if kind.__module__ == errors.__name__}
    assert codes == {
        "NotFoundError": 3,
        "ConflictError": 6,
        "FencedError": 6,
        "NotSavedError": 6,
        "SaveFailedError": 5,
        "CommittedUnderReplicatedError": 5,
        "InvalidInputError": 2,
        "UnsupportedTypeError": 2,
        "MismatchError": 2,
        "FormatError": 7,
        "CorruptionError": 4,
        "BackendError": 5,
        "NoSpaceError": 5,
    }
    assert set(codes.values()) | {0, 1, exits.BUG, exits.INTERRUPTED} == set(exits.MEANING)
    assert exits.code_of(RuntimeError()) == exits.BUG


def test_help_lists_the_commands_and_the_exit_codes(shell: Shell) -> None:
    found = shell.run("--help")
    assert found.exit_code == 0
    for code, meaning in exits.MEANING.items():
        assert f"  {code:<4} {meaning}\n" in found.stdout
    assert shell.run().stdout == shell.run("-h").stdout == found.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(shell: Shell, name: str) -> None:
    found = shell.run(name, "-h")
    assert found.exit_code == 0
    assert f"$ ckstore {name}" in found.stdout
    assert "--json" in found.stdout
    assert shell.run(name, "--help").stdout == found.stdout


def test_the_documentation_names_every_command_and_code() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"### {name}" not in documented] == []
    assert [code for code, meaning in exits.MEANING.items() if f"| {code} | {meaning} |" not in documented] == []


def newer(place: Path) -> None:
    config = records.decode((place / "config").read_bytes(), records.Config, "config")
    (place / "config").unlink()
    (place / "config").write_bytes(records.encode(msgspec.structs.replace(config, format=99)))


def a_file_in_its_place(place: Path) -> None:
    place.rename(place.with_suffix(".old"))
    place.write_bytes(b"")


def damaged_config(place: Path) -> None:
    data = (place / "config").read_bytes()
    (place / "config").unlink()
    (place / "config").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def no_config(place: Path) -> None:
    (place / "config").unlink()


@pytest.mark.parametrize(
    ("words", "damage", "code", "message"),
    [
        (["ls", "--bogus"], None, 2, "No such option: --bogus; `ckstore ls -h` shows the usage"),
        (["lss"], None, 2, "No such command 'lss'"),
        (["prune", "STORE", "--keep-last", "x"], None, 2, "Invalid value for '--keep-last'"),
        (["prune", "STORE"], None, 2, "say what to keep"),
        (["prune", "STORE", "--keep-within", "1y"], None, 2, "not a length of time"),
        (["prune", "STORE", "--drop", "100", "--keep-last", "1"], None, 2, "--drop REF stands alone"),
        (["prune", "STORE", "--force", "--keep-last", "1"], None, 2, "--force goes with --drop"),
        (["prune", "STORE", "--drop", "nope"], None, 3, "no snapshot 'nope'"),
        (["quarantine", "STORE", "100"], None, 2, "--reason"),
        (["tag", "STORE", "-d"], None, 2, "--delete takes the name of one tag"),
        (["tag", "STORE", "-d", "nope"], None, 3, "there is no tag 'nope'"),
        (["tag", "STORE", "a/b"], None, 2, "not a valid name"),
        (["show", "STORE", "nope"], None, 3, "no snapshot 'nope'"),
        (["show", "STORE", "--keys", "nope"], None, 3, "no path matches nope"),
        (["show", "STORE", "--keys", "a//b"], None, 2, "empty step"),
        (["ls", "STORE.none"], None, 3, "there is no store at"),
        (["ls", "xyz://bucket"], None, 2, "no storage is known for xyz"),
        (["ls", "STORE"], a_file_in_its_place, 2, "is not a directory"),
        (["ls", "STORE"], damaged_config, 4, "config"),
        (["ls", "STORE"], newer, 7, "has format 99"),
        (["init", "STORE"], no_config, 7, "damaged, not new"),
        (["init", "STORE", "--chunk-size", "1MiB"], None, 6, "already"),
        (["init", "STORE.new", "--chunk-size", "1MB"], None, 2, "not a size"),
        (["init", "STORE.new", "--chunk-size", "5"], None, 2, "multiple of 4096"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_a_code(
    shell: Shell, words: list[str], damage: Callable[[Path], None] | None, code: int, message: str
) -> None:
    if damage:
        damage(shell.place)
    found = shell.run(*(word.replace("STORE", str(shell.place)) for word in words))
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (code, "", 1)
    assert found.stderr.startswith("error: ")
    assert message in found.stderr


def test_a_traceback_is_shown_only_with_debug(shell: Shell) -> None:
    missing = shell.place.with_name("none")
    assert "Traceback" not in shell.run("ls", missing).stderr
    for words in (["ls", missing, "--debug"], ["--debug", "ls", missing]):
        found = shell.run(*words)
        assert found.exit_code == 3
        assert "Traceback (most recent call last):" in found.stderr
        assert found.stderr.splitlines()[-1].startswith("error: there is no store")


def test_a_fault_of_ours_says_so_in_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(store: Store) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(Store, "status", fault)
    found = shell.run("status", shell.place)
    assert (found.exit_code, found.stderr) == (
        exits.BUG,
        f"error: RuntimeError: {ESCAPED} (a fault in ckstore, please report it; --debug shows where)\n",
    )


def test_an_ambiguous_ref_lists_what_it_may_mean(shell: Shell) -> None:
    with shell.open() as store:
        for branch in ("a", "b"):
            store.save({"x": 1}, step=7, branch=branch)
    found = shell.run("show", shell.place, "7")
    assert found.exit_code == 2
    assert found.stderr.count("(step 7, ") == 2


# --- the commands ---------------------------------------------------------------------------------


def test_init_makes_a_store_once(shell: Shell, tmp_path: Path) -> None:
    first = shell.json("init", tmp_path / "new", "--chunk-size", "64KiB")
    second = shell.json("init", tmp_path / "new")
    assert (first.pop("created"), second.pop("created")) == (True, False)
    assert first == second
    assert parse_size("65536") == parse_size("64KiB") == parse_size("64Ki") == 65536
    assert "there is a store already" in shell.run("init", tmp_path / "new").stdout


def test_ls_lists_the_newest_first(shell: Shell) -> None:
    lines = shell.run("ls", shell.place).stdout.splitlines()
    assert lines[0].split() == ["ID", "STEP", "BRANCH", "AGE", "TAGS", "LOGICAL", "STORED", "RATIO", "TOOK", "STATE"]
    assert [line.split()[1] for line in lines[1:]] == ["300", "200", "100"]
    assert [line.split()[-1] for line in lines[1:]] == ["ok"] * 3
    assert ["best" in line for line in lines[1:]] == [False, True, False]


def test_ls_as_json_has_every_field(shell: Shell) -> None:
    with shell.open() as store:
        infos = store.snapshots()
    found = shell.json("ls", shell.place)["snapshots"]
    assert [one["id"] for one in found] == [info.id for info in infos]
    assert found[1] == {
        "id": infos[1].id,
        "step": 200,
        "branch": "main",
        "epoch": 0,
        "created": infos[1].created.isoformat(),
        "tags": ["best"],
        "meta": {"loss": 2.0},
        "full": False,
        "logical_bytes": infos[1].logical_bytes,
        "stored_bytes": infos[1].stored_bytes,
        "content": infos[1].content,
        "parent": infos[2].id,
        "seconds": infos[1].seconds,
        "state": "ok",
        "ranks": 1,
    }
    assert dt.datetime.fromisoformat(found[1]["created"]) == infos[1].created


def test_ls_is_cut_with_a_note(shell: Shell) -> None:
    lines = shell.run("ls", shell.place, "-n", "1").stdout.splitlines()
    assert lines[2:] == ["… and 2 snapshots more; show all with --limit 0"]
    assert len(shell.json("ls", shell.place, "-n", "1")["snapshots"]) == 1
    assert len(shell.run("ls", shell.place, "-n", "0").stdout.splitlines()) == 4


def test_ls_shows_one_branch(shell: Shell) -> None:
    with shell.open() as store:
        store.save({"x": 1}, step=1, branch="exp")
    assert [one["step"] for one in shell.json("ls", shell.place, "-b", "exp")["snapshots"]] == [1]
    assert shell.run("ls", shell.place, "-b", "none").stdout == "no snapshots\n"


def test_show_lists_what_is_in_a_snapshot(shell: Shell) -> None:
    found = shell.run("show", shell.place, "step:300").stdout.splitlines()
    listing = [line.split() for line in found[found.index("") + 1 :]]
    assert listing == [
        ["KEY", "WHAT", "BYTES", "VALUE"],
        ["extra/", "1", "value"],
        ["0", "int", "1"],
        ["lr", "float", "0.5"],
        ["model/", "2", "values", "586", "KiB"],
        ["embed", "numpy", "array", "float32", "[100000]", "391", "KiB"],
        ["head", "numpy", "array", "float32", "[50000]", "195", "KiB"],
        ["note", "str", "'same'"],
        ["step", "int", "300"],
    ]
    top = shell.run("show", shell.place, "step:300", "--depth", "1").stdout.splitlines()
    assert [line.split()[0] for line in top[top.index("") + 2 :]] == ["extra/", "lr", "model/", "note", "step"]


def test_show_chooses_by_pattern_and_cuts_with_a_note(shell: Shell) -> None:
    found = shell.json("show", shell.place, "--keys", "model", "-k", "s*p")
    assert [one["path"] for one in found["entries"]] == ["model/embed", "model/head", "step"]
    assert found["entries"][0] == {
        "path": "model/embed",
        "kind": "numpy array",
        "dtype": "float32",
        "shape": [100_000],
        "bytes": 400_000,
        "value": None,
        "flags": [],
    }
    cut = shell.run("show", shell.place, "-n", "2").stdout
    assert cut.endswith(
        "… and 6 keys more; show all with --limit 0, fewer with --depth, some with --keys 'model/**'\n"
    )
    chosen = shell.run("show", shell.place, "-k", "model/**").stdout.splitlines()
    assert [line.split() for line in chosen[chosen.index("") + 1 :]] == [
        ["PATH", "KIND", "DTYPE", "SHAPE", "BYTES", "VALUE"],
        ["model/embed", "numpy", "array", "float32", "[100000]", "391", "KiB"],
        ["model/head", "numpy", "array", "float32", "[50000]", "195", "KiB"],
    ]


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("a", "b.c", "d"),
        (0, "0", "a/b", 'q"uo\\te', "", "x*"),
        (None, True, False, "None", "True"),
        (1.5, "1.5", 2 + 3j, float("inf"), -7, b"\x00\xff/", 10**30),
        ("sparse", Part("indices")),
    ],
)
def test_a_spelled_path_is_read_back(path: tuple[Any, ...]) -> None:
    found = parse(spell(path))
    assert [(type(step), step) for step in found] == [(type(step), step) for step in path]


def test_diff_shows_what_changed(shell: Shell) -> None:
    found = shell.run("diff", shell.place, "200", "300").stdout.splitlines()
    assert [line.split() for line in found if line and line[0] in "+-~"] == [
        ["+", "extra/0", "int", "1"],
        ["~", "step", "200", "300"],
        ["~", "model/head", "float32", "[50000]", "6.45e+08", "0.5", "5e+06"],
        ["~", "model", "1", "49,999", "of", "50,000", "6.45e+08"],
    ]
    assert found[-1].startswith("1 added, 0 removed, 2 changed, 3 unchanged; chunks: ")
    report = shell.json("diff", shell.place, "300", "200")
    assert [one["path"] for one in report["removed"]] == ["extra/0"]
    assert [(one["path"], one["same_form"]) for one in report["changed"]] == [("model/head", True), ("step", True)]
    assert (report["same"], report["added"], report["unchanged"]) == (False, [], 3)


@pytest.mark.parametrize(
    ("after", "flags", "code"), [("300", [], 0), ("300", ["--exit-code"], 1), ("200", ["--exit-code"], 0)]
)
def test_diff_tells_by_its_code_only_if_asked(shell: Shell, after: str, flags: list[str], code: int) -> None:
    assert shell.run("diff", shell.place, "200", after, *flags).exit_code == code


def test_tags_are_made_moved_listed_and_deleted(shell: Shell) -> None:
    ids = {info["step"]: info["id"] for info in shell.json("ls", shell.place)["snapshots"]}
    made = shell.json("tag", shell.place, "good", "100")
    assert (made["tag"], made["before"], made["snapshot"]["tags"]) == ("good", None, ["good"])
    assert shell.json("tag", shell.place, "good")["before"] == ids[100]
    assert shell.json("tag", shell.place)["tags"] == {"best": ids[200], "good": ids[300]}
    assert shell.json("tag", shell.place, "--delete", "good") == {"tag": "good", "deleted": True}
    assert shell.run("tag", shell.place).stdout.split() == ["TAG", "ID", "best", ids[200]]


def test_a_snapshot_is_set_aside_and_cleared(shell: Shell) -> None:
    assert shell.json("quarantine", shell.place, "300", "-r", "NaN")["state"] == "quarantined"
    assert shell.json("show", shell.place)["snapshot"]["step"] == 200
    assert "quarantined" in shell.run("ls", shell.place).stdout.splitlines()[1]
    assert shell.json("clear", shell.place, "300")["state"] == "ok"
    assert shell.json("show", shell.place, "latest")["snapshot"]["step"] == 300


def test_verify_of_a_whole_store(shell: Shell) -> None:
    found = shell.json("verify", shell.place)
    assert (found["ok"], found["snapshots"], found["findings"], found["quarantined"]) == (True, 3, [], [])
    assert shell.run("verify", shell.place, "best", "--quick").stdout.endswith("no damage\n")


def test_verify_finds_damage_and_sets_aside(shell: Shell) -> None:
    save = save_of(shell, "300")
    flip_a_byte(shell.place, save)
    found = shell.run("verify", shell.place, "--no-mark")
    assert (found.exit_code, found.stderr) == (1, "")
    assert f"damaged: packs/{save}/0-0 at byte " in found.stdout
    assert {one["state"] for one in shell.json("ls", shell.place)["snapshots"]} == {"ok"}
    report = shell.json("verify", shell.place, code=1)
    assert (report["ok"], report["quarantined"]) == (False, [save.nonce])
    assert any("model/head" in one["paths"] for one in report["findings"])
    assert [one["state"] for one in shell.json("ls", shell.place)["snapshots"]] == ["quarantined", "ok", "ok"]
    assert shell.json("status", shell.place)["quarantined"] == [save.nonce]


def test_prune_says_first_and_does_then(shell: Shell) -> None:
    ids = {info["step"]: info["id"] for info in shell.json("ls", shell.place)["snapshots"]}
    plan = shell.json("prune", shell.place, "--keep-last", "1", "--dry-run")
    assert (plan["dry_run"], plan["removed"]) == (True, [ids[100]])
    assert plan["kept"] == {ids[200]: ["tagged best"], ids[300]: ["newest", "last 1"]}
    assert len(shell.json("ls", shell.place)["snapshots"]) == 3
    assert "1 snapshot would be removed" in shell.run("prune", shell.place, "--keep-last=1", "--dry-run").stdout
    done = shell.json("prune", shell.place, "--keep-last", "1")
    assert (done["dry_run"], done["removed"]) == (False, [ids[100]])
    assert [one["step"] for one in shell.json("ls", shell.place)["snapshots"]] == [300, 200]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (["--keep-every", "100"], [300, 200, 100]),
        (["--keep-within", "7d"], [300, 200, 100]),
        (["--keep-best", "max:loss"], [300, 200, 100]),
        (["--keep-best", "loss"], [300, 200]),
        (["--keep-last", "1", "--branch", "main"], [300, 200]),
    ],
)
def test_prune_by_each_rule(shell: Shell, rule: list[str], kept: list[int]) -> None:
    shell.json("prune", shell.place, *rule)
    assert [one["step"] for one in shell.json("ls", shell.place)["snapshots"]] == kept


def test_prune_of_a_misspelled_branch_is_an_error(shell: Shell) -> None:
    found = shell.run("prune", shell.place, "--keep-last", "1", "--branch", "mian")
    assert (found.exit_code, "no snapshot on branch 'mian'" in found.stderr) == (3, True)


def test_prune_drops_one_snapshot_but_not_one_in_use(shell: Shell) -> None:
    assert len(shell.json("prune", shell.place, "--drop", "100")["removed"]) == 1
    tagged = shell.run("prune", shell.place, "--drop", "best")
    assert tagged.exit_code == 6
    assert "in use: tagged" in tagged.stdout


def test_the_last_good_snapshot_is_dropped_only_by_force(shell: Shell) -> None:
    with shell.open() as store:
        store.save({"x": 1}, step=1, branch="exp")
    refused = shell.run("prune", shell.place, "--drop", "exp")
    assert (refused.exit_code, "last good snapshot" in refused.stderr) == (2, True)
    assert shell.run("prune", shell.place, "--drop", "exp", "--force").exit_code == 0


def test_gc_says_first_and_does_then(shell: Shell) -> None:
    plan = shell.json("gc", shell.place, "--dry-run")
    assert plan == {
        "dry_run": True,
        "freed_bytes": 0,
        "freed_packs": 0,
        "freed_objects": 0,
        "removed": [],
        "aborted": [],
        "waiting_for": [],
    }
    assert shell.json("gc", shell.place, "--patience", "1h")["dry_run"] is False
    assert "nothing was changed" in shell.run("gc", shell.place, "--dry-run").stdout
    assert shell.run("gc", shell.place, "--patience", "soon").exit_code == 2


def test_gc_waits_for_a_save_under_way_if_it_is_told_to(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SaveName(900, "0" * 16)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = msgspec.structs.replace(current_owner(), pid=child.pid, start=_start_of(child.pid) or 0)
        record = records.Announcement(str(save), "main", 900, 0, [], owner)
        LocalBackend(str(shell.place)).put(f"saves/{save}", records.encode(record))
        assert shell.json("gc", shell.place)["waiting_for"] == ["save of step 900 on main"]

        def while_it_waits(seconds: float) -> None:
            child.kill()
            child.wait()

        monkeypatch.setattr("ckstore.cli.upkeep.time.sleep", while_it_waits)
        found = shell.json("gc", shell.place, "--wait", "60s")
    assert (found["waiting_for"], found["aborted"]) == ([], [save.nonce])


def test_status_shows_pins(shell: Shell) -> None:
    backend = LocalBackend(str(shell.place))
    with pinned(backend, f"verify {HOSTILE[:-1]}", [save_of(shell, "300")]):
        report = shell.json("status", shell.place)
        shown = shell.run("status", shell.place).stdout
    assert [(one["purpose"], one["pid"], one["gone"]) for one in report["pins"]] == [
        (f"verify {HOSTILE[:-1]}", os.getpid(), False)
    ]
    assert (report["snapshots"], report["branches"], report["undecided"]) == (3, ["main"], [])
    assert (ESCAPED[:-6] in shown, "may be running" in shown, "\x1b" in shown) == (True, True, False)


def test_a_save_under_way_is_shown_and_waited_for(shell: Shell) -> None:
    save = SaveName(1000, "0123456789abcdef")
    record = records.Announcement(str(save), "main", 7, 0, [], current_owner())
    with announced(LocalBackend(str(shell.place)), record):
        report = shell.json("status", shell.place)
        freed = shell.json("gc", shell.place)
        shown = shell.run("status", shell.place).stdout
    assert [(one["pid"], one["gone"]) for one in report["undecided"]] == [(os.getpid(), False)]
    assert freed["waiting_for"] == [report["undecided"][0]["purpose"]]
    assert "SAVES UNDER WAY" in shown


def test_an_unreadable_record_stops_gc_until_it_is_given_up(shell: Shell) -> None:
    save = save_of(shell, "100")
    (shell.place / "snapshots" / str(save)).unlink()
    (shell.place / "snapshots" / str(save)).write_bytes(b"junk")
    found = shell.run("gc", shell.place)
    assert (found.exit_code, found.stdout) == (4, "")
    assert f"`ckstore prune --drop {save.nonce}`" in found.stderr
    status = shell.json("status", shell.place)
    assert (status["unreadable"], save.nonce in status["blocked"]) == ([save.nonce], True)
    assert shell.json("prune", shell.place, "--drop", save.nonce)["removed"] == [save.nonce]
    assert shell.run("gc", shell.place).exit_code == 0
    assert shell.run("verify", shell.place).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["init"],
        ["status"],
        ["ls"],
        ["show"],
        ["diff", "100", "300"],
        ["tag"],
        ["verify"],
        ["prune", "--keep-last", "1"],
        ["gc"],
    ],
)
def test_json_is_one_document_and_nothing_else(shell: Shell, words: list[str]) -> None:
    found = shell.run(*words, "--store", shell.place, "--json")
    assert (found.exit_code, found.stderr, found.stdout.isascii()) == (0, "", True)
    document = json.loads(found.stdout, parse_constant=lambda name: pytest.fail(name))
    documented = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in sorted(field_names(document)) if f"`{name}`" not in documented] == []


def field_names(document: Any) -> set[str]:
    """Every name of a field in a document; the keys of what maps free names are none."""
    if isinstance(document, list):
        return set().union(*map(field_names, document))
    if not isinstance(document, dict):
        return set()
    free = {"meta", "kept", "spared", "metrics", "options", "values"}
    if isinstance(document.get("tags"), dict):
        free.add("tags")
    return set(document).union(*(field_names(value) for name, value in document.items() if name not in free))


def test_json_has_no_nan(shell: Shell) -> None:
    with shell.open() as store:
        store.save({"x": 1}, step=400, meta={"loss": float("nan"), "best": [-float("inf")]})
    assert shell.json("show", shell.place)["snapshot"]["meta"] == {"best": ["-Infinity"], "loss": "NaN"}


# --- hostile texts --------------------------------------------------------------------------------


def test_texts_out_of_a_store_are_shown_escaped_and_never_as_markup(shell: Shell) -> None:
    with shell.open() as store:
        # Surrogates can be in a state, not in meta.
        store.save({HOSTILE: HOSTILE, "[red]x[/red]": 1}, step=400, meta={HOSTILE[:-1]: HOSTILE[:-1], "m": "[/bold]"})
    save = save_of(shell, "400")
    tag = shell.place / "tags" / "best"
    (shell.place / "tags" / "\x1b]0;owned\x07").write_bytes(tag.read_bytes())
    for words in (["ls"], ["show"], ["show", "-k", "**"], ["diff", "300", "400"], ["tag"], ["status"]):
        found = shell.run(words[0], shell.place, *words[1:])
        assert [code for code in ("\x1b", "\x07", "\u202e") if code in found.stdout + found.stderr] == [], words
    shown = shell.run("show", shell.place, f"id:{save.nonce}").stdout
    assert "[red]x[/red]" in shown
    assert "[/bold]" in shown
    assert ":smile:" in shown


# --- processes, signals and pipes -----------------------------------------------------------------


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def test_the_version_and_the_module(shell: Shell) -> None:
    for command in ([sys.executable, "-m", "ckstore"], [Path(sys.executable).with_name("ckstore")]):
        found = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert (found.stdout, found.stderr) == (f"ckstore {ckstore.__version__}\n", "")


def test_help_loads_no_engine(shell: Shell) -> None:
    report = "import atexit, sys; atexit.register(lambda: print(sorted(m for m in sys.modules if '.' not in m)))"
    code, out, err = ended(shell.process("--help", code=report))
    assert (code, err) == (0, "")
    loaded = out.splitlines()[-1]
    heavy = ["numpy", "lmdb", "msgspec", "zstandard", "blake3", "torch", "asyncio"]
    assert [name for name in heavy if f"'{name}'" in loaded] == []


HELD = """
import threading
from ckstore.store import Store
def held(store, *words, **options):
    print("ready", flush=True)
    threading.Event().wait()
Store.verify = held
"""


def test_ctrl_c_ends_with_130_and_one_line(shell: Shell) -> None:
    process = shell.process("verify", shell.place, code=HELD)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert err == "interrupted: what was acknowledged is durable; run the command again\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_the_output_quietly(shell: Shell, flags: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    assert ended(shell.process("ls", shell.place, *flags, stdout=write)) == (0, "", "")
    flip_a_byte(shell.place, save_of(shell, "300"))
    assert ended(shell.process("verify", shell.place, *flags, stdout=write)) == (1, "", "")
    assert ended(shell.process("--help", stdout=write))[2] == ""
    os.close(write)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_output_that_cannot_be_written_is_an_error(shell: Shell, flags: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = ended(shell.process("ls", shell.place, *flags, stdout=full))
    assert (code, err) == (5, "error: [Errno 28] No space left on device\n")


def test_closed_streams_are_no_error(shell: Shell) -> None:
    script = f'exec "{sys.executable}" -m ckstore ls "{shell.place}" >&- 2>&-'
    assert subprocess.run(["bash", "-c", script], timeout=60).returncode == 0


def test_an_encoding_that_lacks_a_character_is_no_error(shell: Shell) -> None:
    process = shell.process("show", shell.place, code="import sys; sys.stdout.reconfigure(encoding='ascii')")
    code, out, err = ended(process)
    assert (code, err, out.isascii()) == (0, "", True)


# --- progress -------------------------------------------------------------------------------------


def test_figures_of_progress() -> None:
    assert meter.figures(1 << 30, 3 << 30, 2.0) == "1.00 GiB of 3.00 GiB · 512 MiB/s · 4 s left"
    assert meter.figures(0, 0, 5.0) == "5 s"


class Watched(io.StringIO):
    """A terminal that tells when a text was written to it."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.seen = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._awaited in self.getvalue():
            self.seen.set()
        return written


def test_progress_appears_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "DELAY_SECONDS", 0)
    screen = Watched("of 2.00 KiB")
    with meter.Meter("verifying", Console(file=screen, force_terminal=True, width=100)) as progress:
        progress(1024, 2048)
        assert screen.seen.wait(30)
    assert "verifying" in screen.getvalue()


def test_what_is_soon_done_shows_no_progress() -> None:
    screen = Watched("verifying")
    with meter.Meter("verifying", Console(file=screen, force_terminal=True, width=100)) as progress:
        progress(1024, 2048)
    assert screen.getvalue() == ""


WAITING = """
import threading
from ckstore.cli import meter
from ckstore.store import Store
from ckstore.verify import VerifyReport
meter.DELAY_SECONDS = 0
def verify(store, *words, progress, **options):
    progress(1 << 20, 2 << 20)
    if progress._timer:
        progress._timer.join()
    return VerifyReport()
Store.verify = verify
"""


@pytest.mark.parametrize(("flags", "shown"), [([], True), (["--json"], False)])
def test_progress_goes_to_a_terminal_on_stderr(shell: Shell, flags: list[str], shown: bool) -> None:
    ours, theirs = pty.openpty()
    process = shell.process("verify", shell.place, *flags, code=WAITING, stderr=theirs)
    os.close(theirs)
    screen = b""
    while True:
        try:
            got = os.read(ours, 65536)
        except OSError:  # how a pty says that the other side is gone
            break
        screen += got
    os.close(ours)
    code, out, _ = ended(process)
    assert (code, b"verifying" in screen, b"1.00 MiB of 2.00 MiB" in screen) == (0, shown, shown)
    assert "verifying" not in out
