"""A dump's format: its framework, its contents and gaps, and how its rows become ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.traces import Trace

Row = Mapping[str, Any]
Placed = tuple[Row, str]
"""A row, and where it stands in its file."""


@dataclass(frozen=True)
class About:
    """A reader's description of a dump: its files, contents and gaps, and the file that writes it, with commit."""

    name: str
    files: str
    has: str
    lacks: str
    source: str
    steps: tuple[str, ...] = field(default=(), kw_only=True)
    """Patterns of the end of a file's path, with the groups `step` and, of a file per rank, `part`; none: one step."""


@dataclass(frozen=True)
class Format(About):
    """A dump that is read: row by row, or as the one dictionary of a torch file.

    `is_mine` looks at the first row (or at the dictionary); `read` turns a row (the dictionary) at a place into
    rows of rows.py. `uses` are the columns that are read, of those that `columns` finds. `caveat` says of a trace
    what its verdict must be read with, "" for nothing; ValueError where nothing can be said of engines.
    """

    uses: tuple[str, ...]
    is_mine: Callable[[Row], bool]
    read: Callable[[Row, str], Iterable[Row]]
    caveat: Callable[[Trace], str] = lambda trace: ""
    is_pi: Callable[[Trace], bool] = lambda trace: False
    """Whether the trainer's side is pi, of the gradient pass, in place of old."""
    columns: Callable[[Row], Iterable[str]] = lambda first: first
    has_old: bool = True
    """Whether the dump holds the trainer's side; where it does not, `--old` brings it."""

    def unused(self, first: Row) -> tuple[str, ...]:
        """The columns that nothing is read from."""
        return tuple(str(name) for name in self.columns(first) if name not in self.uses)


@dataclass(frozen=True, eq=False)
class Dump:
    """The contents of a file: its trace, its framework, caveats, and the columns that were not used."""

    trace: Trace
    format: str
    caveat: str = ""
    unused: tuple[str, ...] = ()
    is_pi: bool = False
    """Whether pi stands in the place of old."""
