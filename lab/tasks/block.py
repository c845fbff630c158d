"""A task with a tokenizer, and the base of the config blocks: each declares its kind of task and makes it."""

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
    """A task with demonstrations of right responses, on which a model can be cold-started."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """The styles of its demonstrations, at least one; the first is the default."""
        ...

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str) -> tuple[int, ...]:
        """The teacher's response tokens, which earn reward 1, end tokens included; random choices use `generator`.

        In a task with turns: all turns, with the observations in between exactly as the task makes them.
        """
        ...


class TaskBlock(Strict):
    """Base of the `task:` blocks; class variables declare the properties of a kind of task, which no config sets."""

    has_turns: ClassVar[bool] = False
    """Whether the task answers responses, so that they have several turns (`theory.contracts.Environment`)."""

    needs_tokenizer: ClassVar[bool] = False
    """Whether the task uses the tokenizer of the model's folder; else it has one of its own characters."""

    grades_in_processes: ClassVar[bool] = False
    """Whether separate processes compute its rewards, so that several can be computed at a time."""

    reads_problems: ClassVar[bool] = False
    """Whether its problems are rows of a file, so that `file_prompts` can read another file by this block."""

    kind: str

    @property
    def named_files(self) -> tuple[str, ...]:
        """The files or folders that the block only names; none for a task that makes its own problems."""
        return ()

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers that can cold-start a model on the task, the default first; none without demonstrations."""
        return ()

    def count_held_out(self) -> int | None:
        """The number of held-out problems; None where neither a field `num_held_out` nor a file at hand tells it."""
        return getattr(self, "num_held_out", None)

    @abstractmethod
    def task(self, tokenizer: Tokenizer | None) -> TextTask:
        """The task; `tokenizer` is given where `needs_tokenizer`. ValueError for an error in the config or the file."""

    def file_prompts(self, path: str, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
        """Every problem of that file, read by this block, for a task that `reads_problems`.

        ValueError `path:number: expected ..., got ...` for the first bad row.
        """
        raise NotImplementedError(f"a task of kind {self.kind} reads no problem file: {path}, {tokenizer}")
