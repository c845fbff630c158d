"""The interruptions of a run, `events.jsonl`: which process ended, at which step, and how long recovery took.

Lines are only appended: a run that is killed and continued keeps them, and a folder without the file has none.
"""

from __future__ import annotations

from pathlib import Path

from lab.files import append_line, whole_lines
from lab.run_files import StoredEvent
from lab.strict import validate_json

FILE = "events.jsonl"


def append_event(folder: Path, event: StoredEvent) -> None:
    """Appends the event to the folder's file; RecordError where the disk refuses."""
    append_line(folder / FILE, event.model_dump_json(exclude_none=True).encode())


def events(folder: Path) -> list[StoredEvent]:
    """The events in the order written; ValueError names the file and line of a malformed one."""
    path = folder / FILE
    lines = enumerate(whole_lines(path), start=1)
    return [validate_json(StoredEvent, line, f"{path}, line {number}") for number, line in lines]
