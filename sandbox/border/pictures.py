"""Printable figures of the border study: the phase diagram, and the gain of each remedy by N."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy import stats

from lab.report.style import PALETTE
from sandbox.border.table import same_as, where
from sandbox.claims.border_arms import DEGREES, GAP_WORDS, REMEDIES, REMEDY_WORDS, ROUTER_GAPS

COLOURS = "cividis"
"""Dark is low. It is perceptually uniform, and readable with any colour vision."""
NOT_RUN = "#e6e6e6"
BORDER = "#d1495b"
PALE = 0.4
"""Share of a cell's colour that is left where it has the runs of another panel."""
FULL = 8
"""Seeds of an arm in the study's design: a place with fewer runs says its number, even if none collapsed."""

# Text stays text, so that a page can be searched; a fixed salt, so that the same rows give the same file.
matplotlib.rcParams |= {
    "svg.fonttype": "none", "svg.hashsalt": "firstorder", "font.size": 9,
    # The list is written with every word of an SVG, and matplotlib's own has ten families.
    "font.sans-serif": ["DejaVu Sans", "Arial"],
}  # fmt: skip


def svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same numbers on the same machine."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    return buffer.getvalue()


def phase_diagram(
    places: pd.DataFrame, remedies: Sequence[str] = tuple(REMEDIES), border: float | None = None
) -> Figure:
    """A panel per remedy: mean area by N and engine gap, and the collapsed runs unless they are 0 of FULL or more.

    `places` is `table.places` of GRPO's runs. Places without runs are grey, and a gap without any has no row; places
    that equal another by construction show that one, in a paler colour. `border`: x* of KL x N, drawn as a dashed line
    in every panel.
    """
    seen = set(places.loc[places["N"].isin(DEGREES) & places["remedy"].isin(remedies), "gap"])
    gaps = [gap for gap in ROUTER_GAPS if gap in seen]
    top = float(places["area"].to_numpy(dtype=float).max())
    columns = min(4, len(remedies))
    lines = -(-len(remedies) // columns)
    figure = Figure(figsize=(2.6 * columns + 1.4, 2.5 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    line = None if border is None else border_line(places, gaps, border)
    crossed = set() if line is None else {(round(x), round(y)) for x, y in zip(*line, strict=True)}
    for axis, remedy in zip(axes, remedies, strict=False):
        _panel(axis, places, remedy, gaps, top, crossed)
        if line is not None:
            # On a white casing, so that it is seen on every colour of the map.
            axis.plot(*line, color="white", lw=2.6)
            axis.plot(*line, color=BORDER, lw=1.4, ls=(0, (4, 2)))
    for axis in axes[len(remedies) :]:
        axis.set_axis_off()
    bar = ScalarMappable(Normalize(0.0, top), COLOURS)
    figure.colorbar(bar, ax=axes.tolist(), label="mean held-out accuracy of pi over the run", shrink=0.8)
    figure.supxlabel("N, updates per rollout")
    figure.supylabel("inference engine")
    return figure


def border_line(places: pd.DataFrame, gaps: Sequence[str], border: float) -> tuple[np.ndarray, np.ndarray] | None:
    """The line KL x N = `border` across a panel: positions of N (steps of a factor of 2) and of the gaps' rows.

    Between two rows it interpolates log KL, the mean of the runs without a remedy, and goes on at the same slope beyond
    the last one. A row without a KL, the exact engine's, is never reached. None with fewer than two rows that have one.
    """
    rows = {gap: where(places, gap=gap, remedy="none") for gap in gaps}
    means = {gap: float(np.average(own["kl"], weights=own["n"])) for gap, own in rows.items() if len(own)}
    known = [(math.log(kl), gaps.index(gap)) for gap, kl in means.items() if kl > 0]
    if len(known) < 2:
        return None
    kl, y = (np.array(column) for column in zip(*known, strict=True))
    x = np.linspace(-0.5, len(DEGREES) - 0.5, 101)
    wanted = math.log(border) - x * math.log(2.0)
    beyond = (wanted - kl[-1]) * (y[-1] - y[-2]) / (kl[-1] - kl[-2])
    found = np.interp(wanted, kl, y) + np.maximum(0.0, beyond)
    before = (wanted - kl[0]) * (y[1] - y[0]) / (kl[1] - kl[0])
    return x, np.maximum(found + np.minimum(0.0, before), y[0] - 0.5)


def _panel(
    axis: Axes, places: pd.DataFrame, remedy: str, gaps: Sequence[str], top: float, crossed: set[tuple[int, int]]
) -> None:
    colours = matplotlib.colormaps[COLOURS]
    for y, gap in enumerate(gaps):
        for x, n in enumerate(DEGREES):
            twin = same_as(gap, n, remedy)
            found = where(places, gap=gap, N=n, remedy=twin)
            if found.empty:
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=NOT_RUN, ec="white", hatch="///", lw=0))
                continue
            place = found.iloc[0]
            share = place["area"] / top
            colour = np.array(to_rgb(colours(share)))
            if twin != remedy:
                colour = 1.0 - PALE * (1.0 - colour)
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=colour, ec="white"))
            ink = "white" if share < 0.55 and twin == remedy else "black"
            # In the cell's colour, so that the line of the border does not run through a number.
            behind = {"fc": colour, "ec": "none", "pad": 0.4} if (x, y) in crossed else None
            axis.text(x, y - 0.12, f"{place['area']:.2f}", ha="center", va="center", color=ink, bbox=behind)
            if place["collapsed"] > 0 or place["n"] < FULL:
                fell = f"{round(place['collapsed'] * place['n'])}/{place['n']:.0f}"
                small = {"fontsize": 6.5, "weight": "bold", "bbox": behind}
                axis.text(x, y + 0.27, fell, ha="center", va="center", color=ink, **small)
    axis.set_title(REMEDY_WORDS[remedy])
    axis.set(xlim=(-0.5, len(DEGREES) - 0.5), ylim=(len(gaps) - 0.5, -0.5))
    axis.set_xticks(range(len(DEGREES)), [str(n) for n in DEGREES])
    axis.set_yticks(range(len(gaps)), [GAP_WORDS[gap] for gap in gaps])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def gains(runs: pd.DataFrame) -> Figure:
    """The gain in mean area of each remedy over no remedy at router noise 0.5, with Welch's 95% interval, at each N
    whose arms have FULL runs."""
    remedies = ("tis", "R2", "R3")
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0.0, color="#888888", lw=0.8)
    own = where(runs, preset="grpo", gap="r0.5")
    for place, remedy in enumerate(remedies):
        points = []
        for n in DEGREES:
            one, none = (where(own, N=n, remedy=name)["area"].to_numpy(dtype=float) for name in (remedy, "none"))
            if min(len(one), len(none)) >= FULL:
                points.append((n, *welch(one, none)))
        if points:
            x, mean, low, high = (np.array(column) for column in zip(*points, strict=True))
            # Shifted a little on the log axis, so that intervals do not overlap.
            shifted = x * 2 ** (0.08 * (place - (len(remedies) - 1) / 2))
            ink = PALETTE[place].line
            axis.plot(shifted, mean, color=ink, marker="o", ms=4, lw=1.2, label=REMEDY_WORDS[remedy])
            axis.vlines(shifted, low, high, color=ink, lw=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(DEGREES, [str(n) for n in DEGREES])
    axis.set(xlabel="N, updates per rollout", ylabel="accuracy gained over no remedy")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def welch(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """mean(a) - mean(b) and its 95% interval by Welch's t; both sides need two values and a spread above 0."""
    mean = float(a.mean() - b.mean())
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return mean, float(found.low), float(found.high)


__all__ = ["border_line", "gains", "phase_diagram", "svg", "welch"]
