"""What the crash tests count is shown at the end of a run: a proof by enumeration is worth what it enumerated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Tell = Callable[[str], None]


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Print a line now and again in the summary of the run."""
    node = request.node

    def say(line: str) -> None:
        print(line)
        node.user_properties.append(("told", line))

    return say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        value
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for key, value in report.user_properties
        if key == "told"
    ]
    if lines:
        terminalreporter.section("crash tests: what was enumerated")
        for line in lines:
            terminalreporter.write_line(str(line))
