"""The tokens behind the gradient's peaks: R3 without gradient clipping, with and without a dual clip, update by update.

A row of the table is an update: arm, seed, its number, and its largest token (sandbox/measure/largest_token.py).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.audit.table import numbers
from lab.report.style import PALETTE, number
from sandbox.border.table import where
from sandbox.claims.border_arms import NORMS
from theory.objectives.presets.dual_clip import DualClip

PLAIN, DUAL = "R3", "R3 and dual clip"
"""The arms, by their words."""

THRESHOLD = float(NORMS["grpo"])
"""The norm at which the study clips GRPO's gradients elsewhere: a peak is an update above it."""

BOUND = DualClip.clip_ratio_c
"""The dual clip's c."""

PICTURE = """![The gradient's norm, update by update, whole and without its largest token](images/border-peaks.svg)

*The gradient's norm before each update under R3 at router noise 0.5 and N = 8, never clipped, seed {seed}. Blue: the
whole norm. Orange: without the term of one token, the largest. Gaps: no gradient. Right: the same seed with a dual
clip.*
"""


def said(found: pd.DataFrame) -> str:
    """The peaks of both arms, and how many of them one token makes, in sentences; empty without runs of both."""
    plain, dual = (where(found, arm=arm) for arm in (PLAIN, DUAL))
    if plain.empty or dual.empty:
        return ""
    norms, others = numbers(plain, "norm"), numbers(dual, "norm")
    is_peak = norms > THRESHOLD
    is_single = is_peak & (numbers(plain, "norm_without") < norms / 2)
    is_negative = is_single & (numbers(plain, "advantage") < 0)
    is_far = is_single & (numbers(plain, "logp_pi") - numbers(plain, "logp_old") > math.log(BOUND))
    return (
        f"In {plain['seed'].nunique()} runs of R3, never clipped (exploratory), {is_peak.sum()} of {len(norms)} "
        f"updates have a norm above {THRESHOLD:g}. In {is_single.sum()} of these one token has more than half of it: "
        f"without its term the norm is less than half. {is_negative.sum()} of these tokens have a negative advantage, "
        f"and {is_far.sum()} a ratio pi/old above {BOUND:g}. {_middle(plain.loc[is_single])} "
        f"On the same seeds with a dual clip {(others > THRESHOLD).sum()} of {len(others)} norms are above "
        f"{THRESHOLD:g}; the largest norm is "
        f"{number(float(others.max()))} with it and {number(float(norms.max()))} without."
    )


def _middle(single: pd.DataFrame) -> str:
    """The median probabilities of these tokens under each policy, in a sentence; empty without any."""
    if single.empty:
        return ""
    mu, old, pi = (numbers(single, name) for name in ("logp_mu", "logp_old", "logp_pi"))
    shown = [number(math.exp(float(np.median(x)))) for x in (mu, old, pi - old)]
    return f"In the median mu gives such a token {shown[0]}, old {shown[1]}, and pi {shown[2]} times that."


def picture(found: pd.DataFrame, seed: int) -> Figure:
    """The norms of a seed's updates, whole and without the largest token: a panel per arm, on one scale."""
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, arm in zip(axes, (PLAIN, DUAL), strict=True):
        own = where(found, arm=arm, seed=seed)
        for name, words, ink in (("norm", "whole gradient", 0), ("norm_without", "without one token", 1)):
            # An update without a gradient has no logarithm: a gap.
            y = np.where(numbers(own, name) > 0, numbers(own, name), math.nan)
            axis.plot(numbers(own, "update"), y, color=PALETTE[ink].line, lw=1.0, label=words)
        axis.axhline(THRESHOLD, color="#888888", lw=0.9, ls="--")
        axis.set_title(arm)
        axis.set(xlabel="update", yscale="log", ylim=(3e-2, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("norm of the gradient")
    axes[1].legend(frameon=False, fontsize=7, loc="upper right")
    return figure


def shown_seed(found: pd.DataFrame) -> int:
    """The seed of the picture: the run of R3 whose largest norm is the median of the runs'."""
    own = where(found, arm=PLAIN)
    largest = {int(seed): float(numbers(where(own, seed=seed), "norm").max()) for seed in own["seed"].unique()}
    return sorted(largest, key=lambda seed: largest[seed])[(len(largest) - 1) // 2]


def markdown(found: pd.DataFrame) -> str:
    """The picture with its caption; empty without runs."""
    return "" if found.empty else PICTURE.format(seed=shown_seed(found))


__all__ = ["BOUND", "DUAL", "PLAIN", "THRESHOLD", "markdown", "picture", "said", "shown_seed"]
