"""The order of a global step's parts: one after the other, or rollouts a fixed number of versions ahead of training.

Both schedules call theory's `collect` and `learn`, so every line of the algorithm is shared. Staleness is measured, not
assumed: the version that the trainer has when it scores a response, minus the version that sampled it. The design of
`Asynchronous` is in docs/decisions/0014-steps-off.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from torch import Tensor

from scaled.cluster.probe import ProbeError
from scaled.config import ScheduleBlock
from theory.algorithm import Algorithm
from theory.collection import Collected, collect
from theory.contracts import NamedTensors, RolloutEngine, Rollouts, Task, TrainingEngine
from theory.loop import StepResult, hand_over, learn
from theory.oversampling import Backlog
from theory.step_metrics import version_lag_metrics

Turn = Callable[[bool], None]
"""Called with False before ranks use the GPUs that they share with engines, with True before engines do."""

Stage = Callable[[NamedTensors], NamedTensors]
"""The weights as they are now, in memory that no later update changes, for engines that load them later."""

Check = Callable[[int, Rollouts], Callable[[], dict[str, float]]]
"""Called with the trainer's version and rollouts to score; what it returns is called once engines hold that version."""


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

    def start(self, version: int, backlog: Backlog | None = None, ahead: Sequence[Collected] = ()) -> None:
        """Hands the trainer's weights over as `version`, to engines that a rank's death may have left asleep.

        Global step `version` is next; its batch continues `backlog`, the responses in progress (over-sampling). There
        is no batch `ahead`.
        """
        self.backlog = backlog
        self.turn(True)
        hand_over(self.algorithm, self.rollout, self.learner, version)

    def step(self, step: int) -> StepResult:
        """Collect, learn, hand over; afterwards the trainer has version step + 1."""
        collected = self._collect(step)
        self.turn(False)
        result = self._learn(step, collected)
        self.turn(True)
        hand_over(self.algorithm, self.rollout, self.learner, version=step + 1)
        return result

    def settle(self) -> None:
        """Nothing: engines are idle and hold the trainer's weights, as an evaluation needs."""

    def ahead(self) -> list[Collected]:
        """None: every batch is of the weights that train on it."""
        return []

    def close(self) -> None:
        """Nothing is ever in flight."""

    def _collect(self, step: int) -> Collected:
        collected = collect(step, self.algorithm, self.rollout, self.task, self.seed, self.backlog)
        self.backlog = collected.backlog
        return collected

    def _learn(self, step: int, collected: Collected) -> StepResult:
        # Before training: a batch that is too stale must not change the weights.
        lags = version_lags(collected.rollouts, step, self.block.max_staleness)
        result = learn(step, self.algorithm, self.learner, collected, self.seed)
        return replace(result, metrics=result.metrics | lags)


@dataclass(frozen=True, eq=False)
class _Pushed:
    """One version of the weights on its way to the engines; `predictor` is the W_p folded into it (Pr3)."""

    version: int
    tensors: NamedTensors
    predictor: dict[int, Tensor] | None
    check: Callable[[], dict[str, float]]


class Asynchronous(Synchronous):
    """The engines sample up to k = `block.steps_off` batches ahead: batch s with version max(0, s - k), always.

    One thread samples the batches in order and loads each version between two of them. The trainer does not wait for
    that: a version stays in `stage`d memory until its turn. With k = 1 engines are idle by then, so they load it at
    once. Metrics of `check` are those of the version that sampled the row's batch.
    """

    def __init__(self, num_steps: int, *args, stage: Stage, check: Check, **kwargs) -> None:  # those of Synchronous
        super().__init__(*args, **kwargs)
        self.num_steps, self.stage, self.check = num_steps, stage, check
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self.batches: dict[int, Future[Collected]] = {}
        self.next_batch = 0
        self.held, self.checked = -1, {}

    def start(self, version: int, backlog: Backlog | None = None, ahead: Sequence[Collected] = ()) -> None:
        """Hands the weights over to idle engines.

        `ahead` are batch `version` and those after it, where an earlier process has sampled them; the first new one
        continues `backlog`. Without `ahead` batches `version` to `version` + k are all sampled with these weights.
        """
        self.backlog, self.next_batch = backlog, version + len(ahead)
        for step, collected in enumerate(ahead, version):
            self.batches[step] = Future()
            self.batches[step].set_result(collected)
        # At the start of a run the first version has a probe of its own, before any batch.
        self.newest = self._exported(version, ahead[0].rollouts if ahead else None)
        self._load(self.newest)

    def step(self, step: int) -> StepResult:
        """Learns from the batch at hand while the engines sample later ones.

        A ProbeError of the weights that this step made has its result.
        """
        # `newest` is version `step` here, so batch step + k gets version step; at the start all batches get the first.
        while self.next_batch <= min(step + self.block.steps_off, self.num_steps - 1):
            self.batches[self.next_batch] = self.thread.submit(self._sample, self.next_batch, self.newest)
            self.next_batch += 1
        # An error of the sampling thread is raised here, in the step that needs the batch.
        result = self._learn(step, self.batches.pop(step).result())
        recent = result.rollouts
        # `exception` waits for the batch: where k = 1, engines are then idle, as `_load` below needs them.
        if (following := self.batches.get(step + 1)) is not None and following.exception() is None:
            # Scored by the check: also a continued run has this batch, but not the one that it has trained on.
            recent = following.result().rollouts
        self.newest = self._exported(step + 1, recent)
        if self.block.steps_off == 1:
            try:
                self._load(self.newest)
            except ProbeError as error:
                raise ProbeError(str(error), result) from error
        return result

    def settle(self) -> None:
        """Waits for all batches that the engines may sample with earlier weights; the next one needs these."""
        wait(self.batches.values())
        self._load(self.newest)

    def ahead(self) -> list[Collected]:
        """The next k batches, for a checkpoint, since no later weights may sample them; waits for them.

        Raises the error of one that could not be sampled.
        """
        return [self.batches[step].result() for step in sorted(self.batches)]

    def close(self) -> None:
        """Waits for the batch in flight, which nobody will train on."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.batches = {}

    def _exported(self, version: int, recent: Rollouts | None) -> _Pushed:
        """The trainer's weights as that version. Staged, they wait for engines that still sample with earlier ones."""
        is_folded = self.algorithm.passes.rollout == "predicted"
        tensors = self.learner.named_tensors(folded=is_folded)  # as theory.loop.hand_over
        return _Pushed(
            version,
            self.stage(tensors) if self.block.steps_off > 1 else tensors,
            # By the time its rollouts are learned from, the learner's W_p has moved on.
            self.learner.predictor_weights() if is_folded else None,
            dict if recent is None else self.check(version, recent),
        )

    def _load(self, pushed: _Pushed) -> None:
        # Called by the sampling thread, or by the main one while that thread is idle: never by both at once.
        if self.held != pushed.version:
            self.rollout.load_weights(pushed.tensors, pushed.version)
            self.held, self.checked = pushed.version, pushed.check()

    def _sample(self, step: int, pushed: _Pushed) -> Collected:
        self._load(pushed)
        collected = self._collect(step)
        return replace(collected, predictor=pushed.predictor, metrics=collected.metrics | self.checked)


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


__all__ = ["Asynchronous", "Check", "Stage", "Synchronous", "Turn", "version_lags"]
