"""Says at the end how many cases each fuzzer has tried, and how many of them were refused."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line a fuzzer; docs/reliability.md has those of `make fuzz`."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            noted = dict(report.user_properties)
            if "cases" in noted:
                name = report.nodeid.rpartition("/")[2].removeprefix("test_").replace(".py::test", "")
                terminalreporter.write_line(
                    f"{name}: {noted['cases']:,} cases, {noted['refused']:,} refused, {outcome}"
                )
