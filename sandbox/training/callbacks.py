"""The work of a sandbox run after each global step, as a Lightning callback around `lab.recording.RunRecorder`."""

from __future__ import annotations

from typing import Any

from lab.backlog import to_tensors
from lab.evaluation import evaluate
from lab.lightning import L
from lab.progress import ProgressLines
from lab.recording import RunRecorder, Scalars
from lab.records import RunFolder
from lab.tasks.tokenizers import Tokenizer
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.training.learner import Learner
from theory.contracts import Task
from theory.streams import derive_seed


class Evaluation:
    """avg@k of pi on the held-out problems, sampled by an exact engine, without the defects of the run's engine."""

    def __init__(self, config: SandboxRun, engine: SandboxEngine):
        self.config = config
        self.engine = engine

    def of(self, model: MoE, task: Task, number: int) -> Scalars:
        """The accuracy of these weights on the task; `number` seeds the draws."""
        self.engine.load_model(model, version=number)
        block = self.config.evaluation
        return evaluate(
            self.engine,
            task,
            num_samples=block.num_samples,
            max_prompts=block.max_prompts,
            max_tokens=self.config.algorithm.sampling.max_tokens,
            max_turns=self.config.algorithm.sampling.max_turns,
            temperature=block.temperature,
            seed=derive_seed(self.config.seed, "evaluation", number),
        )


class Recording(L.Callback):
    """Writes metrics, traces and checkpoints, numbered by the global steps taken (0: before the first)."""

    def __init__(
        self,
        config: SandboxRun,
        folder: RunFolder,
        evaluation: Evaluation,
        progress: ProgressLines | None,
        tokenizer: Tokenizer,
    ):
        self.config = config
        self.folder = folder
        self.evaluation = evaluation
        self.progress = progress
        self.tokenizer = tokenizer

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        learner = pl_module
        self.recorder = RunRecorder(
            self.config,
            self.folder,
            lambda number: self.evaluation.of(learner.model, learner.task, number),
            self.progress,
            trainer.loggers,
            self.tokenizer.decode,
        )
        self.recorder.begin()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learner)
        training, rollout = pl_module.training_engine, pl_module.rollout

        def save(number: int) -> None:
            # No name is in two of them: each has prefixes of its own.
            tensors = training.state_tensors() | rollout.state_tensors() | to_tensors(pl_module.backlog)
            self.folder.save_checkpoint(number, tensors, {}, keep=self.config.checkpoint.keep)

        # The batch is the 0-based number of the step that has just ended.
        # Timing before the row: a run killed in between repeats the step, and the later of two timing lines counts.
        self.folder.append_timing(int(batch) + 1, pl_module.seconds)
        self.recorder.record(int(batch) + 1, pl_module.result, save)
