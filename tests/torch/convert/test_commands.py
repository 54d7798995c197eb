"""`ckstore import` and `ckstore export`: what they print, how they end, and that text of a file is text."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ckstore import Store
from ckstore.cli.app import app
from ckstore.errors import InvalidInputError
from ckstore_torch.cli.exporting import parse_size
from tests.torch.convert.conftest import Shell
from tests.torch.convert.test_hf_folder import trained
from tests.torch.convert.test_importing import history

HOSTILE = "\x1b[31mred\x07[bold]"
ESCAPED = "\\x1b[31mred\\x07[bold]"


def test_a_history_is_imported_with_a_report_of_what_it_saves(shell: Shell, store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [100, 200])
    torch.save({}, folder / "last.pt")
    dry = shell.run("import", shell.place, folder, "--dry-run")
    assert dry.exit_code == 0
    assert dry.stdout.splitlines()[-1].endswith("can be read; nothing was changed")
    assert store.snapshots() == []
    found = shell.run("import", shell.place, folder, "--tag", "old")
    assert (found.exit_code, found.stderr) == (0, "")
    header, first, second, passed, total, tag = found.stdout.splitlines()
    assert header.split() == ["STEP", "SOURCE", "FORMAT", "SIZE", "STORED", "RATIO", "FATE", "ID"]
    assert first.split()[:3] == ["100", "step_100.pt", "torch"]
    assert second.split()[-2:] == ["imported", store.resolve().id]
    assert passed == "passed over: last.pt: no step in its name; import it by itself with --step"
    assert total.startswith("branch main: 2 checkpoints of ") and total.endswith(" saved")
    assert tag == "old names step 200"
    assert [info.tags for info in store.snapshots()] == [("old",), ()]


def test_import_as_json_has_every_field(shell: Shell, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    trained(folder, step=7)
    found = shell.json("import", shell.place, folder, "--branch", "hf", "--tag", "seven")
    (info,) = store.snapshots("hf")
    not_read = ("training_args.bin", "tokenizer.json")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name not in not_read)
    (checkpoint,) = found.pop("checkpoints")
    assert found == {
        "dry_run": False,
        "branch": "hf",
        "tag": "seven",
        "passed_over": [],
        "source_bytes": size,
        "stored_bytes": info.stored_bytes,
        "saved_bytes": size - info.stored_bytes,
    }
    assert [one["name"] for one in checkpoint.pop("left_out")] == ["tokenizer.json", "training_args.bin"]
    assert checkpoint == {
        "source": str(folder),
        "format": "hf",
        "step": 7,
        "fate": "imported",
        "snapshot": info.id,
        "source_bytes": size,
        "logical_bytes": info.logical_bytes,
        "stored_bytes": info.stored_bytes,
        "ties": {},
    }
    assert shell.json("import", shell.place, folder, "--branch", "hf")["checkpoints"][0]["fate"] == "already there"


def test_a_snapshot_is_exported(shell: Shell, store: Store, tmp_path: Path) -> None:
    tied = torch.ones(3)
    info = store.save({"model": {"a": tied, "b": tied, "c": torch.zeros(5)}, "lr": 0.5}, step=4)
    options = ["-f", "safetensors", "--max-shard-size", "20", "-k", "model/**"]
    found = shell.json("export", shell.place, 4, tmp_path / "hub", *options)
    files = {path.name: path.stat().st_size for path in (tmp_path / "hub").iterdir()}
    assert found == {
        "snapshot": info.id,
        "step": 4,
        "format": "safetensors",
        "out": str(tmp_path / "hub"),
        "tensors": 2,
        "files": [{"name": name, "bytes": size} for name, size in sorted(files.items())],
        "bytes": sum(files.values()),
        "left_out": [],
        "ties": {"b": "a"},
        "notes": [],
    }
    assert len(files) == 3
    out = tmp_path / "all.safetensors"
    said = shell.run("export", shell.place, "latest", out, "--format", "safetensors", "--skip-unsupported")
    assert (said.exit_code, said.stderr) == (0, "")
    assert "tied: model.b is model.a; the file holds it once" in said.stdout
    assert "left out: lr: a value of type float" in said.stdout
    assert said.stdout.splitlines()[-1].startswith(f"step 4 ({info.id}) is at {out} as safetensors: 2 tensors, ")
    assert load_file(out).keys() == {"model.a", "model.c"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["export", "S", "4", "out"], 2, "Missing option '--format'"),
        (["export", "S", "4", "out", "-f", "onnx"], 2, "the format is one of"),
        (["export", "S", "4", "S", "-f", "torch"], 2, "nothing is ever overwritten"),
        (["export", "S", "9", "out", "-f", "torch"], 3, "9"),
        (["export", "S", "4", "-f", "torch"], 2, "2 arguments are needed"),
        (["export", "S", "4", "out", "-f", "safetensors", "--max-shard-size", "5 apples"], 2, "is not a size"),
        (["import", "S", "none"], 2, "there is nothing at"),
        (["import", "S"], 2, "1 argument is needed"),
        (["import", "S", "S", "--profile", "tiny"], 2, "profile"),
        (["import", "none", "S"], 3, "none"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line(
    shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    store.save({"a": 1}, step=4)
    monkeypatch.chdir(shell.place.parent)
    found = shell.run(*[str(shell.place) if word == "S" else word for word in words])
    assert (found.exit_code, found.stdout) == (code, "")
    assert message in found.stderr
    assert found.stderr.count("\n") == 1


def test_the_store_may_come_from_the_environment(shell: Shell, store: Store, tmp_path: Path) -> None:
    env = {"CKSTORE_STORE": str(shell.place), "CKSTORE_CACHE": str(shell.cache)}
    torch.save({"a": 1}, tmp_path / "step_3.pt")
    for words in (["import", tmp_path / "step_3.pt"], ["export", "3", tmp_path / "out.pt", "-f", "torch"]):
        done = CliRunner().invoke(app, [str(word) for word in words], env=env)
        assert (done.exit_code, done.stderr) == (0, "")
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"a": 1}


def test_text_of_files_is_shown_as_text(shell: Shell, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    save_file({HOSTILE: torch.ones(1)}, folder / f"{HOSTILE} step_1.safetensors", {f"tied{HOSTILE}": HOSTILE})
    (folder / f"{HOSTILE}.txt").touch()
    found = shell.run("import", shell.place, folder)
    assert found.exit_code == 0
    assert "\x1b" not in found.stdout and "\x07" not in found.stdout
    assert f"tied{ESCAPED} is {ESCAPED}" in found.stdout
    assert f"passed over: {ESCAPED}.txt" in found.stdout
    out = shell.run("export", shell.place, 1, tmp_path / "out.safetensors", "-f", "safetensors")
    assert out.exit_code == 0 and "\x1b" not in out.stdout
    (folder / f"{HOSTILE} step_1.safetensors").write_bytes(b"x")
    refused = shell.run("import", shell.place, folder, "--branch", "b")
    assert refused.exit_code == 2
    assert ESCAPED in refused.stderr and "\x1b" not in refused.stderr


def test_progress_is_shown_on_a_terminal(shell: Shell, store: Store, tmp_path: Path) -> None:
    history(tmp_path / "old", [1])
    code = "import ckstore.cli.meter as meter; meter.DELAY_SECONDS = 0.0\nfrom ckstore.cli.main import main\nmain()"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, "import", str(shell.place), str(tmp_path / "old"), "--dry-run"]
    env = {**os.environ, "CKSTORE_CACHE": str(shell.cache), "COLUMNS": "100", "TERM": "xterm"}
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, env=env)
    os.close(theirs)
    said = os.read(ours, 1 << 20)
    os.close(ours)
    assert done.returncode == 0
    assert b"importing" in said
    assert b"nothing was changed" in done.stdout


def test_help_loads_no_torch() -> None:
    code = "import sys\nfrom ckstore.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    for words in (["-h"], ["import", "-h"], ["export", "-h"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "False"
        assert "  import " in done.stdout or "$ ckstore " in done.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("1B", 1), ("500MB", 500_000_000), ("5GB", 5_000_000_000), ("5GiB", 5 << 30), ("2 kB", 2000)],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5.5GB", "GB", "5XB", "1" * 40])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a size"):
        parse_size(text)
