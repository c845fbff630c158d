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

    def due(self, step: int) -> bool:
        """After every `evaluation.every` steps, and after the last."""
        return (step + 1) % self.config.evaluation.every == 0 or step + 1 == self.config.num_steps

    def __call__(self, learner: Learner, step: int) -> Scalars:
        self.engine.load_model(learner.model, version=step + 1)
        block = self.config.evaluation
        return evaluate(
            self.engine,
            learner.task,
            num_samples=block.num_samples,
            max_prompts=block.max_prompts,
            max_tokens=self.config.algorithm.sampling.max_tokens,
            temperature=block.temperature,
            seed=derive_seed(self.config.seed, "evaluation", step),
        )


class Recording(L.Callback):
    """Writes metrics, traces and checkpoints; a metrics row stands on disk before the checkpoint that contains it."""

    def __init__(self, config: SandboxRun, folder: RunFolder, evaluation: Evaluation, progress: ProgressLines | None):
        self.config = config
        self.folder = folder
        self.evaluation = evaluation
        self.progress = progress

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learner)
        step = int(batch)
        result = pl_module.result
        row = dict(result.metrics)
        if self.evaluation.due(step):
            row |= self.evaluation(pl_module, step)
            for logger in trainer.loggers:
                logger.log_metrics({k: v for k, v in row.items() if k.startswith("eval/")}, step=trainer.global_step)
        registry.check(row)
        self.folder.append_metrics(step, row)
        last = step + 1 == self.config.num_steps
        if (step + 1) % self.config.traces.every == 0 or last:
            self.folder.save_trace(step, Trace.of(result.rollouts, result.scores, result.rewards_B, step))
        if (step + 1) % self.config.checkpoint.every == 0 or last:
            state = {"next_step": step + 1}
            tensors = pl_module.training_engine.state_tensors()
            self.folder.save_checkpoint(step, tensors, state, keep=self.config.checkpoint.keep)
        if self.progress is not None:
            self.progress.show(step, row)


class ProgressLines:
    """One line every few steps: for logs, and for runs side by side."""

    def __init__(self, name: str, num_steps: int, every: int = 10):
        self.name, self.num_steps, self.every = name, num_steps, every
        self.started = time.monotonic()

    def show(self, step: int, row: Scalars) -> None:
        if (step + 1) % self.every == 0 or step + 1 == self.num_steps:
            seconds = time.monotonic() - self.started
            print(f"{self.name:<22} step {step + 1:>4}/{self.num_steps}  {seconds:>5.0f} s  {summary(row)}", flush=True)


class ProgressBar(ProgressLines):
    """A live bar with reward, KL, F(2) and entropy."""

    def __init__(self, name: str, num_steps: int, done: int = 0):
        super().__init__(name, num_steps)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[summary]}"))
        self.task = self.bar.add_task(name, total=num_steps, completed=done, summary="")
        self.bar.start()

    def show(self, step: int, row: Scalars) -> None:
        self.bar.update(self.task, completed=step + 1, summary=summary(row))
        if step + 1 == self.num_steps:
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
