"""The processes of a run that ended, and the time until it continued without them: lines of its `events.jsonl`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from lab.events import append_event
from lab.records import RunFolder
from lab.run_files import StoredEvent


@dataclass
class _Open:
    """An interruption from which the run has not yet recovered."""

    process: Literal["rank", "engine", "run"]
    step: int
    since: float
    reason: str
    index: int | None = None


class Interruptions:
    """The processes of a run that ended, written to its folder as soon as it continues without them."""

    def __init__(self, folder: RunFolder):
        self.folder, self.step, self._resumed = folder, 0, 0
        self._lock = threading.Lock()  # an engine may be lost in the thread that samples ahead
        rows = folder.metrics()
        self._open: list[_Open] = []
        # Rows in the folder are of an earlier process: this one continues a run that was stopped.
        if rows:
            self.step = int(rows[-1]["step"])
            self.begin("run", "it was stopped, and continued")

    def begin(self, process: Literal["rank", "engine", "run"], reason: str, index: int | None = None) -> None:
        """Notes a loss, during global step `step`."""
        self._open.append(_Open(process, self.step, time.monotonic(), reason, index))

    def resume(self, step: int) -> None:
        """Notes the step from whose checkpoint the run continues."""
        self._resumed = step

    def end(self) -> None:
        """Records all losses; the run is about to take its next step."""
        for one in self._open:
            self._write(one, self._resumed)
        self._open, self.step = [], self._resumed

    def engine_was_lost(self, index: int, reason: str, seconds: float) -> None:
        """Records an engine that another has replaced; no step is lost with it."""
        self._write(_Open("engine", self.step, time.monotonic() - seconds, reason, index), self.step)

    def _write(self, one: _Open, resumed: int) -> None:
        seconds = round(time.monotonic() - one.since, 3)
        event = StoredEvent(
            process=one.process, step=one.step, resumed=resumed, seconds=seconds, reason=one.reason, index=one.index
        )
        with self._lock:
            append_event(self.folder.path, event)


__all__ = ["Interruptions"]
