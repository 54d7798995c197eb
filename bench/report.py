"""Results as tables and plots: on the terminal, and in docs/benchmarks.md between its marks."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import ROOT

DOCUMENT = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "benchmarks"
PLOTTED = ("save", "save-real", "restore", "restore-cold", "stall", "increments")
OURS, PEER, LIMIT = "#0b6e4f", "#8a8f98", "#d9b44a"
_LIMITS = ("memcpy", "O_DIRECT", "BLAKE3", "pread", "buffered")

Document = dict[str, Any]


def print_result(path: Path) -> None:
    """One result on the terminal."""
    found = json.loads(path.read_text())
    console = Console()
    table = Table("", found["figures"][0]["unit"] if _one_unit(found) else "", "from – to", title=found["about"])
    for figure in found["figures"]:
        unit = "" if _one_unit(found) else f" {figure['unit']}"
        table.add_row(figure["name"], _number(figure["median"]) + unit, _range(figure))
    console.print(table)
    for claim in found["claims"]:
        console.print(f"{'met   ' if claim['met'] else 'MISSED'} {_claim(claim)}")
    for name, why in found["skipped"].items():
        console.print(f"skipped {name}: {why}", markup=False)


def write_report(results: Path) -> None:
    """Put the results that there are into docs/benchmarks.md, each between its marks, and draw the plots."""
    text = DOCUMENT.read_text()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for area, result in found.items():
        if area in PLOTTED:
            plot(result, PLOTS / f"{area}.svg")
        text = between_marks(text, area, _section(area, result))
    text = between_marks(text, "goals", _goals(found))
    DOCUMENT.write_text(text)
    print(f"wrote {DOCUMENT} from {len(found)} results")


def between_marks(text: str, area: str, section: str) -> str:
    """`text` with what stands between the marks of `area` replaced; as it is if it has none."""
    begin, end = f"<!-- begin {area} -->", f"<!-- end {area} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{section}\n{end}", text)


def _section(area: str, result: Document) -> str:
    lines = [f"{result['about']}.", ""]
    if area in PLOTTED:
        lines += [f"![{result['about']}](benchmarks/{area}.svg)", ""]
    lines += _grid(result) if area == "sizes" else _list(result)
    if result["skipped"]:
        lines += ["", *(f"- not measured: {name}: {why}" for name, why in sorted(result["skipped"].items()))]
    machine = result["machine"]
    lines += ["", f"{result['rounds']} rounds, {machine['processor']}, {machine['cores']} cores, "
              f"{machine['memory_gib']} GiB, {machine['filesystem']}, torch {machine['torch']}, "
              f"load {machine['load_average']:.1f} at the end."]  # fmt: skip
    return "\n".join(lines)


def _list(result: Document) -> list[str]:
    lines = ["| | median | from – to |", "|---|---:|---:|"]
    for figure in result["figures"]:
        lines.append(f"| {figure['name']} | {_number(figure['median'])} {figure['unit']} | {_range(figure)} |")
    return lines


def _grid(result: Document) -> list[str]:
    """Figures named "row: column" as a table."""
    cells = {tuple(figure["name"].split(": ", 1)): figure["median"] for figure in result["figures"]}
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in rows:
        values = (_number(cells[row, column]) if (row, column) in cells else "" for column in columns)
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    return lines


def _goals(found: dict[str, Document]) -> str:
    lines = ["| area | what | found | goal | |", "|---|---|---:|---:|---|"]
    for area, result in found.items():
        for claim in result["claims"]:
            sign = "≥" if claim["at_least"] else "≤"
            lines.append(
                f"| {area} | {claim['what']} | {_number(claim['value'])} | {sign} {claim['goal']:g} | "
                f"{'met' if claim['met'] else '**missed**'} |"
            )
    return "\n".join(lines)


def plot(result: Document, path: Path) -> None:
    """Horizontal bars: ours, peers and limits told apart by colour, the spread as a line."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = result["area"]  # the same figures give the same file
    pyplot = import_module("matplotlib.pyplot")
    unit = result["figures"][0]["unit"]
    shown = [figure for figure in result["figures"] if figure["unit"] == unit][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(shown) + 1.1))
    medians = [bar["median"] for bar in shown]
    spread = [[bar["median"] - bar["least"] for bar in shown], [bar["greatest"] - bar["median"] for bar in shown]]
    colours = [_colour(bar["name"], result["area"]) for bar in shown]
    axes.barh([bar["name"] for bar in shown], medians, xerr=spread, color=colours, ecolor="#444444", capsize=2)
    axes.set_xlabel(f"{unit}, median of {result['rounds']} rounds; lines from least to greatest")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _colour(name: str, area: str) -> str:
    if name.startswith("ckstore") or (area == "increments" and "," in name and not name.startswith("DCP")):
        return OURS
    return LIMIT if name.startswith(_LIMITS) else PEER


def _one_unit(result: Document) -> bool:
    return len({figure["unit"] for figure in result["figures"]}) == 1


def _claim(claim: Document) -> str:
    sign = "≥" if claim["at_least"] else "≤"
    return f"{_number(claim['value'])} {claim['what']} (goal {sign} {claim['goal']:g})"


def _range(figure: Document) -> str:
    return "" if figure["rounds"] == 1 else f"{_number(figure['least'])} – {_number(figure['greatest'])}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


