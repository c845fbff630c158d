"""Figures of curves: the share of collapsed runs against the border's number, and the entropy over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import special, stats

from lab.report.style import PALETTE, number
from sandbox.border import dual_clip
from sandbox.border.fit import comparable, logistic, points
from sandbox.border.objectives import OBJECTIVES
from sandbox.border.rates import NUMBER, counted
from sandbox.border.table import where
from sandbox.claims.border_arms import DEGREES, REMEDY_WORDS
from sandbox.ledger.cells import NUM_WINDOWS, last_step
from sandbox.ledger.claim import Row

LEAST = 3
"""Places with fewer runs have no point."""

DUAL = PALETTE[6].line


def fit_picture(unaided: pd.DataFrame, slowed: pd.DataFrame, dual: pd.DataFrame) -> Figure:
    """The share of collapsed runs of each gap and N against the mean KL x N, with the fit to the `unaided` runs.

    A bar is the 95% interval of Clopper and Pearson. `slowed` are runs at half the rate, to which nothing is fitted;
    `dual` those with a dual clip, with a fit of their own if they have one (`dual_clip.border`).
    """
    own = comparable(unaided)
    a, b = logistic(*points(NUMBER, own))
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axis = figure.subplots()
    x = np.geomspace(0.1, 10.0, 200)
    axis.plot(x, special.expit(a + b * np.log(x)), color="black", lw=1.4, label="fit")
    border = math.exp(-a / b)
    axis.axvline(border, color="#888888", lw=0.9, ls="--")
    axis.annotate(f"x* = {number(border)}", (border, 0.97), (-4, 0), textcoords="offset points", ha="right",
                  va="top", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
    for place, n in enumerate(DEGREES):
        _shares(axis, where(own, N=n), PALETTE[place].line, "o", f"N = {n}")
    if len(dual):
        _shares(axis, dual, DUAL, "D", "dual clip", filled=False)
        if dual_clip.border(dual_clip.fits(dual)) is not None:
            c, d = logistic(*points(NUMBER, dual))
            axis.plot(x, special.expit(c + d * np.log(x)), color=DUAL, lw=1.2, ls="--", label="its fit")
    slower = counted(slowed)
    if len(slower):
        _shares(axis, slower, "black", "s", "half the rate", filled=False)
    axis.set_xscale("log")
    axis.set_xticks([0.1, 0.3, 1.0, 3.0, 10.0], ["0.1", "0.3", "1", "3", "10"])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="KL before training x N", ylabel="share of collapsed runs", ylim=(-0.04, 1.04))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _shares(axis: Axes, runs: pd.DataFrame, ink: str, marker: str, label: str, *, filled: bool = True) -> None:
    for _, own in runs.groupby(["gap", "N"]):
        if len(own) < LEAST:
            continue
        count = int(own["collapsed"].to_numpy(dtype=float).sum())
        x = float(own["kl"].to_numpy(dtype=float).mean() * own["N"].iloc[0])
        low, high = stats.binomtest(count, len(own)).proportion_ci(0.95, method="exact")
        axis.vlines(x, low, high, color=ink, lw=1.0)
        axis.plot([x], [count / len(own)], marker, color=ink, mfc=ink if filled else "white", ms=5, label=label)
        # One entry of the legend for all points of a kind; matplotlib leaves out a label that begins so.
        label = f"_{label}"


def entropy_picture(table: pd.DataFrame, rows: Mapping[str, Row]) -> Figure:
    """The median entropy of the runs over their updates, at N = 8: GRPO by remedy, and objectives without replay."""
    remedies = [("grpo", "exact", "none", "an exact engine")]
    remedies += [("grpo", "r0.5", name, REMEDY_WORDS[name]) for name in ("none", "R2", "R3", "tis", "tis-R3")]
    objectives = [(name, "r0.5", "none", words) for name, words in OBJECTIVES.items()]
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title, wanted in zip(axes, ("GRPO by remedy", "without replay"), (remedies, objectives), strict=True):
        for place, (preset, gap, remedy, words) in enumerate(wanted):
            own = where(table, preset=preset, gap=gap, remedy=remedy, N=8)
            if len(own):
                x, median = entropy_path([rows[cell] for cell in own["cell"]], 8)
                axis.plot(x, median, color=PALETTE[place].line, lw=1.4, label=words)
        axis.set_title(title)
        axis.set(xlabel="updates", ylim=(0.0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("entropy, nats per token")
    return figure


def entropy_path(own: Sequence[Row], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The last update of each window, and the median entropy over the runs that have a value there."""
    series = [row["series"]["actor/entropy"] for row in own if row["series"].get("actor/entropy")]
    values = np.array([[math.nan if value is None else value for value in one] for one in series])
    steps = own[0]["num_steps"]
    x = np.array([last_step(window, steps) * n for window in range(NUM_WINDOWS)])
    return x, np.nanmedian(values, axis=0)


__all__ = ["entropy_path", "entropy_picture", "fit_picture"]
