"""Tasks with verifiable rewards: sources of prompts and graders behind `theory.contracts.Task`.

To add one: a file with a config block (a literal `kind`, `task()`) and a task class, and its block in `TaskConfig`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lab.tasks.arithmetic import ArithmeticConfig
from lab.tasks.block import DemonstratedTask, TaskBlock, TextTask
from lab.tasks.calculator import CalculatorConfig
from lab.tasks.countdown import CountdownConfig
from lab.tasks.jsonl import DatasetConfig, JsonlConfig
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Task

TaskConfig = Annotated[
    ArithmeticConfig | CalculatorConfig | CountdownConfig | JsonlConfig | DatasetConfig, Field(discriminator="kind")
]
"""The `task:` block of a run's config; its `kind` selects the task."""


def build(config: TaskBlock, tokenizer: Tokenizer | None = None) -> TextTask:
    """The task of a config; a `DemonstratedTask` where it has demonstrations.

    `tokenizer` is that of the model's folder: jsonl and dataset tasks need it (else ValueError), the others use
    their own characters. Raises ValueError for an error in the config or in the task's file.
    """
    if config.needs_tokenizer and tokenizer is None:
        kind = config.kind
        raise ValueError(f"task.kind: expected a tokenizer for a {kind} task (that of a Hugging Face folder), got none")
    return config.task(tokenizer)


__all__ = ["DemonstratedTask", "Task", "TaskBlock", "TaskConfig", "TextTask", "Tokenizer", "build"]
