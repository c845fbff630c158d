"""One run of either world: its name, seed and length, the task, the algorithm, its measurements and records.

Each world adds its own blocks in a subclass with a literal `backend` (`sandbox.config.SandboxRun`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.config.algorithm import AlgorithmConfig
from lab.strict import Strict
from lab.tasks import TaskConfig
from lab.verdict import VerdictRules


class EvaluationBlock(Strict):
    """Held-out accuracy, avg@k: the mean reward over k sampled responses of each held-out problem."""

    every: int = Field(
        default=10, ge=1, description="global steps between evaluations; the last step is always evaluated"
    )
    num_samples: int = Field(default=4, ge=1, description="k of avg@k: sampled responses per held-out problem")
    max_prompts: int = Field(default=128, ge=1, description="held-out problems used, from the first one on")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature of the evaluation")

    def num_problems(self, num_held_out: int | None) -> int:
        """Problems of an evaluation: `max_prompts`, or all that are held out if there are fewer (None: not known)."""
        return self.max_prompts if num_held_out is None else min(self.max_prompts, num_held_out)


class CheckpointBlock(Strict):
    """The checkpoints from which a killed run continues."""

    every: int = Field(default=10, ge=1, description="global steps between checkpoints; the last step always makes one")
    every_minutes: float | None = Field(
        default=None,
        gt=0,
        description="minutes after which the next step makes one, too; null: by steps alone",
    )
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept")


class TraceBlock(Strict):
    """Traces: tokens, log-probabilities and experts of both engines, as one step saw them."""

    every: int = Field(default=10, ge=1, description="global steps between traces; the last step always leaves one")


class LoggingBlock(Strict):
    """The loggers that take metrics besides metrics.jsonl, which is always written."""

    loggers: tuple[Literal["csv", "tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("csv", "tensorboard"),
        description="any of csv, tensorboard, wandb, mlflow; the last two must be installed",
    )


class RunConfig(Strict):
    """The fields of a run in both worlds; `backend` names the world, and each world's subclass fixes the value."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$", description="the run's folder is <output>/<name>/<time>-<hash>"
    )
    seed: int = Field(default=0, ge=0, description="root of every named random stream")
    backend: str = Field(description="world of the run: sandbox or scaled")
    num_steps: int = Field(ge=1, le=10**9, description="global steps: rollout, old pass, mini-batches, hand-over")
    task: TaskConfig = Field(description="where prompts and rewards come from")
    algorithm: AlgorithmConfig = Field(description="what is optimised and how, in terms that hold in every world")
    evaluation: EvaluationBlock = Field(default_factory=EvaluationBlock, description="held-out accuracy")
    checkpoint: CheckpointBlock = Field(
        default_factory=CheckpointBlock, description="files from which a killed run continues"
    )
    traces: TraceBlock = Field(default_factory=TraceBlock, description="what single steps sampled and scored")
    verdict: VerdictRules = Field(default_factory=VerdictRules, description="when a run counts as collapsed")
    logging: LoggingBlock = Field(default_factory=LoggingBlock, description="where metrics go besides metrics.jsonl")
    output: str = Field(default="runs", min_length=1, description="folder of all run folders")

    def settled(self) -> RunConfig:
        """This config with every `auto` decided for this machine, as the run's folder records and hashes it."""
        return self

    @model_validator(mode="after")
    def _turns_are_the_tasks(self) -> RunConfig:
        max_turns = self.algorithm.sampling.max_turns
        if (max_turns > 1) != self.task.has_turns:
            expected = "at least 2 for" if max_turns == 1 else "1 for (it has no turns)"
            raise ValueError(
                f"algorithm.sampling.max_turns: expected {expected} task {self.task.kind}, got {max_turns}"
            )
        return self
