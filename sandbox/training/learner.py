"""The Lightning side of a sandbox run: a thin LightningModule whose training step is one global step of the RL loop.

Lightning provides the Trainer, loggers and callbacks; the mathematics is in `theory.loop.global_step`.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lab.lightning import L
from sandbox.engines.engine import SandboxEngine
from sandbox.training.engine import SandboxTrainingEngine
from sandbox.training.timing import Stopwatch
from theory.algorithm import Algorithm
from theory.contracts import Task
from theory.loop import StepResult, global_step
from theory.oversampling import Backlog
from theory.step_metrics import version_lag_metrics


class Learner(L.LightningModule):
    """The learner; a batch is the number of a global step. `result` and `seconds` are those of the last step.

    `backlog` has the responses in progress before the next one, where the algorithm over-samples.
    """

    step: int = -1
    result: StepResult
    seconds: dict[str, float]

    def __init__(
        self, training: SandboxTrainingEngine, rollout: SandboxEngine, task: Task, algorithm: Algorithm, seed: int
    ):
        super().__init__()
        self.automatic_optimization = False  # the training engine takes its own backward passes and steps
        self.training_engine = training
        self.model = training.model
        self.rollout = rollout
        self.task = task
        self.algorithm = algorithm
        self.seed = seed
        self.backlog: Backlog | None = None

    def on_fit_start(self) -> None:
        # Lightning counts optimiser steps in its own wrapper.
        self.training_engine.take_step = self.optimizers().step  # pyright: ignore[reportAttributeAccessIssue]
        self._watch = Stopwatch(self.rollout, self.training_engine)

    def training_step(self, batch: int, batch_idx: int) -> None:
        self.step = batch
        self._watch.start()
        parts = (self.rollout, self.training_engine, self.task, self.seed)
        self.result = global_step(self.step, self.algorithm, *parts, self.backlog)
        # Before the callbacks: the checkpoint of this step holds the responses that the next one continues.
        self.backlog = self.result.backlog
        self.seconds = self._watch.take()
        if self.rollout.stale is not None:
            self.result.metrics.update(version_lag_metrics(self.result.rollouts, self.step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.training_engine.optimizer


def step_loader(first: int, last: int) -> DataLoader:
    """Yields the numbers of the global steps first, ..., last - 1."""
    # batch_size=None: a batch is one number, without a batch axis. A range, as it takes no memory.
    return DataLoader(range(first, last), batch_size=None, num_workers=0)  # pyright: ignore[reportArgumentType]
