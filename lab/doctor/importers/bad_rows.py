"""Rows that do not fit: all those of a file are collected before it is refused, a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lab.doctor.importers.format import Row

MOST_LINES = 10
"""Most lines in the message; further rows are only counted."""


@dataclass(frozen=True)
class Bad:
    """An unreadable row: `reason` has its place, the field, and the expected and actual values."""

    reason: str


Read = tuple[Row | Bad, str]
"""A row, or the reason why it is unreadable, and its place in the file."""


class BadRows(ValueError):
    """The rows of a file that do not fit: the first ones in `lines`, and `num_more` others."""

    def __init__(self, lines: Sequence[str], num_more: int = 0) -> None:
        self.lines, self.num_more = list(lines), num_more
        super().__init__("\n".join(self.told))

    @property
    def told(self) -> list[str]:
        """A line per row, and the number of further ones."""
        more = f"and {self.num_more:,} more row{'s' if self.num_more > 1 else ''} that do not fit"
        return self.lines + ([more] if self.num_more else [])

    def of_file(self, name: str) -> BadRows:
        """These rows with the file's name before each line."""
        return BadRows(
            [line if line.startswith(f"{name}: ") else f"{name}: {line}" for line in self.lines], self.num_more
        )


class BadRowCollector:
    """A collector of bad rows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num = 0

    def add(self, reason: str) -> None:
        """Adds a row's reason; repeated reasons count once, and only the first MOST_LINES are kept."""
        # rows.py refuses every later row with a column that the first one lacks, each time in the same words.
        if reason in self.lines:
            return
        self.num += 1
        if len(self.lines) < MOST_LINES:
            self.lines.append(reason)

    def refuse(self) -> None:
        """Raises BadRows if there were any."""
        if self.num:
            raise BadRows(self.lines, self.num - len(self.lines))


def each(placed: Iterable[Read], read: Callable[[Row, str], Iterable[Row]]) -> Iterator[Read]:
    """Rows as the format reads them; a row that it refuses becomes Bad, and reading continues with the next."""
    for raw, place in placed:
        if isinstance(raw, Bad):
            yield raw, place
            continue
        try:
            # Most readers are generators, whose errors appear only when they are consumed.
            made = list(read(raw, place))
        except ValueError as error:
            yield Bad(str(error)), place
            continue
        yield from ((row, place) for row in made)
