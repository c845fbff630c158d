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

from lab.levels import Series, trailing_mean, trailing_median
from lab.report.runs import ReportRun
from lab.report.scale import HEIGHT, PLOT_HEIGHT, Scale
from lab.report.story import first_step, reasons
from lab.report.style import DASHES, PALETTE, number, shortened, spread
from theory.metrics import REGISTRY

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

    @property
    def is_zero(self) -> bool:
        """Whether its lines and bars, of which it has some, have no value but 0."""
        drawn = [trace["y"] for trace in self.data if trace["meta"]["role"] in ("line", "raw", "bar")]
        return bool(drawn) and not any(value for values in drawn for value in values)


@runtime_checkable
class Named(Protocol):
    """A line in a figure: its place in the palette and its name."""

    @property
    def index(self) -> int: ...
    @property
    def label(self) -> str: ...


FigureFunction = Callable[[Sequence[ReportRun]], Figure | None]


@dataclass(frozen=True)
class Lines:
    """One metric over the global steps, one line per run.

    On a log axis a value of 0 (that of an exact engine) is drawn at the bottom, on a tick of its own. A `noisy` series
    is drawn faint under its trailing mean (median on a log axis); `points` marks the values of a sparse one.
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
        smooth = [(run, smoothed(values, window, scale)) for run, values in found]
        data += [cross for run, values in smooth if (cross := collapse_cross(run, values, scale)) is not None]
        layout = over_steps([values for _, values in found], scale)
        if len(runs) > 1:
            layout["annotations"] = end_labels(treatment_ends(smooth), scale)
        note = smoothing_note(window, scale) + ("Zeros stand on the lowest tick." if scale.floor is not None else "")
        return Figure(self.id, self.title, self.caption, data, layout, note)


def caption(name: str) -> Caption:
    """The registered formula, unit and source of a metric."""
    metric = REGISTRY[name]
    return Caption(metric.formula, metric.unit, metric.source, name)


def smoothing_window(num_values: int) -> int:
    """Steps by which a noisy figure smooths: a fifteenth of the run, at least 3, from 20 values on; else 1."""
    return 1 if num_values < 20 else max(3, num_values // 15)


def smoothed(values: Series, window: int, scale: Scale) -> Series:
    """The trailing mean of the values, on a log axis the trailing median; for `window` = 1 the values."""
    # On a log axis a lone spike lifts the mean to a plateau as wide as the window. The median leaves it to the faint
    # line; the geometric mean would keep part of the plateau, and is 0 beside any 0.
    return trailing_median(values, window) if scale.is_log else trailing_mean(values, window)


def run_lines(
    found: Sequence[tuple[ReportRun, Series]], window: int, scale: Scale, *, marked: bool = False
) -> list[dict[str, Any]]:
    """A line per run: its values, or for `window` > 1 the smoothed ones over the faint values."""
    data: list[dict[str, Any]] = []
    for run, values in found:
        smooth = smoothed(values, window, scale)
        if window > 1:
            data.append(_trace(run, values, scale, "raw", marked) | {"opacity": 0.25, "hoverinfo": "skip"})
        texts = [_hover(raw, level, window) for (_, raw), (_, level) in zip(values, smooth, strict=True)]
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


def smoothing_note(window: int, scale: Scale) -> str:
    """A legend for the faint and the bold lines; empty where nothing is smoothed."""
    level = "median" if scale.is_log else "mean"
    return f"Faint: each step; bold: trailing {level} of {window} steps. " if window > 1 else ""


@dataclass(frozen=True)
class Label:
    """A name in a colour of the palette."""

    index: int
    label: str


def treatment_ends(lines: Sequence[tuple[ReportRun, Series]]) -> list[tuple[Named, int, float]]:
    """A label per colour, with the place where its line ends; of several lines the one whose end is in the middle."""
    found: dict[int, list[tuple[ReportRun, int, float]]] = {}
    for run, values in lines:
        found.setdefault(run.index, []).append((run, *values[-1]))
    ends: list[tuple[Named, int, float]] = []
    for some in found.values():
        last = max(step for _, step, _ in some)
        # Not of those that stopped early, whose labels would stand inside the plot.
        late = sorted((one for one in some if one[1] == last), key=lambda one: one[2])
        run, step, value = late[(len(late) - 1) // 2]
        ends.append((Label(run.index, run.treatment), step, value))
    return ends


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
        # page.js reads the run and the width of the page out of `name`.
        labels.append({
            "x": step, "y": math.log10(y) if scale.is_log else y, "text": shortened(run.label, MAX_LABEL) + suffix,
            "name": f"run-{run.index}{where}", "font": {"size": size}, "showarrow": False,
            "xanchor": "left", "yanchor": "middle", "xshift": 7, "yshift": round(place - want, 1),
        })  # fmt: skip
    return labels


def _trace(run: ReportRun, values: Series, scale: Scale, role: str, marked: bool) -> dict[str, Any]:
    x, y = [step for step, _ in values], [scale.place(value) for _, value in values]
    mode = "lines+markers" if marked or len(values) == 1 else "lines"
    # The faint lines are solid: dashes of single steps would be dust.
    return line_trace(run.index, run.label, role, x, y, mode, 0 if role == "raw" else run.replicate)


def dash(run: int, replicate: int = 0) -> str:
    """The dash of a line in the run's colour: one further for each replicate, and for each turn of the palette."""
    return DASHES[(run // len(PALETTE) + replicate) % len(DASHES)]


def line_trace(
    run: int, label: str, role: str, x: Sequence[Any], y: Sequence[Any], mode: str = "lines", replicate: int = 0
) -> dict[str, Any]:
    """A trace of the run's name and dash; its colour is the page's, by `meta`."""
    return {
        "type": "scatter", "mode": mode, "x": x, "y": y, "name": label,
        "line": {"dash": dash(run, replicate)},
        # Otherwise the edges cut the markers at both ends.
        "cliponaxis": False, "meta": {"run": run, "role": role},
    }  # fmt: skip


def hover(texts: Iterable[str]) -> dict[str, Any]:
    """The part of a trace that shows these texts on hovering, one per point, and nothing else."""
    return {"customdata": list(texts), "hovertemplate": "%{customdata}"}


def bar_layout(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The layout that figures of bars share, with gaps between bars where several of one colour would be one block."""
    colours = [trace["meta"]["run"] for trace in data]
    gaps = {"bargroupgap": 0.12} if len(set(colours)) < len(colours) else {}
    return {"hovermode": "x unified", "bargap": 0.25} | gaps


def bar_trace(run: Named, x: Sequence[Any], y: Sequence[float | None], texts: Iterable[str]) -> dict[str, Any]:
    """A run's bars, with a text to hover over for each."""
    return {"type": "bar", "name": run.label, "meta": {"run": run.index, "role": "bar"}, "x": x, "y": y} | hover(texts)


def _step_range(first: int, last: int) -> list[float]:
    # A little room on the left, so that a first marker does not cover the tick labels.
    return [first - 0.015 * (last - first), float(last)] if last > first else [first - 1.0, last + 1.0]


def _hover(raw: float, level: float, window: int) -> str:
    return number(level) if window == 1 else f"{number(level)} (this step {number(raw)})"
