"""The writes to disk after each global step, in their order: metrics, then the trace, then the checkpoint.

A metrics row is written before the checkpoint that contains it, so a run killed in between drops the row
and computes it again. Rows are numbered by the global steps taken; row 0 is the evaluation before the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from lab.config.run import RunConfig
from lab.interrupts import held
from lab.progress import ProgressLines
from lab.records import RunFolder
from lab.run_files import RESERVED
from lab.traces import Apart, Trace
from theory import metrics as registry
from theory.loop import NonFiniteError, StepResult

Scalars = dict[str, float]


@runtime_checkable
class MetricLogger(Protocol):
    """A logger that takes one row under its step number, as Lightning's do."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Takes a row."""
        ...


class RunRecorder:
    """Evaluates when due, and writes a step's row, trace and checkpoint. `evaluate(number)` gives eval metrics.

    `decode` gives the text of tokens, so that traces can be read.
    Raises ValueError for a metric that is not registered, RecordError where the disk refuses, and NonFiniteError for a
    metric that is NaN or infinite, after its row and trace are written and before the checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        evaluate: Callable[[int], Scalars],
        progress: ProgressLines | None,
        loggers: Sequence[MetricLogger] = (),
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ):
        self.config = config
        self.folder = folder
        self.evaluate = evaluate
        self.progress = progress
        self.loggers = loggers
        self.decode = decode
        self._saved_at = time.monotonic()

    def checkpoint_due(self, number: int) -> bool:
        """After every `checkpoint.every` steps, after the last one, and `checkpoint.every_minutes` after the last save.

        Until the process has saved once, minutes count from its start.
        """
        block = self.config.checkpoint
        minutes = (time.monotonic() - self._saved_at) / 60
        is_late = block.every_minutes is not None and minutes >= block.every_minutes
        return is_late or number % block.every == 0 or number == self.config.num_steps

    def evaluation_due(self, number: int) -> bool:
        """Before the first step (0), after every `evaluation.every` steps, and after the last."""
        return number % self.config.evaluation.every == 0 or number == self.config.num_steps

    def begin(self, extra: Mapping[str, float] | None = None) -> None:
        """Writes row 0, with `extra` in it, unless a continued run has it already."""
        rows = self.folder.metrics()
        if not rows:
            self.append(0, self.evaluate(0) | dict(extra or {}))
        elif len(rows) == 1:  # a logger may have missed it, and no repeated step logs it
            row = {name: value for name, value in rows[0].items() if name not in RESERVED and value is not None}
            self._log(0, row)

    def record(
        self,
        number: int,
        result: StepResult,
        save_checkpoint: Callable[[int], object],
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Evaluates, writes and saves after the `number`-th global step; `extra` holds a world's own metrics."""
        row = result.metrics | dict(extra or {})
        if self.evaluation_due(number):
            row |= self.evaluate(number)
        self.append(number, row)
        # After the row, from which the verdict reads the value that ends the run; before the checkpoint.
        try:
            _check_finite(row, result)
        except NonFiniteError:
            self.save_trace(number, result)  # the step's tokens and log-probs are the evidence
            raise
        if number % self.config.traces.every == 0 or number == self.config.num_steps:
            self.save_trace(number, result)
        self.checkpoint(number, save_checkpoint)
        # Last, so that what is shown has been written.
        if self.progress is not None:
            self.progress.show(number, row)

    def save_trace(self, number: int, result: StepResult) -> None:
        """Writes the step's samples and scores, whether a trace is due or not."""
        rollouts, scores = result.rollouts, result.scores
        # What other processes may hold: the file takes it a part at a time.
        apart = Apart(rollouts.experts, scores.natural, rollouts.top, scores.logp_top)
        rollouts = replace(rollouts, experts=None, top=None)
        scores = replace(scores, natural=None, logp_top=None)
        old_pass = self.config.algorithm.build().passes.old
        trace = Trace.of(rollouts, scores, result.rewards_B, number, self.decode, old_pass)
        self.folder.save_trace(number, trace, apart)

    def checkpoint(self, number: int, save: Callable[[int], object]) -> None:
        """Saves where a checkpoint is due."""
        if self.checkpoint_due(number):
            save(number)
            self._saved_at = time.monotonic()

    def append(self, number: int, row: Scalars) -> None:
        """One row of metrics, to metrics.jsonl first and then to every logger."""
        registry.check(row)
        with held():  # a signal in between would leave file and loggers one row apart
            self.folder.append_metrics(number, row)
            self._log(number, row)

    def _log(self, number: int, row: Scalars) -> None:
        for logger in self.loggers:
            logger.log_metrics(row, step=number)


def _check_finite(row: Scalars, result: StepResult) -> None:
    """Raises NonFiniteError, naming the first metric that is not finite and the step's tensors that are not."""
    bad = next((name for name, value in row.items() if not math.isfinite(value)), None)
    if bad is None:
        return
    tensors = {
        "logp_mu": torch.cat([response.logp_mu for response in result.rollouts.responses]),
        "logp_old": result.scores.logp_BT,
        "entropy": result.scores.entropy_BT,
        "rewards": result.rewards_B,
    }
    named = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    where = f"{', '.join(named)} of this step is not finite" if named else f"finite {', '.join(tensors)} overflow in it"
    raise NonFiniteError(f"{bad} is {row[bad]}: {where}")
