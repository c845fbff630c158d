"""The border and the learning rate: the runs at half the rate, and the power of the rate that they ask for."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import optimize

from lab.report.style import number
from sandbox.border.fit import RATED, chances, expected, fit_all, known
from sandbox.border.study import paragraph
from sandbox.border.table import where

NUMBER = "KL x N"

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
    degrees = " and ".join(str(n) for n in sorted(own["N"].unique()))
    asked = [float(chances(NUMBER, unaided, own, shift=power * ratio).sum()) for power in (1, 2)]
    explained = {one.name: one for one in fit_all(pd.concat([unaided, own]), [NUMBER, *RATED], num_draws=0)}
    fits = ", ".join(f"{number(one.null - one.deviance)} by `{name}`" for name, one in sorted(explained.items()))
    slower = number(float(own["rate"].iloc[0]))
    return paragraph(
        "**Half the rate.** x* holds at its learning rate alone.",
        f"At {slower} (router noise 0.5, N = {degrees}) {count} of {len(own)} runs collapse, where `KL x N` alone "
        f"expects {expected(NUMBER, unaided, own):.1f}.",
        f"With the rate as a factor the number expects {asked[0]:.1f}, with its square {asked[1]:.1f}; a power below "
        f"{number(least_power(unaided, slowed))} is refuted at {LEVEL:.0%}.",
        f"The deviance explained, of the runs at both rates: {fits}.",
        "With 400 updates each, the slower runs also go less far.",
    )


__all__ = ["at_most", "counted", "least_power", "markdown"]
