"""What a run does after each global step: evaluate, write the record and a checkpoint, show progress."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lab.evaluation import evaluate
from lab.records import RunFolder
from lab.traces import Trace
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.learner import Learner
from theory import metrics as registry
from theory.streams import derive_seed

Scalars = dict[str, float]


class Evaluation:
    """avg@k of pi on the held-out problems: sampled by an exact engine, so that an engine's defect is not evaluated."""

    def __init__(self, config: SandboxRun, engine: SandboxEngine):
        self.config = config
        self.engine = engine

    def due(self, number: int) -> bool:
        """Before the first step (0), after every `evaluation.every` steps, and after the last."""
        return number % self.config.evaluation.every == 0 or number == self.config.num_steps

    def __call__(self, learner: Learner, number: int) -> Scalars:
        """The accuracy after `number` global steps."""
        self.engine.load_model(learner.model, version=number)
        block = self.config.evaluation
        return evaluate(
            self.engine,
            learner.task,
            num_samples=block.num_samples,
            max_prompts=block.max_prompts,
            max_tokens=self.config.algorithm.sampling.max_tokens,
            temperature=block.temperature,
            seed=derive_seed(self.config.seed, "evaluation", number),
        )


class Recording(L.Callback):
    """Writes metrics, traces and checkpoints, under the number of global steps taken (0 is before the first).

    A metrics row stands on disk before the checkpoint that contains it, so a run that is killed in between drops it.
    """

    def __init__(self, config: SandboxRun, folder: RunFolder, evaluation: Evaluation, progress: ProgressLines | None):
        self.config = config
        self.folder = folder
        self.evaluation = evaluation
        self.progress = progress

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        if not self.folder.metrics():
            self._append(trainer, 0, self.evaluation(pl_module, 0))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learner)
        number = int(batch) + 1
        result = pl_module.result
        row = dict(result.metrics)
        if self.evaluation.due(number):
            row |= self.evaluation(pl_module, number)
        self._append(trainer, number, row)
        last = number == self.config.num_steps
        if number % self.config.traces.every == 0 or last:
            self.folder.save_trace(number, Trace.of(result.rollouts, result.scores, result.rewards_B, number))
        if number % self.config.checkpoint.every == 0 or last:
            tensors = pl_module.training_engine.state_tensors()
            self.folder.save_checkpoint(number, tensors, {}, keep=self.config.checkpoint.keep)
        if self.progress is not None:
            self.progress.show(number, row)

    def _append(self, trainer: L.Trainer, number: int, row: Scalars) -> None:
        registry.check(row)
        self.folder.append_metrics(number, row)
        for logger in trainer.loggers:
            logger.log_metrics(row, step=number)


class ProgressLines:
    """One line every few steps: for logs, and for runs side by side."""

    def __init__(self, name: str, num_steps: int, every: int = 10):
        self.name, self.num_steps, self.every = name, num_steps, every
        self.started = time.monotonic()

    def show(self, number: int, row: Scalars) -> None:
        if number % self.every == 0 or number == self.num_steps:
            seconds = time.monotonic() - self.started
            print(f"{self.name:<22} step {number:>4}/{self.num_steps}  {seconds:>5.0f} s  {summary(row)}", flush=True)


class ProgressBar(ProgressLines):
    """A live bar with reward, KL, F(2) and entropy."""

    def __init__(self, name: str, num_steps: int, done: int = 0):
        super().__init__(name, num_steps)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[summary]}"))
        self.task = self.bar.add_task(name, total=num_steps, completed=done, summary="")
        self.bar.start()

    def show(self, number: int, row: Scalars) -> None:
        self.bar.update(self.task, completed=number, summary=summary(row))
        if number == self.num_steps:
            self.bar.stop()


def summary(row: Scalars) -> str:
    """Reward, discrepancy and entropy of a step in a line."""
    parts = [
        f"reward {row['reward/mean']:.3f}",
        f"k3 {row['rollout_corr/k3_kl']:.1e}",
        f"F(2) {row['rollout_corr/extreme_frac_tau2']:.1e}",
        f"entropy {row['actor/entropy']:.3f}",
    ]
    if "eval/accuracy" in row:
        parts.append(f"held-out {row['eval/accuracy']:.3f}")
    return "  ".join(parts)
