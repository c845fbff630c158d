"""A metric's series and its level: a trailing mean, lowered by its noise while the window is not full."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Series = list[tuple[int, float]]
"""Steps, ascending, and the values recorded there."""


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> Series:
    """The finite values of one metric, with their steps."""
    found = ((int(record["step"]), record.get(name)) for record in metrics)
    return [(step, float(value)) for step, value in found if value is not None and math.isfinite(value)]


def trailing_mean(values: Series, window: int) -> Series:
    """At each step the mean of the last `window` values (of all, where there are fewer)."""
    bare = [value for _, value in values]
    return [(step, fmean(bare[max(0, i + 1 - window) : i + 1])) for i, (step, _) in enumerate(values)]


def trailing_median(values: Series, window: int) -> Series:
    """At each step the median of the last `window` values (of all, where there are fewer)."""
    bare = [value for _, value in values]
    return [(step, median(bare[max(0, i + 1 - window) : i + 1])) for i, (step, _) in enumerate(values)]


def noise(values: Series) -> float:
    """s, the standard deviation of one value around a slow trend: sqrt(mean squared successive difference / 2).

    The batch size does not give it, because responses to one prompt are correlated. Source: von Neumann, Kent,
    Bellinson and Hart, Ann. Math. Stat. 12 (1941) 153. 0 for fewer than two values.
    """
    squares = [(after - before) ** 2 for (_, before), (_, after) in itertools.pairwise(values)]
    return math.sqrt(fmean(squares) / 2) if squares else 0.0


@dataclass(frozen=True)
class Level:
    """The trailing mean at a step, and `sure`, the lowered mean by which levels compare; value >= sure."""

    step: int
    value: float
    sure: float


def levels(values: Series, window: int, margin: float) -> list[Level]:
    """The trailing mean of w values from the first step on; a mean of n < w counts less margin s sqrt(1/n - 1/w).

    That is its standard error beyond a full window's. Without it the highest of the first short means would be a peak
    of noise, from which a steady run seems to fall.
    """
    s = noise(values)
    # Minus: the first n values are among the first w, so the two means differ with variance s^2 (1/n - 1/w).
    short = [math.sqrt(1 / min(i + 1, window) - 1 / window) for i in range(len(values))]
    means = trailing_mean(values, window)
    return [Level(step, value, value - margin * s * e) for (step, value), e in zip(means, short, strict=True)]


def highest(found: Sequence[Level]) -> Level:
    """The level with the largest `sure`, the first where several have it; ValueError for none at all."""
    return max(found, key=lambda level: level.sure)
