"""One sandbox run from config to verdict: cold start, RL, record, report; a killed run continues."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from lab.backlog import from_tensors
from lab.beginning import input_hashes, record_process, require_same_inputs
from lab.config.load import config_hash, to_yaml
from lab.ending import finish
from lab.lightning import L
from lab.loggers import build_loggers
from lab.overflow import Fp16Overflow, keep_overflow
from lab.progress import ProgressKind, progress_of
from lab.recording import NonFiniteError
from lab.records import RunFolder, manifest
from lab.tasks import DemonstratedTask, TextTask, check_vocabulary
from lab.tasks import build as build_task
from lab.tasks.jsonl import ProblemTask
from lab.tasks.tokenizers import load_tokenizer
from sandbox.config import SandboxRun
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.engines.prefix_cache import PrefixCache
from sandbox.kernels import probe
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.model.checkpoint import read_config
from sandbox.model.config import ModelConfig
from sandbox.size import check_memory
from sandbox.training.callbacks import Evaluation, Recording
from sandbox.training.cold_start import cold_start
from sandbox.training.engine import SandboxTrainingEngine
from sandbox.training.learner import Learner, step_loader
from sandbox.training.numerics import of_precision, training_numerics
from theory.loop import hand_over
from theory.streams import stream


def run(config: SandboxRun, *, folder: RunFolder | None = None, progress: ProgressKind = "bar") -> RunFolder:
    """Runs the config, or continues `folder`; returns the run's folder with verdict and report written.

    Raises ValueError if the config does not fit its files, and NonFiniteError if the loss of the cold start is not
    finite (no new folder is left behind). Raises NonFiniteError, with the step, if a metric or gradient is not finite,
    or a defect's fp16 overflows (record and verdict are written first).
    """
    config = config.settled()
    kernels = config.kernels()
    # Set even where the config is silent: an earlier run in this process may have set more.
    kernels.set_threads(config.threads or 1)
    for broken in probe(kernels):
        warnings.warn(f"this machine's kernels are not batch-invariant: {broken}", stacklevel=1)
    # Opened before a folder is made: a path that is wrong leaves no run behind.
    task = open_task(config)
    check_shape(config, task)
    is_fresh = folder is None
    if folder is None:
        folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
        folder.write_config(to_yaml(config))
    with folder.hold():
        inputs = input_hashes(config.model.path, config.task)
        require_same_inputs(folder, inputs)
        record_process(folder, manifest(seed=config.seed) | {"engine": config.engine.words}, inputs)
        try:
            learner, first = _prepare(config, folder, task, progress)
        except (ValueError, OSError, NonFiniteError):
            if is_fresh:  # a run that could not start cannot be continued
                folder.discard()
            raise
        # An engine of its own: evaluation loads weights, which would clear the run's prefix cache, and under stale
        # weights enter its history.
        evaluation = Evaluation(config, build_engine(config, learner.model.config, task, ()))
        shown = progress_of(progress, config.name, config.num_steps, first)
        recording = Recording(config, folder, evaluation, shown, task.tokenizer)
        try:
            if first < config.num_steps:  # else it was killed between its last checkpoint and its verdict
                _fit(config, folder, learner, recording, first)
        except NonFiniteError as error:
            # `step` is set as a global step begins, so this is the number of the step that failed.
            number = learner.step + 1
            _record_failure(folder, number, error)
            if error.result is not None:  # the batch of an update that failed is the evidence
                recording.recorder.save_trace(number, error.result)
            kept = keep_overflow(folder.path, number, error) if isinstance(error, Fp16Overflow) else ""
            finish(config, folder)
            raise NonFiniteError(f"step {number}: {error}{kept}") from error
        finally:
            if shown is not None:
                shown.close()
        finish(config, folder)
    return folder


def _record_failure(folder: RunFolder, number: int, error: NonFiniteError) -> None:
    """A row for the step that failed, where it has none: a gradient, or fp16's overflow, ends a step before its row."""
    if not folder.metrics() or folder.metrics()[-1]["step"] < number:
        folder.append_metrics(number, {error.metric: math.inf})


def _prepare(config: SandboxRun, folder: RunFolder, task: TextTask, progress: ProgressKind) -> tuple[Learner, int]:
    """The learner restored from the folder's last checkpoint, and the number of the next global step."""
    learner = build_learner(config, task, initial_model(config, task, progress))
    first = 0
    checkpoint = folder.latest_checkpoint()
    if checkpoint is not None:
        learner.training_engine.load_state_tensors(checkpoint.tensors)
        learner.rollout.load_state_tensors(checkpoint.tensors)
        learner.backlog = from_tensors(checkpoint.tensors, task)
        first = checkpoint.step
    folder.truncate_metrics(first)  # steps after the checkpoint are run again
    # Also after a resume: the engine's state holds all weights but the newest.
    hand_over(learner.algorithm, learner.rollout, learner.training_engine, version=first)
    return learner, first


def check_shape(config: SandboxRun, task: TextTask) -> None:
    """ValueError where the config does not fit the sizes of its model, whose weights are not read yet."""
    if config.model.path is None:
        shape = config.model.build(task.tokenizer.vocab_size)
    else:
        shape = read_config(config.model.path)
        check_vocabulary(config.task, task, shape.vocab_size)
        config.check_routers(shape)
    check_memory(config, shape)
    if isinstance(task, ProblemTask):
        longest = task.longest_prompt
    else:  # training prompts are drawn one by one; held-out ones are of the same kind
        longest = max((len(prompt.tokens) for prompt in task.held_out()), default=0)
    check_positions(config, shape, longest)


def check_positions(config: SandboxRun, shape: ModelConfig, longest_prompt: int) -> None:
    """ValueError where a response may not fit: it would end the run once one first grows that long."""
    got = config.algorithm.sampling.max_tokens
    # The last token that is sampled is no input, so it needs no position.
    most = shape.max_positions + 1 - longest_prompt
    if got > most:
        raise ValueError(
            f"algorithm.sampling.max_tokens: expected at most {most} (the model's {shape.max_positions} positions + 1, "
            f"less the {longest_prompt} tokens of the longest prompt), got {got}"
        )


def build_learner(config: SandboxRun, task: TextTask, model: MoE) -> Learner:
    """The config's algorithm and two engines; training updates `model` itself, the rollout engine has no weights."""
    algorithm = config.algorithm.build()
    training = SandboxTrainingEngine(
        model.compute_with(config.kernels()),
        algorithm.optimizer,
        predictor=algorithm.predictor if algorithm.passes.trains_predictor else None,
        freeze_router=algorithm.freeze_router,
        micro_batch_size=config.training.micro_batch_size,
        keep_reference=algorithm.objective.kl_coefficient > 0,
        numerics=training_numerics(
            config.training.precision, config.training.reduction_order, config.training.products
        ),
        keep_old_pass=algorithm.num_minibatches == 1,
    )
    rollout = build_engine(config, training.model.config, task, config.engine.defects)
    return Learner(training, rollout, task, algorithm, config.seed)


def build_engine(config: SandboxRun, model: ModelConfig, task: TextTask, defects: Sequence[Defect]) -> SandboxEngine:
    """An inference engine with these defects; it has a prefix cache only where responses have turns."""
    has_cache = config.engine.prefix_cache and config.algorithm.sampling.max_turns > 1
    return SandboxEngine(
        model,
        defects,
        task.tokenizer.end_ids,
        numerics=of_precision(config.training.precision),
        prefixes=PrefixCache() if has_cache else None,
        kernels=config.kernels(),
    )


def open_task(config: SandboxRun) -> TextTask:
    """The config's task, with the model folder's tokenizer if the task has none of its own."""
    needs_tokenizer = config.task.needs_tokenizer and config.model.path is not None
    tokenizer = load_tokenizer(Path(str(config.model.path))) if needs_tokenizer else None
    return build_task(config.task, tokenizer=tokenizer)


def initial_model(config: SandboxRun, task: TextTask, progress: ProgressKind) -> MoE:
    """The weights that RL starts from: a loaded folder or fresh ones, after the cold start if there is one.

    Computed with torch's operators whatever `compile` says, so that runs with and without it start from equal weights.
    """
    block = config.model
    if block.path is not None:
        model = load_model(Path(block.path))
        check_vocabulary(config.task, task, model.config.vocab_size)  # for commands that make no run
    else:
        # Runs that share a cold start differ in `seed` alone, so the first weights come from the cold start's own seed.
        seed = config.seed if config.cold_start is None else config.cold_start.seed
        model = MoE(block.build(task.tokenizer.vocab_size), stream(seed, "model"))
    if config.cold_start is None:
        return model
    if not isinstance(task, DemonstratedTask):
        raise ValueError(f"cold_start: the {config.task.kind} task has no demonstrations; set cold_start to null")
    description = {"model": block.model_dump(), "task": config.task.model_dump(), "files": file_hashes(config)}
    report = None if progress == "none" else _print_cold_start
    model, _ = cold_start(
        model, task, config.cold_start, description=description,
        max_tokens=config.algorithm.sampling.max_tokens, max_turns=config.algorithm.sampling.max_turns, report=report,
    )  # fmt: skip
    return model


def file_hashes(config: SandboxRun) -> list[str]:
    """Hashes of the model's and the task's files, in a fixed order and without their paths: part of cache keys."""
    return list(input_hashes(config.model.path, config.task).values())


def _print_cold_start(update: int, loss: float, accuracy: float) -> None:
    print(f"cold start  update {update:>5}  loss {loss:.3f}  accuracy {accuracy:.3f}", flush=True)


def _fit(config: SandboxRun, folder: RunFolder, learner: Learner, recording: Recording, first: int) -> None:
    # Lightning's notes on devices, its products and its own deprecations say nothing about the run.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        trainer = L.Trainer(
            # Lightning's default takes a GPU where there is one; the kernels keep their promises on a CPU.
            accelerator="cpu",
            max_epochs=1,
            logger=build_loggers(config.logging.loggers, config.name, folder.path, first),
            callbacks=[recording],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            default_root_dir=str(folder.path),
        )
        trainer.fit(learner, step_loader(first, config.num_steps))


__all__ = [
    "NonFiniteError", "build_engine", "build_learner", "check_positions", "check_shape", "file_hashes", "initial_model",
    "open_task", "run",
]  # fmt: skip
