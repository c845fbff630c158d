"""The shape and the beginning of a series' change, by least squares, once the rank tests have found one.

change_point.py rules out chance. Here three shapes compete on y = log(max(value, FLOOR)): a line from the first step
on, a jump between two levels, and a level followed by a slope. The smallest n log(rest / n) + k log n (BIC) wins, k the
number of parameters.
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
"""Floor of the values on the log scale: nats per token, or a share."""
WORTH = 1.5
"""Smallest ratio of the medians around a change; below it the series is called steady, however clear the change."""
Kind = Literal["line", "jump", "slope"]


@dataclass(frozen=True)
class Growth:
    """The change of a series: its shape, the index of the first changed value, the medians, and the rank tests."""

    kind: Kind
    at: int
    before: float
    """Median of the values before `at`; for a line, of the first quarter."""
    after: float
    """Median of the values from `at` on; for a slope or a line, of the last quarter."""
    tests: Change

    @property
    def is_rising(self) -> bool:
        """Whether the later values are larger."""
        return self.after > self.before


def growth(values: Sequence[float]) -> Growth | None:
    """The change of the series; None if it is within chance, smaller than WORTH, or if the series is too short."""
    found = change(values)
    if found is None or not found.is_clear:
        return None
    # On a log scale growth by a factor per step is a line.
    y = np.log(np.maximum(np.array(values, dtype=np.float64), FLOOR))
    kind, at = _shape(y)
    quarter = max(2, len(values) // 4)
    early = values[:quarter] if kind == "line" else values[:at]
    # At most the values from `at` on, as a change near the end has fewer than a quarter.
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
        # Three parameters: two levels and the place s, which is searched.
        found.append((_score(y, [one, is_late], 3), "jump", s))
        # With fewer than three values on it, a slope is hardly told from a jump.
        if s < n - 2:
            # The slope has already risen by one step at s, so that s is its first changed value.
            found.append((_score(y, [one, np.maximum(t - s + 1, 0.0)], 3), "slope", s))
    _, kind, at = min(found)
    return kind, at


def _score(y: np.ndarray, columns: Sequence[np.ndarray], num_parameters: int) -> float:
    X = np.stack(columns, 1)
    rest = float(np.square(y - X @ np.linalg.lstsq(X, y, rcond=None)[0]).sum())
    n = len(y)
    # The floor: a perfect fit, as on an exact engine's level, would score minus infinity and always win.
    return n * math.log(max(rest / n, 1e-4)) + num_parameters * math.log(n)
