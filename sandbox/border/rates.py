"""The border and the learning rate: the runs at half the rate, and the power of the rate that they ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import optimize

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.branches import REMEDIES as WORDS
from sandbox.border.fit import RATED, chances, expected, fit_all, known
from sandbox.border.study import interval, paragraph
from sandbox.border.table import where

NUMBER = "KL x N"

GAP = "r0.5"
ASKED = ((GAP, "none"), (GAP, "tis"), (GAP, "R3"), ("exact", "none"))
"""The engines and remedies that have runs at both rates."""

REMEDIES = """## Half the rate

Do the remedies do at half the learning rate what they do at the map's own? Runs of GRPO at router noise 0.5 or with an
exact engine; the accuracy is the mean over the run, with its 95% interval.
"""

LEVEL = 0.05
"""A power of the rate is refuted if the runs at half the rate collapse so seldom with at most this probability."""


def counted(slowed: pd.DataFrame) -> pd.DataFrame:
    """The runs at half the rate to which the border applies: with a gap, and without a remedy."""
    return known(where(slowed, remedy="none"))


def least_power(unaided: pd.DataFrame, slowed: pd.DataFrame) -> float:
    """The least power p >= 0 at which KL x N x rate^p allows as few collapses at half the rate as there are.

    P(collapse) is that of the fit to the `unaided` runs at the full rate, x divided by 2^p. p is where the mean number
    of collapses has a probability of LEVEL for at most the actual count; runs count as independent, and the count's
    distribution as Poisson's binomial. 0 if KL x N itself is not refuted.
    """
    own = counted(slowed)
    count = int(own["collapsed"].to_numpy(dtype=float).sum())
    ratio = _ratio(unaided, slowed)

    def excess(power: float) -> float:
        return at_most(count, chances(NUMBER, unaided, own, shift=power * math.log(ratio))) - LEVEL

    if excess(0.0) >= 0:
        return 0.0
    return optimize.root_scalar(excess, bracket=(0.0, 50.0)).root


def at_most(count: int, shares: np.ndarray) -> float:
    """P(at most `count` of independent events with these probabilities), by convolution."""
    found = np.ones(1)
    for share in shares:
        found = np.convolve(found, (1.0 - share, share))
    return float(found[: count + 1].sum())


def _ratio(unaided: pd.DataFrame, slowed: pd.DataFrame) -> float:
    """The learning rate of the slower runs over that of the others."""
    (rate,), (slower,) = (table["rate"].unique() for table in (unaided, slowed))
    return float(slower / rate)


def markdown(unaided: pd.DataFrame, slowed: pd.DataFrame) -> str:
    """The paragraph on half the rate; empty without such runs."""
    own = counted(slowed)
    if own.empty:
        return ""
    count, ratio = int(own["collapsed"].to_numpy(dtype=float).sum()), math.log(_ratio(unaided, slowed))
    degrees = " and ".join(", ".join(str(n) for n in sorted(own["N"].unique())).rsplit(", ", 1))
    asked = [float(chances(NUMBER, unaided, own, shift=power * ratio).sum()) for power in (1, 2)]
    explained = {one.name: one for one in fit_all(pd.concat([unaided, own]), [NUMBER, *RATED], num_draws=0)}
    fits = ", ".join(f"{number(one.null - one.deviance)} by `{name}`" for name, one in sorted(explained.items()))
    slower = number(float(own["rate"].iloc[0]))
    return paragraph(
        "**Half the rate.** x* holds at its learning rate alone.",
        f"At {slower} (router noise 0.5, N = {degrees}) {count} of {len(own)} runs collapse, where `KL x N` alone "
        f"expects {expected(NUMBER, unaided, own):.1f}.",
        f"With the rate as a factor the number expects {asked[0]:.1f}, with its square {asked[1]:.1f}; a power below "
        f"{number(least_power(unaided, slowed))} is refuted at {LEVEL:.0%}, at the fitted curve.",
        f"The deviance explained, of the runs at both rates: {fits}.",
        "With 400 updates each, the slower runs also go less far ([longer ones](#ten-times-the-updates)).",
        "[Remedies there](border-tables.md#half-the-rate)." if _has_remedies(slowed) else "",
    )


def remedies(grpo: pd.DataFrame, slowed: pd.DataFrame) -> str:
    """The section of docs/border-tables.md: accuracy by N and remedy at both rates, and what a remedy gains at half the
    rate; empty without runs under a remedy there. `grpo`: the runs at the map's rate."""
    if not _has_remedies(slowed):
        return ""
    degrees = sorted(int(n) for n in slowed["N"].unique())
    lines = []
    for n, (gap, remedy) in itertools.product(degrees, ASKED):
        own, at_full = (where(table, gap=gap, remedy=remedy, N=n) for table in (slowed, grpo))
        if len(own):
            words = "exact engine" if gap == "exact" else WORDS[remedy]
            count = int(own["collapsed"].to_numpy(dtype=float).sum())
            lines.append((str(n), words, f"{count} of {len(own)}", _accuracy(own), _accuracy(at_full)))
    titles = ("N", "run", "collapsed", "accuracy, half the rate", "accuracy, the map's rate")
    said = [
        f"Within a seed {WORDS[remedy]} changes the accuracy at half the rate by {changes}."
        for remedy in ("tis", "R3")
        if (changes := _changes(slowed, remedy, degrees))
    ]
    return f"{REMEDIES}\n{markdown_table(titles, lines)}\n{paragraph(*said)}"


def _has_remedies(slowed: pd.DataFrame) -> bool:
    return {remedy for _, remedy in ASKED} <= set(slowed["remedy"])


def _accuracy(own: pd.DataFrame) -> str:
    return interval(own["area"].to_list(), 3)


def _changes(slowed: pd.DataFrame, remedy: str, degrees: Sequence[int]) -> str:
    """The mean difference of a remedy's accuracy from no remedy's, by N, over the seeds that both have, in words."""
    said = []
    for n in degrees:
        own, none = (where(slowed, gap=GAP, remedy=one, N=n).set_index("seed")["area"] for one in (remedy, "none"))
        if len(differences := (own - none).dropna()) > 1:
            said.append(f"{interval(differences.to_list(), 3)} at N = {n}")
    return ", ".join(said)


__all__ = ["at_most", "counted", "least_power", "markdown", "remedies"]
