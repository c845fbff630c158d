"""A task with a tokenizer, and the config block of every kind of task: what it is, and how it is made."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

import torch

from lab.strict import Strict
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Prompt, Task


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


class TaskBlock(Strict):
    """Base of the `task:` blocks; what a kind of task is, and no config sets, is said in its class."""

    has_turns: ClassVar[bool] = False
    """Whether it answers responses, so that they have several turns (`theory.contracts.Environment`)."""

    needs_tokenizer: ClassVar[bool] = False
    """Whether it is written in the tokens of the model's folder; else it brings a tokenizer of its own characters."""

    grades_in_processes: ClassVar[bool] = False
    """Whether its rewards come from processes of their own, so that several can be computed at a time."""

    reads_problems: ClassVar[bool] = False
    """Whether its problems are rows of a file, so that `file_prompts` reads another file as this block says."""

    kind: str

    @abstractmethod
    def task(self, tokenizer: Tokenizer | None) -> TextTask:
        """The task; `tokenizer` is there where `needs_tokenizer`. ValueError for what is wrong with config or file."""

    def file_prompts(self, path: str, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
        """Every problem of that file, read as this block says, of a task that `reads_problems`.

        ValueError `path:number: expected ..., got ...` for the first bad row.
        """
        raise NotImplementedError(f"a task of kind {self.kind} reads no problem file: {path}, {tokenizer}")


__all__ = ["DemonstratedTask", "TaskBlock", "TextTask"]
