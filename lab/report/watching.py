"""The page of unfinished runs: rewritten as records arrive, and reloaded by an open browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.records import RunFolder
from lab.report.run_page import write_report

EVERY_S = 10
"""Seconds between two checks of the records, and between two loads of an open page."""


def watch(folders: Sequence[RunFolder], out: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Writes the page whenever a record of these runs has changed, until all have a verdict.

    The last page, of the finished runs, does not reload itself.
    """
    seen = None
    while True:
        # Read before the page is written, so that a run that ends in between is written once more.
        is_over, found = all(folder.is_finished for folder in folders), [_state(folder) for folder in folders]
        if is_over:
            write_report(folders, out)
            return
        if found != seen:
            write_report(folders, out, refresh_s=EVERY_S)
            seen = found
        sleep(EVERY_S)


def _state(folder: RunFolder) -> tuple[int, bool, int]:
    """The parts that change with the records: bytes of metrics.jsonl, existence of a verdict, number of traces."""
    path = folder.path / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0, folder.is_finished, len(folder.traces())
