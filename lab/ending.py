"""The end of a run, the same in both worlds: the verdict on its records, then its page."""

from __future__ import annotations

from lab.config.run import RunConfig
from lab.records import RunFolder
from lab.report import write_report
from lab.verdict import judge


def finish(config: RunConfig, folder: RunFolder) -> None:
    """Writes verdict.json, from which on no step is taken again, and report.html."""
    folder.write_verdict(judge(folder.metrics(), config.verdict).to_json())
    write_page(folder)


def write_page(folder: RunFolder) -> None:
    """Writes report.html: all that a run lacks which was killed after its verdict."""
    write_report([folder], folder.path / "report.html")


__all__ = ["finish", "write_page"]
