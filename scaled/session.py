"""A run's ranks and engines on a cluster, and the loop over its global steps.

A lost engine is replaced within a step (`cluster.rollout_group`); a lost rank ends the group of ranks, and the loop
starts again from the last checkpoint. This module needs Ray: `scaled.run` imports it after checking for Ray.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

from lab.ending import finish
from lab.evaluation import evaluate
from lab.interrupts import Interrupted
from lab.loggers import build_loggers
from lab.overflow import Fp16Overflow, keep_overflow
from lab.progress import ProgressKind, progress_of
from lab.recording import NonFiniteError, RunRecorder, Scalars
from lab.records import RunFolder
from lab.tasks import TextTask
from scaled.cluster.groups import rollout_group, training_group
from scaled.cluster.interruptions import Interruptions
from scaled.cluster.probe import Probe, ProbeError, allowed, describe
from scaled.cluster.rank_group import RankDied
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.rewards import AheadEngine, AheadTask
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.saving import Checkpoints, read_ahead, read_backlog
from scaled.cluster.schedule import Asynchronous, Synchronous
from scaled.cluster.storing import stored_backlog, stored_rollouts
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import Meter
from scaled.cluster.usage import Processors, payloads
from scaled.config import ScaledRun
from theory.collection import Collected
from theory.contracts import RolloutEngine, Rollouts, Sampling, Task
from theory.streams import derive_seed


class Session:
    """A run's ranks and engines on a cluster, and the loop over its global steps."""

    def __init__(self, config: ScaledRun, folder: RunFolder, task: TextTask, places: Cluster):
        self.config, self.folder, self.task, self.places = config, folder, task, places
        self.algorithm = config.algorithm.build()
        self.meter: Meter = Meter()
        self.between: Meter = Meter()  # waits after a step's row is written; the next row has them
        self.processors = Processors()
        self.interruptions = Interruptions(folder)
        # Threads pay off only for graders in processes of their own; the others take less time than a thread.
        self.ahead = AheadTask(task) if config.task.grades_in_processes else None

    def close(self) -> None:
        """Cancels rewards that nobody waits for."""
        if self.ahead is not None:
            self.ahead.close()

    def train(self, progress: ProgressKind) -> None:
        """Runs the remaining global steps; ranks that die are replaced `cluster.max_rank_restarts` times."""
        # Not closed here: engines end with the cluster (`ray_cluster.cluster`).
        rollout: RolloutGroup | None = None
        restarts = 0
        while True:
            training: TrainingGroup | None = None
            try:
                if rollout is not None and self._takes_turns:
                    # Awake where a rank died in a push or an evaluation: the new ranks start in the engines' memory.
                    rollout.turn(False)
                training = self.ranks()
                # Engines outlive the ranks: a restart builds only the ranks again.
                rollout = self.engines() if rollout is None else rollout
                self._steps(training, rollout, progress)
                return
            except RankDied as error:
                if restarts >= self.config.cluster.max_rank_restarts:
                    raise RankDied(
                        f"cluster.max_rank_restarts: {error}; expected at most {restarts} restarts, got {restarts + 1}"
                    ) from None
                restarts += 1
                self.interruptions.begin("rank", str(error), error.rank)
                logging.getLogger(__name__).warning("%s; continuing from the last checkpoint", error)
            finally:
                # The ranks that live, too: they wait for the dead one in a collective and hold the new ranks' places.
                if training is not None:
                    training.close()

    def ranks(self) -> TrainingGroup:
        """The training engine; colocated, it frees the memory that engines take when they start."""
        ranks = training_group(self.config, self.places, self.meter)
        try:
            if self._takes_turns:
                ranks.give_way()
        except BaseException:
            ranks.close()  # the caller has no group to close, and the living ranks hold the next one's places
            raise
        return ranks

    @property
    def _takes_turns(self) -> bool:
        """Whether ranks and engines hand memory over; without GPUs `training.offload` makes the calls."""
        return self.config.takes_turns and (self.places.has_gpus or bool(self.config.training.offload))

    def engines(self) -> RolloutGroup:
        """The rollout engine."""
        lost = self.interruptions.engine_was_lost
        return rollout_group(self.config, self.task.tokenizer.end_ids, self.places, self.meter, lost)

    def _steps(self, training: TrainingGroup, rollout: RolloutGroup, progress: ProgressKind) -> None:
        config, folder = self.config, self.folder
        first, backlog = 0, None
        ahead: list[Collected] = []
        checkpoint = folder.latest_sharded_checkpoint()
        if checkpoint is not None:
            training.load(checkpoint.path)
            first = checkpoint.step
            backlog = stored_backlog(read_backlog(checkpoint.path, self.task), rollout, rollout.layer_sets)
            # Routes go back to the object store, where the ranks fetch those of every batch.
            ahead = [
                replace(batch, rollouts=stored_rollouts(batch.rollouts, rollout, rollout.layer_sets))
                for batch in read_ahead(checkpoint.path)
            ]
        self.interruptions.resume(first)
        folder.truncate_metrics(first)  # rows after the checkpoint are of steps that run again
        probe = self.probe()
        schedule = self.schedule(training, rollout, probe)
        checkpoints = Checkpoints(folder, training, config.checkpoint.keep, bool(config.checkpoint.asynchronous))
        shown = progress_of(progress, config.name, config.num_steps, first)
        loggers = build_loggers(config.logging.loggers, config.name, folder.path, first)
        decode = self.task.tokenizer.decode
        recorder = RunRecorder(config, folder, partial(self._evaluate, rollout, schedule), shown, loggers, decode)
        try:
            schedule.start(first, backlog, ahead)
            # The probe runs even where row 0 exists: a continued run has pushed its weights again.
            recorder.begin(probe(rollout, training, first, self._first_rollouts(rollout, first)))
            self.interruptions.end()
            for step in range(first, config.num_steps):
                self._step(step, schedule, probe, recorder, training, rollout, checkpoints)
            checkpoints.finish()
        except ArithmeticError as error:
            checkpoints.finish()  # the ranks are alive, so the checkpoint that they are writing is whole
            if isinstance(error, Fp16Overflow):  # of the push before the first step; `_step` has those of the others
                raise NonFiniteError(f"{error}{keep_overflow(folder.path, first, error)}") from error
            raise
        except Interrupted:
            rollout.close()  # else `schedule.close` waits for a batch: minutes, where Slurm kills after 30 s
            raise
        finally:
            checkpoints.abandon()  # one that is still open lacks the part of a dead rank
            schedule.close()  # ends the batch in flight before the next schedule uses the engines
            # One row more than steps: row 0 was measured before training.
            for logger in loggers:
                logger.finalize("success" if len(folder.metrics()) > config.num_steps else "aborted")
            if shown is not None:
                shown.close()

    def _step(
        self,
        step: int,
        schedule: Synchronous,
        probe: Probe,
        recorder: RunRecorder,
        training: TrainingGroup,
        rollout: RolloutGroup,
        checkpoints: Checkpoints,
    ) -> None:
        self.interruptions.step = step
        # The time of evaluation and probe belongs to no step: it is dropped.
        self.meter.take()
        # Several steps off engines sample between two steps, too, and would not answer.
        idle = rollout.actors if self.config.schedule.steps_off < 2 else []
        self.processors.take(training.actors, idle)
        try:
            with self.meter.seconds("timing_s/step"):
                result = schedule.step(step)
        except NonFiniteError as error:  # not a ProbeError, of weights that an earlier step made
            # The verdict reads the end of the run from this row; without it the run would only look cut short.
            self.folder.append_metrics(step + 1, {error.metric: math.inf})
            if error.result is not None:  # the batch of an update that failed is the evidence
                recorder.save_trace(step + 1, error.result)
            kept = keep_overflow(self.folder.path, step + 1, error) if isinstance(error, Fp16Overflow) else ""
            self._finish(checkpoints)
            raise NonFiniteError(f"step {step + 1}: {error}{kept}") from error
        except ProbeError as error:
            if error.step is not None:  # the step is whole, and its row is the evidence
                recorder.append(step + 1, error.step.metrics | dict(self.meter.take()))
            raise
        # Before the probe, whose time is no part of the step.
        measured = dict(self.meter.take()) | self.processors.take(training.actors, idle)
        measured |= payloads(result.rollouts) | dict(self.between.take())
        try:
            if self.config.schedule.steps_off == 0:  # else the schedule probes weights when engines have loaded them
                measured |= probe(rollout, training, step + 1, result.rollouts)
        except ProbeError:
            recorder.append(step + 1, result.metrics | measured)
            raise

        def save(number: int) -> None:
            self.interruptions.step = number
            # Not timed: it waits for rollouts that the next steps would wait for.
            ahead = schedule.ahead()
            with self.between.seconds("timing_s/save_checkpoint"):
                # The next batch to be sampled continues what the last one left.
                checkpoints.save(number, ahead[-1].backlog if ahead else result.backlog, ahead)

        try:
            recorder.record(step + 1, result, save, measured)
        except NonFiniteError as error:
            self._finish(checkpoints)
            raise NonFiniteError(f"step {step + 1}: {error}") from error
        if checkpoints.is_writing:
            with self.between.seconds("timing_s/save_checkpoint"):
                checkpoints.poll()

    def _finish(self, checkpoints: Checkpoints) -> None:
        """The end of a run that cannot continue."""
        try:
            # Before the hashes of its files: a checkpoint that is still being written becomes one of them.
            checkpoints.finish()
        finally:
            finish(self.config, self.folder)

    def schedule(self, training: TrainingGroup, rollout: RolloutGroup, probe: Probe) -> Synchronous:
        """The schedule that the config names."""
        config = self.config
        engine, task = self._graded(rollout)
        parts = (self.algorithm, engine, training, task, config.seed, config.schedule)
        turn = partial(_turn, self.meter, training, rollout) if self._takes_turns else None
        if config.schedule.steps_off == 0:
            return Synchronous(*parts, turn)
        check = partial(probe.begun, rollout, training)
        return Asynchronous(config.num_steps, *parts, stage=rollout.staged, check=check)

    def probe(self) -> Probe:
        """The check after every push."""
        config = self.config
        return Probe(
            config.probe,
            allowed(config.probe, config.rollout.precision, config.training),
            describe(config.rollout.precision),
            config.seed,
            is_predicted=self.algorithm.passes.rollout == "predicted",
            evidence=self.folder.path / "evidence",
        )

    def _first_rollouts(self, rollout: RolloutGroup, version: int) -> Rollouts:
        """Responses for the probe after the first push, when no step has sampled any."""
        block = self.config.probe
        prompts = self.task.held_out()[: block.num_sequences]
        sampling = Sampling(
            max_tokens=min(self.algorithm.max_tokens, block.num_tokens),
            num_responses=-(-block.num_sequences // len(prompts)),
            seed=derive_seed(self.config.seed, "probe", version),
        )
        return rollout.generate(prompts, sampling)

    def _graded(self, rollout: RolloutGroup) -> tuple[RolloutEngine, Task]:
        """Engines and task, with rewards computed ahead where that is worth it."""
        return (rollout, self.task) if self.ahead is None else (AheadEngine(rollout, self.ahead), self.ahead)

    def _evaluate(self, rollout: RolloutGroup, schedule: Synchronous, number: int) -> Scalars:
        """avg@k on the held-out problems by the run's own engines, in their precision."""
        schedule.settle()
        block = self.config.evaluation
        engine, task = self._graded(rollout)
        return evaluate(
            engine,
            task,
            num_samples=block.num_samples,
            max_prompts=block.max_prompts,
            max_tokens=self.algorithm.max_tokens,
            max_turns=self.algorithm.max_turns,
            temperature=block.temperature,
            seed=derive_seed(self.config.seed, "evaluation", number),
        )


def _turn(meter: Meter, training: TrainingGroup, rollout: RolloutGroup, awake: bool) -> None:
    """Frees the ranks' memory before engines wake; ranks take it back by themselves once engines sleep."""
    with meter.seconds("timing_s/turn"):
        if awake:
            training.give_way()
        rollout.turn(awake)


__all__ = ["Session"]
