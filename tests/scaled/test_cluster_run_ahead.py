"""Laws of a cluster run with rollouts in flight or half done: a death costs no row, and a later version no bit.

Ray, processes, checkpoints and records are real; the engines inside are the sandbox's, which start in seconds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import scaled.run
from lab.records import RunFolder
from tests.scaled.cluster_run_world import SandboxSession, before_each_step, computed, config
from tests.scaled.ray_marks import RAY

pytestmark = RAY

SETS = ((1,), (0, 2))
"""The layers of the objects in which the second run of a test keeps routes and features."""


def test_a_run_with_batches_in_flight_goes_on_to_the_same_numbers(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps off, batch s is min(s, 2) versions behind; a rank's death, after which the batches of the checkpoint
    are trained on, changes no row: under Pr3 they keep routes, features and the predictor of their own version."""
    words = ["--schedule.steps_off", "2", "--schedule.max_staleness", "2", "--num_steps", "5", "--traces.every", "4"]
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = scaled.run.run(config(model, folders[0], *words), progress="none")
    assert [row["staleness/version_lag_max"] for row in whole.metrics()[1:]] == [0, 1, 2, 2, 2]
    assert [row["step"] for row in whole.metrics() if "eval/accuracy" in row] == [0, 3, 5]

    def kill(session, number, training, rollout):
        if number == 3 and not killed:
            checkpoint = session.folder.latest_sharded_checkpoint()
            killed.append(sorted(path.name for path in checkpoint.path.glob("ahead-*")))
            os.kill(training.pids()[1], signal.SIGKILL)

    killed = []
    before_each_step(monkeypatch, kill)
    monkeypatch.setattr(SandboxSession, "layer_sets", SETS)
    assert computed(scaled.run.run(config(model, folders[1], *words), progress="none")) == computed(whole)
    assert killed == [["ahead-0.safetensors", "ahead-1.safetensors"]]


PARTIAL = (
    "--algorithm.replay.mode", "R3", "--algorithm.sampling.max_tokens", "40", "--rollout.num_engines", "2",
    "--algorithm.oversampling.extra_prompts", "3", "--algorithm.oversampling.max_staleness", "2",
    "--schedule.max_staleness", "2", "--rollout.routes", "capture", "--checkpoint.every", "1",
)  # fmt: skip


def test_partial_rollouts_outlive_a_rank_and_a_kill(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines, responses of several versions whose stored routes ranks replay: a run that goes on from the stored
    backlog, after a rank's death and after its own, has the rows of one that nothing happened to."""
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = scaled.run.run(config(model, folders[0], *PARTIAL), progress="none")
    rows = whole.metrics()[1:]
    assert all(row["sampling/kept_responses"] > 0 and row["staleness/token_lag_max"] <= 2 for row in rows)
    assert max(row["staleness/mixed_response_fraction"] for row in rows) > 0.1
    assert max(row["staleness/version_lag_max"] for row in rows) == 2

    def kill(session, number, training, rollout):
        if number == 3 and not killed:
            killed.append(number)
            os.kill(training.pids()[1], signal.SIGKILL)
        if number == 5 and len(killed) == 1:
            killed.append(number)
            raise KeyboardInterrupt

    killed = []
    before_each_step(monkeypatch, kill)
    monkeypatch.setattr(SandboxSession, "layer_sets", SETS)
    with pytest.raises(KeyboardInterrupt):
        scaled.run.run(config(model, folders[1], *PARTIAL), progress="none")
    half = RunFolder.open(next((folders[1] / "runs" / "cut").iterdir()))
    assert computed(scaled.run.run(config(model, folders[1], *PARTIAL), folder=half, progress="none")) == computed(
        whole
    )
    assert killed == [3, 5]
