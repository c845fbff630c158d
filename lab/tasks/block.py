"""The properties that the config block of every task states besides its dials."""

from __future__ import annotations

from typing import ClassVar

from lab.strict import Strict


class TaskBlock(Strict):
    """Base of the `task:` blocks; what a kind of task is, and no config sets, is said in its class."""

    has_turns: ClassVar[bool] = False
    """Whether it answers responses, so that they have several turns (`theory.contracts.Environment`)."""

    needs_tokenizer: ClassVar[bool] = False
    """Whether it is written in the tokens of the model's folder; else it brings a tokenizer of its own characters."""

    grades_in_processes: ClassVar[bool] = False
    """Whether its rewards come from processes of their own, so that several can be computed at a time."""
