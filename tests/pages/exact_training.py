"""The picture of docs/exact-training.md: the study of drift's own problems, two engine errors, four remedies.

`python -m tests.pages.exact_training` draws it, from 800 runs of about a second each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from math import log

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lab.flow import load_config
from lab.flow.config import ErrorBlock, FlowConfig
from lab.flow.run import run_of
from lab.flow.table import interval
from lab.report.style import PALETTE, spread
from sandbox.border.pictures import svg
from sandbox.border.table import where
from tests.pages.study import ROOT
from theory.exact.trajectory import Trajectory

PICTURE = ROOT / "docs" / "images" / "exact-training.svg"
ENDS = ROOT / "results" / "flow" / "drift.csv"
TITLES = {"fixed": "fixed by context, KL 0.18", "sharper": "sharper, logits x 1.3"}
REMEDIES = ("no weight", "token weight", "sequence weight", "centred score")
COLUMNS = ("entropy", "reward")


@cache
def config(observe_every: int = 6) -> FlowConfig:
    """The study's config, observed more often."""
    words = ["--training.observe_every", str(observe_every), "--training.variance", "false"]
    return load_config(ROOT / "configs" / "flow" / "drift.yaml", words)


def run(of: FlowConfig, number: int, error: ErrorBlock, remedy: str) -> Trajectory:
    """One exact run of the study: Adam, one update per rollout, infinite groups."""
    return run_of(of, number, error, remedy, 1, math.inf)


def kept() -> pd.DataFrame:
    """The last values of the study's runs, without those of its shorter responses."""
    return where(pd.read_csv(ENDS), length=config().problems.length)


def figure() -> Figure:
    """Entropy and reward over updates, means over the problems with 95% intervals, each labelled at its end."""
    matplotlib.rcParams |= {"font.size": 9}
    of, best = config(), float(kept()["optimum"].iloc[0])
    drawn = Figure(figsize=(8.6, 4.9), layout="constrained")
    axes = drawn.subplots(2, len(TITLES), sharex=True, sharey="row")
    for x, error in enumerate(of.errors):
        runs = [[run(of, number, error, one) for number in range(of.problems.count)] for one in REMEDIES]
        for y, name in enumerate(COLUMNS):
            means = [_line(axes[y, x], place, found, name) for place, found in enumerate(runs)]
            _name_ends(axes[y, x], [mean_U[-1] for mean_U in means], "log" if name == "entropy" else "linear", best)
        axes[0, x].set_title(f"engine error: {TITLES[error.kind]}", loc="left")
        axes[1, x].set_xlabel("updates")
        axes[1, x].axhline(best, color="#888888", lw=0.8, ls=":")
        axes[1, x].text(2, best, f"best policy {best:.3f}", va="bottom", color="#666666", fontsize=8)
    axes[0, 0].set(ylabel="entropy of pi, nats per token", xlim=(0, of.training.num_updates))
    axes[1, 0].set(ylabel="expected reward J(pi)")
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def _line(axis: Axes, place: int, found: Sequence[Trajectory], name: str) -> NDArray[np.float64]:
    """Draws a remedy's mean over its runs with its interval; the mean."""
    ranges = [interval(np.array(values_P), name) for values_P in zip(*(one[name] for one in found), strict=True)]
    ink, mean_U = PALETTE[place].line, np.array([one.mean for one in ranges])
    axis.fill_between(
        found[0].updates, [one.low for one in ranges], [one.high for one in ranges], color=ink, alpha=0.15, lw=0
    )
    axis.plot(found[0].updates, mean_U, color=ink, lw=1.6, ls=("-", "-", "--", "-.")[place])
    return mean_U


def _name_ends(axis: Axes, ends: Sequence[float], scale: str, best: float) -> None:
    """Labels with name and last value at the right edge, spread so that they do not overlap."""
    if scale == "log":
        axis.set(yscale="log", ylim=(0.03, 1.4))
    else:
        axis.set_ylim(0, 1.12 * best)
    low, high = axis.get_ylim()
    height = [log(end / low) / log(high / low) if scale == "log" else (end - low) / (high - low) for end in ends]
    # In percent of the axis: at least 8.5 apart, within 3 to 100.
    for place, at in enumerate(spread([100 * h for h in height], 8.5, 3.0, 100.0)):
        style = {"color": PALETTE[place].text, "fontsize": 8, "va": "center", "annotation_clip": False}
        axis.annotate(f"{REMEDIES[place]} {ends[place]:.3f}", (1.02, at / 100), xycoords="axes fraction", **style)


def main() -> None:
    """Draws the picture."""
    PICTURE.write_text(svg(figure()), encoding="utf-8")


if __name__ == "__main__":
    main()
