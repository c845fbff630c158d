"""The tokens behind the gradient's peaks: R3 without gradient clipping, with and without a dual clip, update by update.

A row of the table is an update: arm, seed, its number, and its largest token (sandbox/measure/largest_token.py).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.report.style import PALETTE, number
from sandbox.border.table import where

PLAIN, DUAL = "R3", "R3 and dual clip"
"""The arms, by their words."""

THRESHOLD = 1.0
"""The norm at which the study clips GRPO's gradients elsewhere: a peak is an update above it."""

BOUND = 3.0
"""The dual clip's c."""

PICTURE = """![The gradient's norm, update by update, whole and without its largest token](images/border-peaks.svg)

*The gradient's norm before each update under R3 at router noise 0.5 and N = 8, never clipped, seed {seed}. Blue: the
whole norm. Orange: without the term of one token, the largest. Right: the same seed with a dual clip.*
"""


def said(found: pd.DataFrame) -> str:
    """The peaks of both arms, and how many of them one token makes, in sentences; empty without runs of both."""
    plain, dual = (where(found, arm=arm) for arm in (PLAIN, DUAL))
    if plain.empty or dual.empty:
        return ""
    peaks, others = _peaks(plain), _peaks(dual)
    above = int((peaks["ratio"] > BOUND).sum())
    single, negative = int(_is_single(peaks).sum()), int((_is_single(peaks) & (peaks["advantage"] < 0)).sum())
    return (
        f"In {plain['seed'].nunique()} runs of R3, never clipped (exploratory), {len(peaks)} of {len(plain)} updates "
        f"have a norm above {THRESHOLD:g}. In {single} of these one token has more than half of it; {negative} of "
        f"these tokens have a negative advantage, and pi/old is above {BOUND:g} at {above} of the peaks' largest "
        f"tokens. On the same seeds with a dual clip {len(others)} of {len(dual)} norms are above {THRESHOLD:g}; the "
        f"largest is {number(float(dual['norm'].max()))}, {number(float(plain['norm'].max()))} without."
    )


def _peaks(runs: pd.DataFrame) -> pd.DataFrame:
    """The updates with a norm above THRESHOLD, with the `ratio` pi/old of their largest token."""
    found = runs.loc[runs["norm"] > THRESHOLD]
    assert isinstance(found, pd.DataFrame)
    return found.assign(ratio=np.exp(found["logp_pi"] - found["logp_old"]))


def _is_single(peaks: pd.DataFrame) -> pd.Series:
    """Whether the gradient without the largest token has less than half of the norm."""
    return peaks["norm_without"] < peaks["norm"] / 2


def picture(found: pd.DataFrame, seed: int) -> Figure:
    """The norms of a seed's updates, whole and without the largest token: a panel per arm, on one scale."""
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, arm in zip(axes, (PLAIN, DUAL), strict=True):
        own = where(found, arm=arm, seed=seed)
        axis.plot(own["update"], own["norm"], color=PALETTE[0].line, lw=1.0, label="whole gradient")
        axis.plot(own["update"], own["norm_without"], color=PALETTE[1].line, lw=0.9, label="without one token")
        axis.axhline(THRESHOLD, color="#888888", lw=0.9, ls="--")
        axis.set_title(arm)
        axis.set(xlabel="update", yscale="log", ylim=(1e-2, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("norm of the gradient")
    axes[0].legend(frameon=False, fontsize=7, loc="lower left")
    return figure


def shown_seed(found: pd.DataFrame) -> int:
    """The seed of the picture: the run of R3 whose largest norm is the median of the runs'."""
    largest = where(found, arm=PLAIN).groupby("seed")["norm"].max().sort_values()
    return int(largest.index[(len(largest) - 1) // 2])


def markdown(found: pd.DataFrame) -> str:
    """The picture with its caption; empty without runs."""
    return "" if found.empty else PICTURE.format(seed=shown_seed(found))


__all__ = ["BOUND", "DUAL", "PLAIN", "THRESHOLD", "markdown", "picture", "said", "shown_seed"]
