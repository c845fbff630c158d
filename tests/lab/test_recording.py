"""The times at which a checkpoint is due: by steps, at the end, and by the time since the last one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import recording
from lab.config.run import CheckpointBlock, RunConfig
from lab.records import RunFolder


def saves(monkeypatch: pytest.MonkeyPatch, block: CheckpointBlock, step_minutes: float, num_steps: int) -> list[int]:
    """After which steps of a run whose steps take so long a checkpoint is written."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: clock.now))
    config = RunConfig.model_construct(checkpoint=block, num_steps=num_steps)
    recorder = recording.RunRecorder(config, RunFolder(Path("unused")), lambda number: {}, None)
    written: list[int] = []
    for number in range(1, num_steps + 1):
        clock.now += 60 * step_minutes
        recorder.checkpoint(number, written.append)
    return written


@pytest.mark.parametrize(
    ("fields", "step_minutes", "expected"),
    [
        ({"every": 4}, 10, [4, 8, 9]),
        ({"every": 100, "every_minutes": 30}, 10, [3, 6, 9]),
        ({"every": 100, "every_minutes": 30}, 40, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"every": 4, "every_minutes": 30}, 10, [3, 4, 7, 8, 9]),  # the clock starts anew at each
        ({"every": 100, "every_minutes": 30}, 1, [9]),
    ],
)
def test_checkpoints_are_due_by_steps_and_by_time(fields, step_minutes, expected, monkeypatch):
    """Whichever comes first, minutes counting from the last checkpoint; the last step always makes one."""
    assert saves(monkeypatch, CheckpointBlock(**fields), step_minutes, 9) == expected
