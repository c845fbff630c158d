"""Refused: a finished run, a folder in use. Resumed: a run that was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from lab.config.load import load
from lab.records import RunFolder
from sandbox.config import SandboxRun
from sandbox.run import run
from tests.forks import begin, end

CONFIG = """
name: resume
backend: sandbox
seed: 3
num_steps: 16
task: {kind: arithmetic, min_digits: 2, max_digits: 3, num_held_out: 8}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1, num_experts: 4, expert_size: 16}
engine: {defects: [{kind: weight_precision}, {kind: router_noise, std: 0.1}]}
cold_start: null
algorithm:
  objective: {preset: minirl}
  replay: {mode: Pr3, predictor: {num_positions: 4}}
  batch: {num_prompts: 4, num_responses: 2, num_minibatches: 2}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3, warmup_steps: 3}
evaluation: {every: 5, num_samples: 1, max_prompts: 4}
checkpoint: {every: 1}
logging: {loggers: [csv]}
"""


def config(tmp_path: Path, *overrides: str) -> SandboxRun:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return load(path, ["--output", str(tmp_path / "runs"), *overrides], {"sandbox": SandboxRun})


def only_folder(tmp_path: Path) -> Path:
    return next((tmp_path / "runs" / "resume").glob("*Z-*"))


def resume(tmp_path: Path, *words: str) -> int:
    """The exit code of `firstorder train --resume` for the config that `config` wrote."""
    options = ["--output", str(tmp_path / "runs"), "--progress", "none", *words, "--resume"]
    return main(["train", str(tmp_path / "config.yaml"), *options])


def kill_when(child: int, tmp_path: Path, lines: int) -> None:
    """Kills the process (-9) once its metrics have that many lines, wherever it then is in its next step."""
    for _ in range(12_000):
        files = list((tmp_path / "runs").glob("resume/*/metrics.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= lines:
            break
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert end(child) == -signal.SIGKILL, (tmp_path / "log").read_text()


PARTIAL = (
    "--algorithm.replay.mode", "R3", "--algorithm.sampling.max_tokens", "40", "--num_steps", "7",
    "--algorithm.oversampling.extra_prompts", "3", "--algorithm.oversampling.max_staleness", "3",
)  # fmt: skip


def test_a_killed_run_continues_its_partial_rollouts(tmp_path):
    """Responses in progress are part of the checkpoint: a run killed between its steps ends with the bits of one never
    stopped, in the mode that replays the routes of responses from several versions."""
    (tmp_path / "whole").mkdir()
    whole = run(config(tmp_path / "whole", *PARTIAL), progress="none")
    cut = tmp_path / "cut"
    cut.mkdir()
    config(cut)
    words = ["train", str(cut / "config.yaml"), "--output", str(cut / "runs"), "--progress", "none", *PARTIAL]
    kill_when(begin(lambda: main(words), cut / "log"), cut, lines=5)
    assert resume(cut, *PARTIAL) == 0
    resumed = RunFolder.open(only_folder(cut))
    assert resumed.metrics() == whole.metrics()
    rows = whole.metrics()[1:]
    assert max(row["staleness/mixed_response_fraction"] for row in rows) > 0.1
    assert all(row["sampling/kept_responses"] > 0 and row["staleness/token_lag_max"] <= 3 for row in rows)
    assert max(row["staleness/token_lag_max"] for row in rows) > 1
    a, b = whole.latest_checkpoint(), resumed.latest_checkpoint()
    assert a.tensors.keys() == b.tensors.keys() and "backlog.tokens" in a.tensors
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_a_run_in_use_and_a_finished_one_are_not_resumed(tmp_path, capsys):
    """A folder that another process is writing is refused. --resume on a config whose newest run is finished is one
    line, exit code 2. Both leave the run as it is."""
    few = ("--num_steps", "1")
    folder = run(config(tmp_path, *few), progress="none")
    before = folder.metrics()
    with folder.hold(), pytest.raises(ValueError, match="another process is running this run"):
        run(config(tmp_path, *few), folder=folder, progress="none")
    capsys.readouterr()
    assert resume(tmp_path, *few) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "expected an unfinished run" in errors
    assert folder.metrics() == before
