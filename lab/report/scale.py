"""The value axis of a figure: its range, fixed in advance, and its ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.report.style import number

HEIGHT = 280
MARGIN = {"l": 58, "r": 14, "t": 10, "b": 40}
PLOT_HEIGHT = float(HEIGHT - MARGIN["t"] - MARGIN["b"])
"""Height of the plot area, pixels."""
TICKS = (
    (1, 2, 5),
    (1, 1.5, *range(2, 10)),
    (1, 1.2, 1.5, 1.8, *(halves / 2 for halves in range(4, 20))),
    tuple(tenths / 10 for tenths in range(10, 100)),
)
"""Ticks of a log axis that has few decades, from wide to close: the first with three of them in range is taken."""


@dataclass(frozen=True)
class Scale:
    """A value axis with its range fixed in advance, so that labels can be kept apart in pixels.

    `floor` is where a log axis draws 0; None where it draws none.
    """

    low: float
    high: float
    is_log: bool
    floor: float | None = None

    @staticmethod
    def of(values: Sequence[float], axis: str) -> Scale:
        """The scale for these values; a log axis without a positive value is a linear one."""
        positive = [value for value in values if value > 0]
        if axis == "log" and positive:
            low, high = math.log10(min(positive)), math.log10(max(positive))
            has_zero = len(positive) < len(values)
            # A whole decade below the smallest value, so that 0 is not taken for a value near it.
            floor = 10.0 ** (math.floor(low) - 1) if has_zero else None
            low = math.log10(floor) if floor is not None else low
            # Half a decade at least: equal values have no range of their own.
            pad = 0.06 * max(high - low, 0.5)
            return Scale(low - pad, high + pad, True, floor)
        low, high = min(values), max(values)
        if low == high == 0:
            high = 1.0
        # An axis that would begin near 0 begins there.
        if 0 <= low < 0.5 * high:
            low = 0.0
        span = high - low or abs(high)
        return Scale(low - (0.02 if low == 0 else 0.06) * span, high + 0.06 * span, False)

    def place(self, value: float) -> float:
        """The value as drawn: itself, or the floor where a log axis cannot draw it."""
        return self.floor if self.floor is not None and value <= 0 else value

    def height(self, value: float) -> float:
        """The value as drawn, in the axis's coordinates: its logarithm on a log axis."""
        placed = self.place(value)
        return math.log10(placed) if self.is_log else placed

    def pixels(self, value: float, height: float = PLOT_HEIGHT) -> float:
        """Pixels above the bottom of a plot of this height."""
        return (self.height(value) - self.low) / (self.high - self.low) * height

    def axis(self) -> dict[str, Any]:
        """plotly's axis; log ticks stand at decades, at 1, 2, 5 where those are few, or closer; the floor's reads 0."""
        if not self.is_log:
            return {"range": [self.low, self.high]}
        zero = None if self.floor is None else round(math.log10(self.floor))
        decades = [t for t in range(math.ceil(self.low), math.floor(self.high) + 1) if t != zero]
        if len(decades) >= 3:
            every = math.ceil(len(decades) / 5)
            ticks = {10.0**t: "1" if t == 0 else f"10<sup>{t}</sup>" for t in decades if t % every == 0}
        else:
            low = self.low if zero is None else zero + 0.5  # no tick close to the floor's
            within = [_within(steps, low, self.high) for steps in TICKS]
            ticks = {value: number(value) for value in next((few for few in within if len(few) >= 3), within[-1])}
        if self.floor is not None:
            ticks[self.floor] = "0"
        return {"type": "log", "range": [self.low, self.high], "tickvals": [*ticks], "ticktext": [*ticks.values()]}


def _within(steps: Sequence[float | int], low: float, high: float) -> list[float]:
    """The multiples of powers of ten whose logarithm is in [low, high]."""
    values = [step * 10.0**t for t in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]
