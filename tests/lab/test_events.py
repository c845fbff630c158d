"""Laws of events.jsonl: lines are only added, a torn one is left out, and one that is no event is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.events import FILE, append_event, events
from lab.run_files import StoredEvent

RANK = StoredEvent(process="rank", step=7, resumed=4, seconds=2.5, reason="its process ended", index=1)
RUN = StoredEvent(process="run", step=4, resumed=4, seconds=0.0, reason="stopped")


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Order and values are kept, also behind a line that a killed process left half written."""
    assert events(tmp_path) == []
    append_event(tmp_path, RANK)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"process": "eng')
    assert events(tmp_path) == [RANK]
    append_event(tmp_path, RUN)
    assert events(tmp_path) == [RANK, RUN]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"process": "driver", "step": 1, "resumed": 0, "seconds": 1.0, "reason": ""}', "process: expected 'rank'"),
        ('{"process": "run", "step": -1, "resumed": 0, "seconds": 1.0, "reason": ""}', "step: "),
        ('{"process": "run", "step": 1, "resumed": 0, "seconds": NaN, "reason": ""}', "seconds: "),
        ("[]", ""),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str, wanted: str) -> None:
    """One line says file, line number and field."""
    append_event(tmp_path, RANK)
    with open(tmp_path / FILE, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"^{tmp_path / FILE}, line 2: {wanted}[^\n]*$"):
        events(tmp_path)
