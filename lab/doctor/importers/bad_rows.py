"""Rows that do not fit: all of a file are found before it is refused, a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lab.doctor.importers.format import Placed, Row

MOST_LINES = 10
"""Lines that are told; of more their number."""


@dataclass(frozen=True)
class Bad:
    """A row that could not be read, in the place of its columns: its place, the field, what was expected and came."""

    reason: str


Read = tuple[Row | Bad, str]
"""A row or why there is none, and where it stands in its file."""


class BadRows(ValueError):
    """The rows of a file that do not fit: the first ones in `lines`, `num_more` besides."""

    def __init__(self, lines: Sequence[str], num_more: int = 0) -> None:
        self.lines, self.num_more = list(lines), num_more
        super().__init__("\n".join(self.told))

    @property
    def told(self) -> list[str]:
        """A line per row, and how many more there are."""
        more = f"and {self.num_more:,} more row{'s' if self.num_more > 1 else ''} that do not fit"
        return self.lines + ([more] if self.num_more else [])

    def of_file(self, name: str) -> BadRows:
        """The same with the file's name before each line."""
        return BadRows(
            [line if line.startswith(f"{name}: ") else f"{name}: {line}" for line in self.lines], self.num_more
        )


class Found:
    """Collects them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num = 0

    def add(self, reason: str) -> None:
        """Takes a row's reason; only the first MOST_LINES are kept, and one that several rows have once."""
        if reason in self.lines:
            return
        self.num += 1
        if len(self.lines) < MOST_LINES:
            self.lines.append(reason)

    def refuse(self) -> None:
        """Raises BadRows where there were any."""
        if self.num:
            raise BadRows(self.lines, self.num - len(self.lines))


def each(placed: Iterable[Read], read: Callable[[Row, str], Iterable[Row]]) -> Iterator[Read]:
    """Reads rows one by one; a row that the format refuses becomes Bad, and reading continues with the next."""
    for raw, place in placed:
        if isinstance(raw, Bad):
            yield raw, place
            continue
        try:
            made = list(read(raw, place))
        except ValueError as error:
            yield Bad(str(error)), place
            continue
        yield from ((row, place) for row in made)


__all__ = ["Bad", "BadRows", "Found", "Placed", "Read", "each"]
