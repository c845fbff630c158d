"""Tasks with verifiable rewards: sources of prompts and graders behind `theory.contracts.Task`.

A new task is a new file in this folder, with a config block (a literal `kind`, `task()`) and a task class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from lab.strict import kinds_in
from lab.tasks.block import DemonstratedTask, TaskBlock, TextTask
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Task

KINDS: tuple[type[TaskBlock], ...] = tuple(kinds_in(__name__, TaskBlock))
"""Every kind of `task:` block, in the order of the config's schema."""

if TYPE_CHECKING:
    TaskConfig = TaskBlock
else:
    # pydantic picks the member by its `kind`; type checkers cannot follow a union that is made at run time.
    TaskConfig = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007


def build(config: TaskBlock, tokenizer: Tokenizer | None = None) -> TextTask:
    """The task of a config; a `DemonstratedTask` where it has demonstrations.

    `tokenizer` is that of the model's folder: jsonl and dataset tasks need it (else ValueError), the others use
    their own characters. Raises ValueError for an error in the config or in the task's file.
    """
    if config.needs_tokenizer and tokenizer is None:
        kind = config.kind
        raise ValueError(f"task.kind: expected a tokenizer for a {kind} task (that of a Hugging Face folder), got none")
    try:
        return config.task(tokenizer)
    except ValueError as error:
        # The task names its block's fields without their block; other errors begin with a file.
        if str(error).partition(":")[0] in type(config).model_fields:
            raise ValueError(f"task.{error}") from error
        raise


def check_vocabulary(config: TaskBlock, task: TextTask, vocab_size: int) -> None:
    """ValueError unless a model of so many tokens fits the task: a task's own characters must be the whole vocabulary,
    or mu could sample an id that has no character; the tokenizer of a model's folder may leave ids unused."""
    needed = task.tokenizer.vocab_size
    if vocab_size < needed or (vocab_size > needed and not config.needs_tokenizer):
        least = "at least " if config.needs_tokenizer else ""
        raise ValueError(f"model.path: expected a model of {least}the task's {needed} tokens, got {vocab_size}")


__all__ = [
    "KINDS", "DemonstratedTask", "Task", "TaskBlock", "TaskConfig", "TextTask", "Tokenizer", "build",
    "check_vocabulary",
]  # fmt: skip
