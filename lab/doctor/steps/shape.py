"""The shape in which a series of steps changes, and since when: by least squares, once the rank tests say that it does.

change_point.py says whether chance is ruled out; its split is the clearest change of level, which for a slope that
begins late lies after its beginning. Here three shapes compete on y = log(max(value, FLOOR)): a line from the first
step on, a jump between two levels, a level and then a slope. The least n log(rest / n) + k log n wins, k parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lab.doctor.change_point import Change, change
from lab.doctor.words import HARMLESS

FLOOR = HARMLESS / 100
"""Values below this count as it: nats per token, or a share."""
WORTH = 1.5
"""A median after a change that is less than this times the one before is called steady, however clear the change."""
Kind = Literal["line", "jump", "slope"]


@dataclass(frozen=True)
class Growth:
    """A series that changes: in which shape, from which value on (its place in the series), and the rank tests."""

    kind: Kind
    at: int
    before: float
    """Median of the values before `at`; of a line, the first quarter's."""
    after: float
    """Median of the values from `at` on; of a slope or a line, the last quarter's."""
    tests: Change

    @property
    def is_rising(self) -> bool:
        """Whether the later values are larger."""
        return self.after > self.before

    @property
    def keeps_growing(self) -> bool:
        """Whether it rises from step to step, not once."""
        return self.is_rising and self.kind != "jump"


def growth(values: Sequence[float]) -> Growth | None:
    """The change of the series; None where it does not beyond chance or by less than WORTH, or is too short to tell."""
    found = change(values)
    if found is None or not found.is_clear:
        return None
    y = np.log(np.maximum(np.array(values, dtype=np.float64), FLOOR))
    kind, at = _shape(y)
    quarter = max(2, len(values) // 4)
    early = values[:quarter] if kind == "line" else values[:at]
    late = values[at:] if kind == "jump" else values[-min(quarter, len(values) - at) :]
    before, after = float(np.median(early)), float(np.median(late))
    small, large = sorted((before, after))
    if large < WORTH * max(small, FLOOR):
        return None
    return Growth(kind, at, before, after, found)


def _shape(y: np.ndarray) -> tuple[Kind, int]:
    n = len(y)
    t = np.arange(n, dtype=np.float64)
    one = np.ones(n)
    found: list[tuple[float, Kind, int]] = [(_score(y, [one, t], 2), "line", 0)]
    for s in range(1, n):
        is_late = (t >= s).astype(np.float64)
        found.append((_score(y, [one, is_late], 3), "jump", s))
        if s < n - 2:
            # The first value of a slope is on the level, so that it is told from a jump by what follows.
            found.append((_score(y, [one, np.maximum(t - s + 1, 0.0)], 3), "slope", s))
    _, kind, at = min(found)
    return kind, at


def _score(y: np.ndarray, columns: Sequence[np.ndarray], num_parameters: int) -> float:
    X = np.stack(columns, 1)
    rest = float(np.square(y - X @ np.linalg.lstsq(X, y, rcond=None)[0]).sum())
    n = len(y)
    # A level that is exact (an exact engine's) would have the score minus infinity whatever follows.
    return n * math.log(max(rest / n, 1e-4)) + num_parameters * math.log(n)
