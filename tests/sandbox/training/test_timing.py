"""Times of a sandbox run: beside its metrics, in its report, and in none of its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.config.load import load
from lab.records import RunFolder
from sandbox.config import SandboxRun
from sandbox.run import run
from sandbox.training.timing import ROLLOUT, TRAINING


def test_a_run_says_where_its_time_goes(tmp_path: Path) -> None:
    """Each step has the time of every part that it called, together at most the step's own; the page draws them."""
    words = ["--output", str(tmp_path), "--num_steps", "2", "--algorithm.objective.kl_coefficient", "0.1"]
    folder = run(load("smoke", words, {"sandbox": SandboxRun}), progress="none")
    timing = folder.timing()
    assert list(timing) == [1, 2]
    for line in timing.values():
        parts = {name: line[name] for name in (*ROLLOUT.values(), *TRAINING.values())}
        assert min(parts.values()) > 0 and sum(parts.values()) <= line["timing_s/step"]
    assert not any("timing" in name for row in folder.metrics() for name in row)
    page = (folder.path / "report.html").read_text()
    assert 'id="step-time"' in page and 'id="time-parts"' in page


def test_a_step_that_was_taken_again_has_its_last_time(tmp_path: Path) -> None:
    """A resumed run appends; a line that is no row is one line with its number; a torn last one is left out."""
    folder = RunFolder(tmp_path)
    for seconds in (5.0, 7.0):
        folder.append_timing(1, {"timing_s/step": seconds})
    assert folder.timing()[1] == {"step": 1, "timing_s/step": 7.0}
    path = folder.path / "timing.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps({"step": 2}).encode())
    assert list(folder.timing()) == [1]
    path.write_bytes(path.read_bytes() + b"\n[]\n")
    with pytest.raises(ValueError, match=r"timing\.jsonl, line 4"):
        folder.timing()
