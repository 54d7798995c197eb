"""Commands of other packages: found without being loaded, loaded when asked for, and no harm to others when broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ckstore.cli import plugins
from ckstore.cli.app import app
from ckstore.cli.call import Call, command


class Asked:
    """How often entry points were looked up, and what was found."""

    def __init__(self) -> None:
        self.times = 0
        self.found: list[EntryPoint] = []

    def __call__(self, *, group: str) -> EntryPoints:
        assert group == "ckstore.commands"
        self.times += 1
        return EntryPoints(self.found)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """What packages are installed, as far as the command line can tell."""
    made = Asked()
    monkeypatch.setattr("importlib.metadata.entry_points", made)
    module = ModuleType("guest")
    module.__dict__.update(hello=hello, nothing=lambda app: None, not_callable=3, fails=fails)
    monkeypatch.setitem(sys.modules, "guest", module)
    for cached in (plugins.load, plugins._found):
        cached.cache_clear()
    yield made
    for cached in (plugins.load, plugins._found):
        cached.cache_clear()


def hello(app: typer.Typer) -> None:
    def greet(call: Call, loud: bool = False) -> int:
        """Greet a store."""
        call.answer(lambda: {"place": call.place, "loud": loud}, lambda out: out.print(f"hello {call.place}"))
        return 6

    command(app, name="hello")(greet)


def fails(app: typer.Typer) -> None:
    raise RuntimeError("no \x1b[31mluck")


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "ckstore.commands")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"CKSTORE_STORE": None, "COLUMNS": "200"})


def test_a_command_of_another_package_is_one_like_any_other(asked: Asked) -> None:
    asked.found = [entry("hello", "guest:hello")]
    assert (run("hello", "runs/a").stdout, run("hello", "runs/a").exit_code) == ("hello runs/a\n", 6)
    assert '"loud": true' in run("hello", "runs/a", "--json", "--loud").stdout
    assert run("hello").stderr.startswith("error: which store?")
    assert "Greet a store" in run("hello", "-h").stdout
    assert "  hello " in run("-h").stdout


def test_nothing_is_looked_for_when_a_command_of_our_own_runs(asked: Asked, tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)).exit_code == 3
    assert asked.times == 0
    run("nonsense")
    assert asked.times == 1


def test_our_own_commands_cannot_be_replaced(asked: Asked, tmp_path: Path) -> None:
    asked.found = [entry("ls", "guest:fails")]
    assert run("ls", str(tmp_path)).exit_code == 3
    found = run("-h")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.count("  ls ") == 1


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("guest:fails", r"RuntimeError: no \x1b[31mluck"),
        ("guest:nothing", "LookupError: it registers nothing"),
        ("guest:hello", "LookupError: it registers hello"),
        ("guest:not_callable", "TypeError"),
        ("guest:missing", "AttributeError"),
        ("no_such_package.at_all:x", "ModuleNotFoundError"),
        ("not a value", "AttributeError"),
    ],
)
def test_a_broken_one_is_one_warning_and_the_rest_works(asked: Asked, value: str, why: str) -> None:
    asked.found = [entry("broken", value), entry("hello", "guest:hello")]
    assert run("hello", "runs/a").exit_code == 6
    found = run("-h")
    assert found.exit_code == 0
    assert "  hello " in found.stdout and "  broken " not in found.stdout
    (warning,) = found.stderr.splitlines()
    assert warning.startswith("warning: the command 'broken' of ") and why in warning
    assert run("-h").stderr == ""  # said once


def test_asking_for_a_broken_one_is_an_error_of_usage(asked: Asked) -> None:
    asked.found = [entry("broken", "guest:fails")]
    found = run("broken", "runs/a")
    assert found.exit_code == 2
    warning, error = found.stderr.splitlines()
    assert "RuntimeError" in warning
    assert error.startswith("error: No such command 'broken'")


def test_of_two_with_one_name_the_first_package_is_taken(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("a_guest")
    other.__dict__["hello"] = hello
    monkeypatch.setitem(sys.modules, "a_guest", other)
    for order in (1, -1):
        plugins._found.cache_clear()
        asked.found = [entry("hello", "guest:fails"), entry("hello", "a_guest:hello")][::order]
        plugins.load.cache_clear()
        assert run("hello", "runs/a").exit_code == 6


def test_the_commands_of_this_project_are_installed() -> None:
    from importlib.metadata import entry_points

    found: dict[str, Any] = {one.name: one.value for one in entry_points(group=plugins.GROUP)}
    assert found["import"] == "ckstore_torch.cli.importing:register"
    assert found["export"] == "ckstore_torch.cli.exporting:register"


def test_ls_loads_neither_torch_nor_the_finder_of_packages(tmp_path: Path) -> None:
    code = "import sys\nfrom ckstore.cli.main import main\ntry: main()\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "ls", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3
    assert "'ckstore.cli.plugins'" in done.stdout
    assert "'torch'" not in done.stdout and "'ckstore_torch" not in done.stdout
