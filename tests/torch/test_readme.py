"""What the README shows is what there is, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MINIMAL, BY_HAND, SEVERAL = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
_BEFORE = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(3, 2))\nstate = {'model': model.state_dict()}\n"


def test_the_first_example_is_the_file_that_it_names() -> None:
    assert (ROOT / "examples" / "minimal.py").read_text() == MINIMAL


def test_the_second_example_runs(tmp_path: Path) -> None:
    # `exp@100` and the keys are of the reader's own history; everything else runs as it stands.
    script = tmp_path / "by_hand.py"
    script.write_text(_BEFORE + BY_HAND)
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_third_example_keeps_three_copies(tmp_path: Path) -> None:
    places = ["/nvme/gpt", "/disk/gpt", "/other/gpt"]
    script = "import ckstore\n" + SEVERAL + "store.save({'n': 1}, step=1)\nstore.close()\n"
    for place in places:
        assert place in script
        script = script.replace(place, f"{tmp_path}{place}")
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
    for place in places:
        with ckstore.open(f"{tmp_path}{place}") as store:
            assert store.restore() == {"n": 1}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_command_is_a_target_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= set(targets)
