"""Rows of fitted engines: the sandbox's engine is fitted to a real vLLM engine on one model, then compared with it on
another.

Seed s uses the models of cold starts 2s and 2s + 1: the first for the fit, the second unseen. Both models go to vLLM
and Megatron-core as Hugging Face folders, through `firstorder ladder` in its own process.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.config import shipped
from lab.manifest import manifest
from lab.tasks.tokenizers import CharTokenizer
from lab.traces import Trace
from sandbox.config import SandboxRun
from sandbox.export import initial, write
from sandbox.ledger.cells import Cell
from sandbox.measure.calibrate import Calibration, FittedFigure, Target, target_of
from sandbox.measure.defect_table import Bench
from sandbox.run import open_task

LADDER = shipped.FOLDER / "demo_scaled" / "base.yaml"
RUNG = "bf16, fp8 weights"
NUM_DRAWS = 4
"""Batches that each of the real and the fitted engine samples from a model."""
NUM_TRIALS = 30
"""Trials of the search per format."""


@dataclass(frozen=True)
class Sampled:
    """A model and the traces that the real engine sampled from it."""

    config: SandboxRun
    traces: tuple[Trace, ...]

    def calibration(self) -> Calibration:
        """The model on the sandbox's bench, with the means of its traces' figures as the target."""
        target = Target.pooled([target_of(trace) for trace in self.traces])
        # Without a step of training: the traces are of the model before RL, as `sampled` exported it.
        return Calibration(Bench(self.config, num_steps=0), target)


def sampled(config: SandboxRun, number: int, folder: Path) -> Sampled:
    """The model of cold start `number`, sampled by the real engine; RuntimeError with its last line if it fails."""
    assert config.cold_start is not None
    start = config.cold_start.model_copy(update={"seed": number})
    config = config.model_copy(update={"seed": number, "cold_start": start})
    model, traces = folder / f"model-{number}", folder / f"traces-{number}"
    tokenizer = open_task(config).tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    write(initial(config, report=False), tokenizer, model)
    batch = config.algorithm.batch
    command = [
        sys.executable, "-m", "firstorder", "ladder", str(LADDER), "--rung", RUNG, "--seeds", str(NUM_DRAWS),
        "--traces", str(traces), "--model.path", str(model), "--seed", str(number), "--output", str(folder / "runs"),
        "--training.precision", "fp32", "--training.num_ranks", "1", "--training.expert_parallel", "1",
        "--algorithm.batch.num_prompts", str(batch.num_prompts),
        "--algorithm.batch.num_responses", str(batch.num_responses),
        "--algorithm.batch.num_minibatches", "1",
    ]  # fmt: skip
    # A process of its own, by command: the sandbox imports nothing of the cluster world.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"firstorder ladder ended with {done.returncode}: {last}")
    return Sampled(config, tuple(Trace.load(path) for path in sorted(traces.glob("*.safetensors"))))


def fitted_row(cell: Cell, root: str) -> dict[str, Any]:
    """The row of the cell, with the ratio of each figure on the unseen model, fitted over real engine, as a probe.

    A figure's ratio is exp of its residual, so that a tail of few tokens counts little (`sandbox.measure.calibrate`).
    """
    started, folder = time.monotonic(), Path(root) / "engine-fit" / cell.key
    seen, unseen = (sampled(cell.config, 2 * cell.seed + i, folder) for i in (0, 1))
    fit = seen.calibration().fit(NUM_DRAWS, NUM_TRIALS)
    found = unseen.calibration().measured(fit.defects, range(NUM_DRAWS))
    about = manifest(cell.seed)
    return {
        "cell": cell.key, "regime": cell.regime, "arm": cell.arm, "seed": cell.seed, "num_steps": 0, "last_step": 0,
        "verdict": "stable", "first_step": None, "rules": [], "series": {},
        "probes": _ratios(found), "seen": _ratios(fit.figures), "engine": fit.yaml(),
        "commit": about.get("commit"), "has_local_changes": about.get("has_local_changes"), "machine": about["cpu"],
        "torch": about["versions"].get("torch"), "seconds": round(time.monotonic() - started, 1), "cpu_seconds": None,
    }  # fmt: skip


def _ratios(figures: Sequence[FittedFigure]) -> dict[str, float]:
    return {figure.name: float(f"{math.exp(figure.residual):.4g}") for figure in figures}


__all__ = ["LADDER", "NUM_DRAWS", "RUNG", "Sampled", "fitted_row", "sampled"]
