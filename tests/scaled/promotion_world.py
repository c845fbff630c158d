"""Real sandbox runs in a folder of their own, and a cluster config to promote them to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.records import RunFolder
from lab.verdict import VerdictRules
from scaled import promotion_runs

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"

RULES = VerdictRules(min_steps=4, window=2, patience=1, early_steps=2)
"""Promotion's own rules for runs of four steps, which take seconds; the real ones need twenty."""

# A cold start that solves some problems, and a rate that keeps them solved: a run without rewards is undecided.
# kl_limit 0 in one of the runs makes any engine gap a collapse, by rule.
RUN = f"""
base: {SMOKE}
name: run
task: {{min_digits: 1, max_digits: 1, num_held_out: 1}}
cold_start: {{target_accuracy: 0.1, max_updates: 600, check_every: 20}}
evaluation: {{max_prompts: 1}}
algorithm:
  optimizer: {{learning_rate: 1e-4}}
  objective: {{correction: {{name: icepop, lo: 0.5, hi: 2.0}}, eps_high: 0.3, aggregation: length_norm}}
  replay: {{mode: Pr3, predictor: {{loss: delta}}}}
  dynamic_sampling: {{enabled: true, max_rounds: 2}}
verdict: {{min_steps: 4, window: 2, patience: 1, early_steps: 2}}
"""

TARGET_BASE = """
seed: 3
backend: scaled
num_steps: 1000
task: {kind: arithmetic}
model: {path: models/Qwen3-30B-A3B, shape: qwen3-30b-a3b}
training: {num_ranks: 32, tensor_parallel: 4, expert_parallel: 8, micro_batch_size: 1}
rollout: {num_engines: 8, tensor_parallel: 4, max_model_len: 34816, precision: {weights: fp8_block}}
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 64, num_responses: 16}
  sampling: {max_tokens: 32768, temperature: 0.9}
  optimizer: {learning_rate: 3e-6, warmup_steps: 5, max_grad_norm: 0.7}
"""
TARGET = "base: base.yaml\nname: target\nalgorithm: {replay: {predictor: {num_positions: 77}}}\n"


def train_runs(home: Path) -> None:
    """Runs of two seeds, one of another rate, one that collapsed, and the target, in `home`."""
    for name, text in (("run", RUN), ("base", TARGET_BASE), ("target", TARGET)):
        (home / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for words in (
            ["--seed", "0"],
            ["--seed", "1"],
            ["--seed", "1", "--name", "other", "--algorithm.optimizer.learning_rate", "2e-4"],
            ["--seed", "1", "--name", "collapsed", "--verdict.kl_limit", "0"],
        ):
            assert main(["train", "run.yaml", "--progress", "none", *words]) == 0


def enter_copy(home: Path, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A copy, to be spoilt, as the working folder, with RULES as promotion's own."""
    copy = Path(shutil.copytree(home, folder / "home"))
    patch.chdir(copy)
    patch.setattr(promotion_runs, "RULES", RULES)
    return copy


def folder_of(name: str, seed: int) -> Path:
    """The run of that name and seed in the working folder."""
    return next(
        p for p in sorted(Path("runs", name).iterdir()) if f"\nseed: {seed}\n" in (p / "config.yaml").read_text()
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line with which the command refuses; exit code 2, nothing on stdout."""
    capsys.readouterr()
    assert main(["promote", *map(str, words), "--to", "target.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def rewrite_row(folder: Path, step: int, **metrics: float) -> None:
    """Other numbers in one line of metrics.jsonl."""
    rows = RunFolder(folder).metrics()
    rows = [row | metrics if row["step"] == step else row for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
