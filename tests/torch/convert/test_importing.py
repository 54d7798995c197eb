"""Checkpoints become a history: by step, once each, deduplicated, and whole snapshots only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore_torch.convert.discover import discover
from ckstore_torch.convert.importing import IMPORTED, THERE, WOULD, plan_import, run_import
from tests.torch.convert.samples import bits, kept
from tests.torch.convert.test_dcp_folder import write
from tests.torch.convert.test_hf_folder import trained


def state_at(step: int) -> dict[str, object]:
    """A frozen part that never changes, and weights in bf16 that change a little."""
    weights = torch.linspace(1, 2, 50_000, dtype=torch.float64) + step * 1e-7
    return {"frozen": bits(torch.float32, 30_000), "weights": weights.to(torch.bfloat16), "step": step}


def history(folder: Path, steps: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    for step in steps:
        torch.save(state_at(step), folder / f"step_{step}.pt")
    return folder


def test_a_folder_comes_in_by_step_and_takes_less(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1000, 200, 90])
    (folder / "notes.txt").write_text("hello")
    torch.save({}, folder / "last.pt")
    (folder / ".hidden").touch()
    told: list[tuple[int, int]] = []
    report = run_import(store, plan_import(store, folder), tag="imported", progress=lambda *one: told.append(one))
    assert [one.checkpoint.step for one in report.outcomes] == [90, 200, 1000]
    assert [one.fate for one in report.outcomes] == [IMPORTED] * 3
    assert [(one.name, one.why) for one in report.passed_over] == [
        ("last.pt", "no step in its name; import it by itself with --step"),
        ("notes.txt", "of no format that can be read"),
    ]
    infos = store.snapshots()
    assert [info.step for info in infos] == [1000, 200, 90]
    assert (store.resolve().step, infos[0].tags) == (1000, ("imported",))
    for step in (90, 200, 1000):
        assert kept(store.restore(step)) == kept(state_at(step))
    sizes = [(folder / f"step_{step}.pt").stat().st_size for step in (90, 200, 1000)]
    assert [one.source_bytes for one in report.outcomes] == sizes
    assert report.source_bytes == sum(sizes)
    assert report.stored_bytes == sum(info.stored_bytes for info in infos)
    # Deltas of the weights, and nothing of what is frozen.
    assert max(one.stored_bytes for one in report.outcomes[1:]) < 30_000
    assert told[0] == (0, sum(sizes)) and told[-1] == (sum(sizes), sum(sizes))
    assert told == sorted(told)
    noted = infos[2].meta["import"]
    assert (noted["source"], noted["format"]) == ("step_90.pt", "torch")


def test_what_is_there_is_not_imported_again(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1, 2])
    first = run_import(store, plan_import(store, folder))
    history(folder, [3])
    again = run_import(store, plan_import(store, folder), tag="newest")
    assert [one.fate for one in again.outcomes] == [THERE, THERE, IMPORTED]
    assert [one.snapshot.id for one in again.outcomes[:2] if one.snapshot] == [
        one.snapshot.id for one in first.outcomes if one.snapshot
    ]
    assert [info.step for info in store.snapshots()] == [3, 2, 1]
    assert again.stored_bytes == sum(info.stored_bytes for info in store.snapshots())
    run_import(store, plan_import(store, folder), tag="again")
    assert store.resolve("tag:again").step == 3


def test_other_files_of_a_step_that_is_there_are_refused(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1, 2])
    run_import(store, plan_import(store, folder))
    torch.save({"other": 1}, folder / "step_2.pt")
    with pytest.raises(InvalidInputError, match=r"a snapshot of step 2 already .* is not what it was imported from"):
        run_import(store, plan_import(store, folder))
    with pytest.raises(InvalidInputError, match="is not what it was imported from"):
        run_import(store, plan_import(store, folder), dry_run=True)
    report = run_import(store, plan_import(store, folder, branch="second"))
    assert [one.fate for one in report.outcomes] == [IMPORTED, IMPORTED]
    assert [info.step for info in store.snapshots("second")] == [2, 1]


def test_a_damaged_snapshot_does_not_count_as_there(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1, 2])
    run_import(store, plan_import(store, folder))
    store.quarantine(2, "a test")
    with pytest.raises(InvalidInputError, match=r"step_2\.pt is of step 2, and branch main is at step 2 already"):
        plan_import(store, folder)


def test_steps_only_grow(store: Store, tmp_path: Path) -> None:
    store.save({}, step=5)
    for step in (4, 5):
        folder = history(tmp_path / f"old{step}", [step, 9])
        with pytest.raises(InvalidInputError, match=rf"step_{step}.pt is of step {step}, and branch main is at step 5"):
            plan_import(store, folder)
    assert len(run_import(store, plan_import(store, history(tmp_path / "new", [6]))).outcomes) == 1


def test_an_import_that_was_cut_short_leaves_whole_snapshots_and_goes_on(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1, 2, 3])
    whole = (folder / "step_2.pt").read_bytes()
    os.truncate(folder / "step_2.pt", len(whole) // 2)
    with pytest.raises(InvalidInputError, match=r"step_2\.pt: it is cut off.*; 1 before it are imported, and stay"):
        run_import(store, plan_import(store, folder), tag="done")
    assert [info.step for info in store.snapshots()] == [1]
    assert store.tags() == {}
    (folder / "step_2.pt").write_bytes(whole)

    def interrupt(done: int, total: int) -> None:
        if len(store.snapshots()) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_import(store, plan_import(store, folder), progress=interrupt)
    assert [info.step for info in store.snapshots()] == [2, 1]
    report = run_import(store, plan_import(store, folder))
    assert [one.fate for one in report.outcomes] == [THERE, THERE, IMPORTED]
    assert store.verify().ok
    for step in (1, 2, 3):
        assert kept(store.restore(step)) == kept(state_at(step))


def test_a_dry_run_reads_and_changes_nothing(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "old", [1, 2])
    report = run_import(store, plan_import(store, folder), tag="x", dry_run=True)
    assert [one.fate for one in report.outcomes] == [WOULD, WOULD]
    assert (store.snapshots(), store.tags(), report.stored_bytes) == ([], {}, 0)
    assert report.source_bytes == sum(path.stat().st_size for path in folder.iterdir())
    os.truncate(folder / "step_2.pt", 100)
    with pytest.raises(InvalidInputError, match=r"step_2\.pt"):
        run_import(store, plan_import(store, folder), dry_run=True)


def test_a_name_that_is_no_text_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"step_1\xff.pt")
    torch.save({"a": 1}, tmp_path / "step_1.pt")
    (tmp_path / "step_1.pt").rename(path)
    with pytest.raises(InvalidInputError, match="cannot be read: 'utf-8' codec can't encode"):
        run_import(store, plan_import(store, path))


def test_formats_may_be_mixed(store: Store, tmp_path: Path) -> None:
    folder = history(tmp_path / "run", [1])
    save_file({"w": torch.ones(2)}, folder / "step-2.safetensors")
    write({"w": torch.ones(2)}, folder / "step_3")
    trained(folder / "checkpoint-4", step=4)
    report = run_import(store, plan_import(store, folder))
    assert [(one.checkpoint.step, one.checkpoint.format) for one in report.outcomes] == [
        (1, "torch"), (2, "safetensors"), (3, "dcp"), (4, "hf"),
    ]  # fmt: skip
    assert kept(store.restore(2)) == kept(store.restore(3)) == kept({"w": torch.ones(2)})


def test_a_trainers_output_folder_is_a_history_and_its_own_weights_are_not_in_it(tmp_path: Path) -> None:
    trained(tmp_path / "out", step=20)
    trained(tmp_path / "out" / "checkpoint-10", step=10)
    found = discover(tmp_path / "out")
    assert [one.step for one in found.checkpoints] == [10]
    assert "model.safetensors" in {one.name for one in found.passed_over}


def test_the_step_of_one_checkpoint_can_be_said(store: Store, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model.pt")
    with pytest.raises(InvalidInputError, match=r"which step is model\.pt of\?.*--step N"):
        plan_import(store, tmp_path / "model.pt")
    run_import(store, plan_import(store, tmp_path / "model.pt", step=12))
    assert store.restore(12) == {"a": 1}
    with pytest.raises(InvalidInputError, match="--step is for a single checkpoint, and there are 2"):
        plan_import(store, history(tmp_path / "old", [1, 2]), step=5)
    with pytest.raises(InvalidInputError, match="step is a whole number"):
        plan_import(store, tmp_path / "model.pt", step=-1)


def test_places_without_checkpoints_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is nothing at"):
        plan_import(store, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "step_1.txt").touch()
    os.mkfifo(tmp_path / "empty" / "step_2.pt")  # opening it would wait for a writer
    with pytest.raises(InvalidInputError, match="is no checkpoint that can be read, nor a folder of them"):
        plan_import(store, tmp_path / "empty")
    torch.save(1, tmp_path / "empty" / "best.pt")
    with pytest.raises(InvalidInputError, match=r"no name in .* has a step in it; .* such as best\.pt"):
        plan_import(store, tmp_path / "empty")
    torch.save(1, tmp_path / "empty" / "step_1.pt")
    torch.save(1, tmp_path / "empty" / "checkpoint-1.pt")
    with pytest.raises(InvalidInputError, match=r"checkpoint-1\.pt and step_1\.pt are all of step 1"):
        plan_import(store, tmp_path / "empty")


@pytest.mark.parametrize(("tag", "branch"), [("12", "main"), ("latest", "main"), ("a b", "main"), (None, "7")])
def test_names_that_cannot_be_are_refused_before_anything(
    store: Store, tmp_path: Path, tag: str | None, branch: str
) -> None:
    folder = history(tmp_path / "old", [1])
    with pytest.raises(InvalidInputError):
        run_import(store, plan_import(store, folder, branch=branch), tag=tag)
    assert store.snapshots() == []
