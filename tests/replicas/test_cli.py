"""The commands of a store on several storages, as people and scripts use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ckstore.cli.app import app
from ckstore.store import open_store


class Shell:
    """The command line in a folder with a store of two snapshots at `a`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.a, self.b, self.c = (str(folder / name) for name in "abc")
        with open_store(self.a, create=True, cache_dir=folder / "cache") as store:
            for step in (1, 2):
                store.save({"w": np.arange(step + 100.0)}, step=step)

    def run(self, *words: str) -> Result:
        clean = {"CKSTORE_STORE": None, "CKSTORE_KEY": None, "COLUMNS": "250"}
        env = {"CKSTORE_CACHE": str(self.folder / "cache"), **clean}
        return CliRunner().invoke(app, list(words), env=env)

    def json(self, *words: str, code: int = 0) -> Any:
        found = self.run(*words, "--json")
        assert (found.exit_code, found.stderr) == (code, ""), found.output
        return json.loads(found.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_members_are_added_listed_and_removed(shell: Shell) -> None:
    assert "on this storage only" in shell.run("replicas", "list", shell.a).stdout
    term = shell.json("replicas", "add", shell.a, shell.b)
    assert (term["number"], term["required"], [one["role"] for one in term["members"]]) == (1, 1, ["authority", "copy"])
    shell.json("replicas", "add", shell.a, shell.c, "--required", "2")
    members = shell.json("replicas", "list", shell.a)["members"]
    assert [(one["name"], one["health"], one["snapshots"], one["missing"]) for one in members] == [
        ("s1", "ok", 2, 0),
        ("s2", "ok", 2, 0),
        ("s3", "ok", 2, 0),
    ]
    assert "3 required" in shell.run("replicas", "require", shell.a, "3").stdout
    term = shell.json("replicas", "remove", shell.a, "s2")
    assert ([one["name"] for one in term["members"]], term["required"]) == (["s1", "s3"], 2)


def test_a_wiped_copy_is_listed_and_filled_again(shell: Shell) -> None:
    shell.run("replicas", "add", shell.a, shell.b)
    shutil.rmtree(shell.b)
    listed = shell.run("replicas", "list", shell.a)
    assert listed.exit_code == 1
    assert "empty" in listed.stdout
    assert "it was never filled, or it was wiped" in listed.stdout
    filled = shell.json("replicas", "reseed", shell.a, "s2")["copies"]
    assert [(one["complete"], len(one["copied"]), one["error"]) for one in filled] == [(True, 2, "")]
    assert shell.json("replicas", "list", shell.a)["members"][1]["health"] == "ok"


def test_replicate_brings_what_is_lacking(shell: Shell) -> None:
    shell.run("replicas", "add", shell.a, shell.b)
    shutil.rmtree(shell.b)
    done = shell.run("replicate", shell.a)
    assert done.exit_code == 0
    assert "2 snapshots copied" in done.stdout
    assert done.stdout.rstrip().endswith("complete")
    shutil.rmtree(shell.b)
    Path(shell.b).write_text("in the way")
    (copy,) = shell.json("replicate", shell.a, code=1)["copies"]
    assert (copy["complete"], copy["copied"]) == (False, [])
    assert "not a directory" in copy["error"]
    (noted,) = shell.json("replicas", "list", shell.a, code=1)["members"][1:]
    assert "not a directory" in noted["last_error"]
    assert noted["last_error_at"].endswith("+00:00")


def test_a_copy_is_promoted(shell: Shell) -> None:
    shell.run("replicas", "add", shell.a, shell.b, "--required", "2")
    shutil.rmtree(shell.a)
    done = shell.json("promote", shell.b)
    assert (done["term"]["authority"], done["forced"], list(done["silent"])) == ("s2", False, [f"file://{shell.a}"])
    assert [one["step"] for one in shell.json("ls", shell.b)["snapshots"]] == [2, 1]
    assert shell.json("tag", shell.b, "best", "latest")
    again = shell.run("promote", shell.b)
    assert (again.exit_code, "is the authority already" in again.stderr) == (2, True)


def test_too_few_are_promoted_by_force_only(shell: Shell) -> None:
    shell.run("replicas", "add", shell.a, shell.b)
    shutil.rmtree(shell.a)
    refused = shell.run("promote", shell.b)
    assert (refused.exit_code, refused.stdout) == (6, "")
    assert "--force" in refused.stderr
    done = shell.run("promote", shell.b, "--force")
    assert done.exit_code == 0
    assert f"file://{shell.b} is the authority from term 2 on" in done.stdout
    assert f"went without file://{shell.a}" in done.stdout


def test_the_former_place_is_promoted_again_by_a_copy(shell: Shell) -> None:
    shell.run("replicas", "add", shell.a, shell.b, "--required", "2")
    shutil.rmtree(shell.a)
    assert shell.json("promote", shell.b, shell.a)["term"]["authority"] == "s1"
    assert [one["step"] for one in shell.json("ls", shell.a)["snapshots"]] == [2, 1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("replicas", "add", "{a}"), 2, "1 argument is needed"),
        (("replicas", "add", "{a}", "{a}"), 2, "named twice"),
        (("replicas", "remove", "{a}", "s2"), 2, "is the only storage of its store"),
        (("replicas", "require", "{a}", "many"), 2, "a number of storages is needed"),
        (("replicate", "{a}"), 2, "`ckstore replicas add` adds one"),
        (("promote", "{a}"), 2, "is the only storage of its store"),
        (("replicas", "list", "{b}"), 3, "there is no store"),
    ],
)
def test_mistakes_are_answered_in_one_line(shell: Shell, words: tuple[str, ...], code: int, said: str) -> None:
    found = shell.run(*(word.format(a=shell.a, b=shell.b) for word in words))
    assert (found.exit_code, found.stdout) == (code, "")
    assert said in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_the_group_shows_what_there_is(shell: Shell) -> None:
    shown = shell.run("replicas").stdout
    assert all(name in shown for name in ("list", "add", "remove", "require", "reseed"))
