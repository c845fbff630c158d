"""A run that is killed, wherever it is, resumes to the same bytes."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.kills import WAYS, measure


def test_killed_runs_resume_to_the_same_bytes(tmp_path: Path) -> None:
    """Killed at a moment, at the use of a file and inside a write, a run ends with the files of one never stopped."""
    tally, faults = measure(4, tmp_path)
    assert not faults
    assert tally.keys() == set(WAYS) and tally.total() >= 4
