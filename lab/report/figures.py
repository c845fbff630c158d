"""The figures of the report: each is a function from the runs to a plotly figure, or to None without data.

To add a figure, write such a function and put it into a list in `lab/report/sections.py`. A metric's caption (formula,
unit, source) comes from `theory.metrics.REGISTRY`; the page adds the colours, for a light or a dark screen.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from lab.levels import Series, trailing_mean
from lab.report.runs import ReportRun
from lab.report.story import first_step, reasons
from lab.report.style import DASHES, PALETTE, number, spread
from theory.metrics import REGISTRY

HEIGHT = 280
MARGIN = {"l": 58, "r": 14, "t": 10, "b": 40}
PLOT_HEIGHT = float(HEIGHT - MARGIN["t"] - MARGIN["b"])
"""Height of the plot area, pixels."""
LABEL_SIZE, LABEL_GAP = 12, 14.0
"""Font size of the labels at the ends of lines, and the distance of their baselines, pixels."""
MAX_LABEL = 18


@dataclass(frozen=True)
class Caption:
    """The content of a figure: the formula, its unit and its source."""

    formula: str
    unit: str
    source: str
    name: str = ""


@dataclass(frozen=True)
class Figure:
    """A plotly figure without colours: every trace has its run in `meta`, every label in `name`."""

    id: str
    title: str
    caption: Caption
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    height: int = HEIGHT


@runtime_checkable
class Named(Protocol):
    """A line in a figure: its place in the palette and its name."""

    @property
    def index(self) -> int: ...
    @property
    def label(self) -> str: ...


TICKS = (
    (1, 2, 5),
    (1, 1.5, *range(2, 10)),
    (1, 1.2, 1.5, 1.8, *(halves / 2 for halves in range(4, 20))),
    tuple(tenths / 10 for tenths in range(10, 100)),
)
"""Ticks of a log axis that has few decades, from wide to close: the first with three of them in range is taken."""

BARS = {"hovermode": "x unified", "bargap": 0.25}
"""The layout that figures of bars share."""

FigureFunction = Callable[[Sequence[ReportRun]], Figure | None]


@dataclass(frozen=True)
class Lines:
    """One metric over the global steps, one line per run.

    On a log axis a value of 0 (that of an exact engine) is drawn at the bottom, on a tick of its own. A `noisy` series
    is drawn faint under its trailing mean; `points` marks the values of a sparse one.
    """

    id: str
    title: str
    name: str
    axis: Literal["linear", "log"] = "linear"
    style: Literal["plain", "noisy", "points"] = "plain"

    def series(self, run: ReportRun) -> Series:
        """The run's line."""
        return run.series(self.name)

    @property
    def caption(self) -> Caption:
        """Formula, unit and source."""
        return caption(self.name)

    def __call__(self, runs: Sequence[ReportRun]) -> Figure | None:
        found = [(run, values) for run in runs if (values := self.series(run))]
        if not found:
            return None
        window = smoothing_window(max(len(values) for _, values in found)) if self.style == "noisy" else 1
        scale = Scale.of([value for _, values in found for _, value in values], self.axis)
        data = run_lines(found, window, scale, marked=self.style == "points")
        smooth = [(run, trailing_mean(values, window)) for run, values in found]
        data += [cross for run, values in smooth if (cross := collapse_cross(run, values, scale)) is not None]
        layout = over_steps([values for _, values in found], scale)
        if len(runs) > 1:
            ends = [(run, *values[-1]) for run, values in smooth]
            layout["annotations"] = end_labels(ends, scale)
        note = smoothing_note(window) + ("Zeros stand on the lowest tick." if scale.floor is not None else "")
        return Figure(self.id, self.title, self.caption, data, layout, note)


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


def caption(name: str) -> Caption:
    """The registered formula, unit and source of a metric."""
    metric = REGISTRY[name]
    return Caption(metric.formula, metric.unit, metric.source, name)


def smoothing_window(num_values: int) -> int:
    """Steps of the trailing mean in a noisy figure: a fifteenth of the run, at least 3, from 20 values on; else 1."""
    return 1 if num_values < 20 else max(3, num_values // 15)


def run_lines(
    found: Sequence[tuple[ReportRun, Series]], window: int, scale: Scale, *, marked: bool = False
) -> list[dict[str, Any]]:
    """A line per run: its values, or for `window` > 1 their trailing mean over the faint values."""
    data: list[dict[str, Any]] = []
    for run, values in found:
        smooth = trailing_mean(values, window)
        if window > 1:
            data.append(_trace(run, values, scale, "raw", marked) | {"opacity": 0.25, "hoverinfo": "skip"})
        texts = [_hover(raw, mean, window) for (_, raw), (_, mean) in zip(values, smooth, strict=True)]
        data.append(_trace(run, smooth, scale, "line", marked) | hover(texts))
    return data


def over_steps(found: Sequence[Series], scale: Scale) -> dict[str, Any]:
    """The layout of lines over the global steps."""
    steps = [step for values in found for step, _ in values]
    return {
        "xaxis": {"title": {"text": "global step"}, "range": _step_range(min(steps), max(steps))},
        "yaxis": scale.axis(),
        "hovermode": "x unified",
    }


def collapse_cross(run: ReportRun, smooth: Series, scale: Scale) -> dict[str, Any] | None:
    """The mark on a collapsed run's curve where its first rule began to hold; its hover text is the rule."""
    step = first_step(run)
    if step is None or not smooth[0][0] <= step <= smooth[-1][0]:
        return None
    # A sparse curve may have no value at that step: interpolate, so that the cross lies on the drawn line.
    heights = [scale.height(value) for _, value in smooth]
    y = float(np.interp(step, [at for at, _ in smooth], heights))
    # Wrapped, because the hover box of a phone is narrow.
    rule = "<br>".join(textwrap.wrap(f"collapsed: {reasons(run)[0]}", 40))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [step],
        "y": [10.0**y if scale.is_log else y],
        "name": run.label,
        "cliponaxis": False,
        "meta": {"run": run.index, "role": "collapse"},
    } | hover([rule])


def smoothing_note(window: int) -> str:
    """A legend for the faint and the bold lines; empty where nothing is smoothed."""
    return f"Faint: each step; bold: trailing mean of {window} steps. " if window > 1 else ""


def end_labels(
    ends: Sequence[tuple[Named, float | int, float]],
    scale: Scale,
    *,
    suffixes: Sequence[str] = (),
    where: str = "",
    height: float = PLOT_HEIGHT,
    size: int = LABEL_SIZE,
) -> list[dict[str, Any]]:
    """The names at the ends of lines (name, x and y of its end), moved up or down where they would overlap.

    `suffixes` follow the names; labels with `where` = " narrow" replace the others on a narrow page.
    """
    wanted = [scale.pixels(value, height) for _, _, value in ends]
    placed = spread(wanted, LABEL_GAP * size / LABEL_SIZE, 4.0, height - 4.0)
    labels = []
    for (run, step, value), suffix, want, place in zip(ends, suffixes or [""] * len(ends), wanted, placed, strict=True):
        y = scale.place(value)
        label = run.label if len(run.label) <= MAX_LABEL else f"{run.label[: MAX_LABEL - 1]}…"
        # page.js reads the run and the width of the page out of `name`.
        labels.append({
            "x": step, "y": math.log10(y) if scale.is_log else y, "text": label + suffix,
            "name": f"run-{run.index}{where}", "font": {"size": size}, "showarrow": False,
            "xanchor": "left", "yanchor": "middle", "xshift": 7, "yshift": round(place - want, 1),
        })  # fmt: skip
    return labels


def _trace(run: ReportRun, values: Series, scale: Scale, role: str, marked: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if marked or len(values) == 1 else "lines",
        "x": [step for step, _ in values],
        "y": [scale.place(value) for _, value in values],
        "name": run.label,
        "line": {"dash": DASHES[run.index // len(PALETTE) % len(DASHES)]},
        # Otherwise the edges cut the markers of the first and last step.
        "cliponaxis": False,
        "meta": {"run": run.index, "role": role},
    }


def hover(texts: Iterable[str]) -> dict[str, Any]:
    """The part of a trace that shows these texts on hovering, one per point, and nothing else."""
    return {"customdata": list(texts), "hovertemplate": "%{customdata}"}


def bar_trace(run: Named, x: Sequence[Any], y: Sequence[float | None], texts: Iterable[str]) -> dict[str, Any]:
    """A run's bars, with a text to hover over for each."""
    return {"type": "bar", "name": run.label, "meta": {"run": run.index, "role": "bar"}, "x": x, "y": y} | hover(texts)


def _step_range(first: int, last: int) -> list[float]:
    # A little room on the left, so that a first marker does not cover the tick labels.
    return [first - 0.015 * (last - first), float(last)] if last > first else [first - 1.0, last + 1.0]


def _hover(raw: float, mean: float, window: int) -> str:
    return number(mean) if window == 1 else f"{number(mean)} (this step {number(raw)})"
