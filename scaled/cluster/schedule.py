"""The order of a global step's parts: one after the other, or the next rollout while this batch trains.

Both schedules call theory's `collect`, `learn` and `hand_over`, so every line of the algorithm is shared. Staleness is
measured, not assumed: the version that the trainer has when it scores a response, minus the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from scaled.config import ScheduleBlock
from theory.algorithm import Algorithm
from theory.contracts import RolloutEngine, Rollouts, Task, TrainingEngine
from theory.loop import Collected, StepResult, collect, hand_over, learn
from theory.oversampling import Backlog
from theory.step_metrics import version_lag_metrics

Turn = Callable[[bool], None]
"""Called with False before ranks use the GPUs that they share with engines, with True before engines do."""


@runtime_checkable
class Schedule(Protocol):
    """Runs global steps in order."""

    def start(self, version: int, backlog: Backlog | None = None) -> None:
        """Hands the trainer's weights over as `version`; the next step samples from them, and continues `backlog`."""
        ...

    def step(self, step: int) -> StepResult:
        """Global step `step`; afterwards the engines hold the trainer's weights as version step + 1."""
        ...

    def close(self) -> None:
        """Drops the work in flight."""
        ...


class Synchronous:
    """theory.loop.global_step, with a turn for colocated engines in between."""

    def __init__(
        self,
        algorithm: Algorithm,
        rollout: RolloutEngine,
        learner: TrainingEngine,
        task: Task,
        seed: int,
        block: ScheduleBlock,
        turn: Turn | None = None,
    ):
        self.algorithm, self.rollout, self.learner = algorithm, rollout, learner
        self.task, self.seed, self.block = task, seed, block
        self.turn: Turn = turn or (lambda awake: None)
        self.backlog: Backlog | None = None

    def start(self, version: int, backlog: Backlog | None = None) -> None:
        """Hands the weights over, to engines that a rank's death may have left asleep.

        `backlog` has the responses in progress that the first step continues (over-sampling).
        """
        self.backlog = backlog
        self.turn(True)
        hand_over(self.algorithm, self.rollout, self.learner, version)

    def step(self, step: int) -> StepResult:
        """Collect, learn, hand over."""
        collected = self._collect(step)
        self.turn(False)
        result = self._learn(step, collected)
        self.turn(True)
        hand_over(self.algorithm, self.rollout, self.learner, version=step + 1)
        return result

    def close(self) -> None:
        """Nothing is ever in flight."""

    def _collect(self, step: int) -> Collected:
        collected = collect(step, self.algorithm, self.rollout, self.task, self.seed, self.backlog)
        self.backlog = collected.backlog
        return collected

    def _learn(self, step: int, collected: Collected) -> StepResult:
        lags = version_lags(collected.rollouts, step, self.block.max_staleness)
        result = learn(step, self.algorithm, self.learner, collected, self.seed)
        return replace(result, metrics=result.metrics | lags)


class OneStepOff(Synchronous):
    """The engines sample batch s + 1 while batch s trains; the first batch, also after a resume, is on fresh weights.

    Raises ValueError, naming schedule.max_staleness, where that allows no lag.
    """

    def __init__(self, num_steps: int, *args, **kwargs) -> None:  # those of Synchronous
        super().__init__(*args, **kwargs)
        if self.block.max_staleness < 1:
            raise ValueError(
                f"schedule.max_staleness: expected at least 1 where schedule.kind is one_step_off, "
                f"got {self.block.max_staleness}"
            )
        self.num_steps = num_steps
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self.pending: Future[Collected] | None = None
        self.handed: dict[int, Tensor] | None = None

    def start(self, version: int, backlog: Backlog | None = None) -> None:
        """Hands the weights over, and remembers the predictor that is folded into them."""
        super().start(version, backlog)
        self._remember()

    def step(self, step: int) -> StepResult:
        """Learns from the batch at hand while the next one is sampled, then hands the weights over."""
        collected = self._sample(step) if self.pending is None else self.pending.result()
        self.pending = self.thread.submit(self._sample, step + 1) if step + 1 < self.num_steps else None
        result = self._learn(step, collected)
        if self.pending is not None:
            self.pending.exception()  # wait: a rollout has one version of the weights; the next step raises its error
        hand_over(self.algorithm, self.rollout, self.learner, version=step + 1)
        self._remember()
        return result

    def close(self) -> None:
        """Waits for the batch in flight, which nobody will train on."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.pending = None

    def _sample(self, step: int) -> Collected:
        return replace(self._collect(step), predictor=self.handed)

    def _remember(self) -> None:
        """mu's W_p (Pr3): by the time its rollouts are learned from, the learner's has moved on."""
        if self.algorithm.passes.rollout == "predicted":
            self.handed = self.learner.predictor_weights()


def version_lags(rollouts: Rollouts, version: int, max_staleness: int) -> dict[str, float]:
    """`version_lag_metrics`, checked. Raises ValueError, naming schedule.max_staleness, for a maximum beyond it."""
    metrics = version_lag_metrics(rollouts, version)
    largest = metrics["staleness/version_lag_max"]
    if largest > max_staleness:
        raise ValueError(
            f"schedule.max_staleness: expected responses at most {max_staleness} versions behind the trainer, got "
            f"{largest:.0f} at global step {version}"
        )
    return metrics


__all__ = ["OneStepOff", "Schedule", "Synchronous", "Turn", "version_lags"]
