"""One cluster run from config to verdict: Ray, Megatron-core ranks, vLLM engines, record, report; kills do not end it.

A lost engine is replaced within a step (`cluster.rollout_group`); a lost rank ends the group of ranks, and the run goes
on here from its last checkpoint, as it does when the whole run was killed.
"""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.config.load import config_hash, to_yaml
from lab.evaluation import evaluate
from lab.loggers import build_loggers
from lab.progress import ProgressKind, progress_of
from lab.recording import NonFiniteError, Recorder, Scalars
from lab.records import RunFolder, manifest
from lab.report import write_report
from lab.tasks import TextTask
from lab.tasks.problems import ProblemsConfig
from lab.verdict import judge
from scaled.checks import check_config, check_turns, check_vocabulary, installed, open_task
from scaled.config import ScaledRun
from theory.contracts import RolloutEngine, Rollouts, Sampling, Task
from theory.streams import derive_seed

if TYPE_CHECKING:
    from scaled.cluster.probe import Probe
    from scaled.cluster.ray_cluster import Cluster
    from scaled.cluster.rollout_group import RolloutGroup
    from scaled.cluster.schedule import Synchronous
    from scaled.cluster.training_group import TrainingGroup
    from scaled.cluster.transfer import Meter


def run(config: ScaledRun, *, folder: RunFolder | None = None, progress: ProgressKind = "bar") -> RunFolder:
    """Runs, or goes on with, `folder`; returns it with verdict and report written.

    Raises ValueError where the config does not fit its files, its packages or the cluster; EngineLost and RankDied
    (OSErrors) where engines or ranks died too often; ArithmeticError where a gradient is not finite (after writing
    verdict and report) or an engine disagrees with the trainer (ProbeError; the run can be resumed).
    """
    versions = installed()
    shape = check_config(config)
    task = open_task(config)
    check_vocabulary(config, task, shape)
    check_turns(config, task)
    from scaled.cluster.ray_cluster import cluster
    from scaled.vllm_engine.quantize import choose_kernels

    if folder is None:
        folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
        folder.write_config(to_yaml(config))
    folder = RunFolder(folder.path.resolve())  # ranks and engines may stand in another folder
    with folder.hold():
        found = manifest(seed=config.seed)
        found["versions"] |= versions
        with cluster(config, folder.path) as places:
            kernels = choose_kernels(config.rollout.precision, not places.has_gpus)
            folder.write_manifest(found | {"layout": _layout(config), "engine_kernels": kernels})
            session = Session(config, folder, task, places)
            try:
                session.train(progress)
            finally:
                session.close()
        _finish(config, folder)
    return folder


def _layout(config: ScaledRun) -> dict[str, Any]:
    """How the run was spread, for the manifest."""
    training = config.training.model_dump(include={"num_ranks", *_PARALLEL}) | {
        "data_parallel": config.training.data_parallel
    }
    return {"training": training, "engines": config.rollout.num_engines, "placement": config.cluster.placement}


_PARALLEL = (
    "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "expert_tensor_parallel"
)  # fmt: skip


class Session:
    """A run's ranks and engines on a cluster, and the loop over its global steps."""

    def __init__(self, config: ScaledRun, folder: RunFolder, task: TextTask, places: Cluster):
        from scaled.cluster.rewards import AheadTask
        from scaled.cluster.transfer import Meter

        self.config, self.folder, self.task, self.places = config, folder, task, places
        self.algorithm = config.algorithm.build()
        self.meter: Meter = Meter()
        # Grading that runs in processes of its own is worth several threads; the others' is quicker than a thread.
        self.ahead = AheadTask(task) if isinstance(config.task, ProblemsConfig) else None

    def close(self) -> None:
        """Gives up rewards that nobody waits for."""
        if self.ahead is not None:
            self.ahead.close()

    def train(self, progress: ProgressKind) -> None:
        """All global steps that are left; ranks that die are replaced `cluster.max_rank_restarts` times."""
        from scaled.cluster.training_group import RankDied

        rollout: RolloutGroup | None = None
        restarts = 0
        while True:
            training: TrainingGroup | None = None
            try:
                training = self.ranks()
                rollout = self.engines() if rollout is None else rollout
                self._steps(training, rollout, progress)
                return
            except RankDied as error:
                if restarts >= self.config.cluster.max_rank_restarts:
                    raise RankDied(
                        f"cluster.max_rank_restarts: {error}; expected at most {restarts} restarts, got {restarts + 1}"
                    ) from None
                restarts += 1
                logging.getLogger(__name__).warning("%s; going on from the last checkpoint", error)
            finally:
                if training is not None:
                    training.close()

    def ranks(self) -> TrainingGroup:
        """The training engine."""
        from scaled.cluster.groups import training_group

        return training_group(self.config, self.places, self.meter)

    def engines(self) -> RolloutGroup:
        """The rollout engine."""
        from scaled.cluster.groups import rollout_group

        return rollout_group(self.config, self.task.tokenizer.eos_id, self.places, self.meter)

    def _steps(self, training: TrainingGroup, rollout: RolloutGroup, progress: ProgressKind) -> None:
        config, folder = self.config, self.folder
        first = 0
        checkpoint = folder.latest_sharded_checkpoint()
        if checkpoint is not None:
            training.load(checkpoint.path)
            first = checkpoint.step
        folder.truncate_metrics(first)
        probe, schedule = self.probe(), self.schedule(training, rollout)
        shown = progress_of(progress, config.name, config.num_steps, first)
        loggers = build_loggers(config.logging.loggers, config.name, folder.path, first)
        decode = self.task.tokenizer.decode
        recorder = Recorder(config, folder, partial(self._evaluate, rollout), shown, loggers, decode)
        try:
            schedule.start(first)
            recorder.begin(probe(rollout, training, first, self._first_rollouts(rollout, first)))
            for step in range(first, config.num_steps):
                self._step(step, schedule, probe, recorder, training, rollout)
        finally:
            schedule.close()
            for logger in loggers:
                logger.finalize("success" if len(folder.metrics()) > config.num_steps else "aborted")
            if shown is not None:
                shown.close()

    def _step(
        self,
        step: int,
        schedule: Synchronous,
        probe: Probe,
        recorder: Recorder,
        training: TrainingGroup,
        rollout: RolloutGroup,
    ) -> None:
        from scaled.cluster.probe import ProbeError

        self.meter.take()  # what evaluation and probe took belongs to no step
        try:
            with self.meter.seconds("timing_s/step"):
                result = schedule.step(step)
        except ArithmeticError:
            self.folder.append_metrics(step + 1, {"actor/grad_norm": math.inf})
            _finish(self.config, self.folder)
            raise
        measured = dict(self.meter.take())
        try:
            measured |= probe(rollout, training, step + 1, result.rollouts)
        except ProbeError:
            recorder.append(step + 1, result.metrics | measured)
            raise

        def save(number: int) -> None:
            self.folder.sharded_checkpoint(number, training.save, keep=self.config.checkpoint.keep)

        try:
            recorder.record(step + 1, result, save, measured)
        except NonFiniteError as error:
            _finish(self.config, self.folder)
            raise NonFiniteError(f"step {step + 1}: {error}") from error

    def schedule(self, training: TrainingGroup, rollout: RolloutGroup) -> Synchronous:
        """The order of a step's parts that the config asks for."""
        from scaled.cluster.schedule import OneStepOff, Synchronous

        config = self.config
        takes_turns = config.cluster.placement == "colocated" and self.places.has_gpus
        engine, task = self._graded(rollout)
        parts = (self.algorithm, engine, training, task, config.seed, config.schedule)
        turn = rollout.turn if takes_turns else None
        if config.schedule.kind == "synchronous":
            return Synchronous(*parts, turn)
        return OneStepOff(config.num_steps, *parts, turn)

    def probe(self) -> Probe:
        """The check after every push."""
        from scaled.cluster.probe import Probe, allowed, describe

        config = self.config
        return Probe(
            config.probe,
            allowed(config.probe, config.rollout.precision, config.training),
            describe(config.rollout.precision),
            config.seed,
            is_predicted=self.algorithm.passes.rollout == "predicted",
        )

    def _first_rollouts(self, rollout: RolloutGroup, version: int) -> Rollouts:
        """Responses for the probe after the first push, when no step has sampled any."""
        block = self.config.probe
        prompts = list(self.task.held_out())[: block.num_sequences]
        sampling = Sampling(
            max_tokens=min(self.algorithm.max_tokens, block.num_tokens),
            num_responses=-(-block.num_sequences // len(prompts)),
            seed=derive_seed(self.config.seed, "probe", version),
        )
        return rollout.generate(prompts, sampling)

    def _graded(self, rollout: RolloutGroup) -> tuple[RolloutEngine, Task]:
        """Engines and task, with rewards computed ahead where that is worth it."""
        from scaled.cluster.rewards import AheadEngine

        return (rollout, self.task) if self.ahead is None else (AheadEngine(rollout, self.ahead), self.ahead)

    def _evaluate(self, rollout: RolloutGroup, number: int) -> Scalars:
        """avg@k on the held-out problems by the run's own engines, in their precision."""
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


def _finish(config: ScaledRun, folder: RunFolder) -> None:
    folder.write_verdict(judge(folder.metrics(), config.verdict).to_json())
    write_report([folder], folder.path / "report.html")


__all__ = ["Session", "run"]
