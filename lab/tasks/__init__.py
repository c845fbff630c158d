"""Tasks with verifiable rewards: sources of prompts and graders behind `theory.contracts.Task`.

To add one: a file with a config class (a literal `kind`) and a task class, and a line in each of the two places here.
"""

from __future__ import annotations

from typing import Annotated, Protocol, runtime_checkable

import torch
from pydantic import Field

from lab.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from lab.tasks.calculator import CalculatorConfig, CalculatorTask
from lab.tasks.countdown import CountdownConfig, CountdownTask
from lab.tasks.jsonl import DatasetConfig, DemonstratedProblemTask, JsonlConfig, ProblemTask
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Prompt, Task

TaskConfig = Annotated[
    ArithmeticConfig | CalculatorConfig | CountdownConfig | JsonlConfig | DatasetConfig, Field(discriminator="kind")
]
"""The `task:` block of a run's config; its `kind` says which task."""


@runtime_checkable
class TextTask(Task, Protocol):
    """A task with its tokenizer and the longest response that it needs."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokens in which its prompts and responses are written."""
        ...

    @property
    def max_response_tokens(self) -> int:
        """The longest response that it needs, end token included."""
        ...


@runtime_checkable
class DemonstratedTask(TextTask, Protocol):
    """A task that can show right responses, so that a model can be cold-started on it."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """The styles in which it can show them, at least one; the first is the default."""
        ...

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str) -> tuple[int, ...]:
        """Response tokens of that teacher that earn reward 1, end tokens included; its choices are from `generator`.

        Of a task with turns: all of them, with the observations in between, exactly as the task makes them.
        """
        ...


def build(
    config: ArithmeticConfig | CalculatorConfig | CountdownConfig | JsonlConfig | DatasetConfig,
    tokenizer: Tokenizer | None = None,
) -> TextTask:
    """The task of a config; a `DemonstratedTask` where it has demonstrations.

    `tokenizer` is that of the model's folder: jsonl and dataset tasks need it (else ValueError), the others have their
    own characters and no use for it. Raises ValueError for what the task finds wrong with its config or file.
    """
    if isinstance(config, ArithmeticConfig):
        return ArithmeticTask(config)
    if isinstance(config, CalculatorConfig):
        return CalculatorTask(config)
    if isinstance(config, CountdownConfig):
        return CountdownTask(config)
    if tokenizer is None:
        kind = config.kind
        raise ValueError(f"task.kind: expected a tokenizer for a {kind} task (that of a Hugging Face folder), got none")
    return (ProblemTask if config.solution_key is None else DemonstratedProblemTask)(config, tokenizer)


__all__ = ["DemonstratedTask", "Task", "TaskConfig", "TextTask", "Tokenizer", "build"]
