"""A dump's format: its framework, its contents and gaps, and the conversion of its rows to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.traces import Trace

Row = Mapping[str, Any]
Placed = tuple[Row, str]
"""A row and its place in the file."""


@dataclass(frozen=True)
class DumpDescription:
    """The description of a format: its files, contents and gaps, and the source file that writes it, with commit."""

    name: str
    files: str
    has: str
    lacks: str
    source: str
    steps: tuple[str, ...] = field(default=(), kw_only=True)
    """Patterns for the end of a path, with the groups `step` and, for a file per rank, `part`; empty: never a run."""


@dataclass(frozen=True)
class Format(DumpDescription):
    """A format that is read row by row, or as the one dictionary of a torch file.

    `is_mine` looks at the first row (or the dictionary); `read` converts a row (or the dictionary) at a place to rows
    of rows.py. `uses` are the columns that are read, among those that `columns` lists. `caveat` qualifies the verdict
    on a trace ("" for none) and raises ValueError for a trace that says nothing about the engines.
    """

    uses: tuple[str, ...]
    is_mine: Callable[[Row], bool]
    read: Callable[[Row, str], Iterable[Row]]
    caveat: Callable[[Trace], str] = lambda trace: ""
    is_pi: Callable[[Trace], bool] = lambda trace: False
    """Whether the trainer's side is pi, from the gradient pass, instead of old."""
    columns: Callable[[Row], Iterable[str]] = lambda first: first
    has_old: bool = True
    """Whether the dump has the trainer's side; if not, `--old` supplies it."""
    has_tokens: bool = True
    """Whether the dump has token ids; if not, the importer numbers a file's tokens, and no two are equal."""

    def unused(self, first: Row) -> tuple[str, ...]:
        """The columns that are not read."""
        return tuple(str(name) for name in self.columns(first) if name not in self.uses)


@dataclass(frozen=True, eq=False)
class Dump:
    """The contents of a file: its trace, its format, a caveat, and the unused columns."""

    trace: Trace
    format: str
    caveat: str = ""
    unused: tuple[str, ...] = ()
    is_pi: bool = False
    """Whether pi takes the place of old."""
    has_tokens: bool = True
    """Whether tokens are ids; if not, they are numbers that start at 0 in every file."""
    left_out: tuple[str, ...] = ()
    """A sentence for each kind of file of the step that is left out."""


class NoOldError(ValueError):
    """A rank's file without log-probabilities of old, which those of other ranks may have."""
