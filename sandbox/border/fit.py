"""One number for the border: logistic regressions of collapse on candidate numbers.

A candidate x is known before training: it depends on N and on the engine gap of the initial model. P(collapse) =
1 / (1 + exp(-(a + b log x))); the border is x* = exp(-a / b), where half of the runs collapse. The best candidate has
the largest likelihood; the page shows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import optimize, special, stats

Numbers = Float[np.ndarray, " runs"]

CANDIDATES: Mapping[str, Callable[[Mapping[str, Numbers]], Numbers]] = {
    "KL": lambda r: r["kl"],
    "N": lambda r: r["N"],
    "KL x N": lambda r: r["kl"] * r["N"],
    "sqrt(KL) x N": lambda r: np.sqrt(r["kl"]) * r["N"],
    "KL x sqrt(N)": lambda r: r["kl"] * np.sqrt(r["N"]),
    "F(2) x N": lambda r: r["f2"] * r["N"],
    "chi2 x N": lambda r: r["chi2"] * r["N"],
    "KL x length x N": lambda r: r["kl"] * r["length"] * r["N"],
}
"""The candidates, from the table of runs: KL, F(2) and chi2 per token, and response length, before training."""

RIDGE = 1e-2
"""Penalty on b^2 / 2: without it the likelihood has no maximum if a candidate separates the runs completely."""


@dataclass(frozen=True)
class BorderFit:
    """A candidate's regression: its deviance, the area under its ROC curve, and the border x* with a 95% interval.

    deviance: -2 log likelihood, in [0, inf); less is better, and `null` is that without a candidate. auc: share of
    pairs of a collapsed and another run that x orders correctly, in [0, 1]. The interval is a percentile bootstrap over
    seeds.
    """

    name: str
    num_runs: int
    num_collapsed: int
    deviance: float
    null: float
    auc: float
    slope: float
    border: float
    low: float
    high: float


def fit_all(runs: pd.DataFrame, names: Sequence[str] | None = None, num_draws: int = 200) -> list[BorderFit]:
    """A BorderFit per candidate, the least deviance first; ValueError if no run or every run collapsed.

    `runs` has the columns of `table.runs`; runs with an exact engine, whose gap has no logarithm, are left out.
    """
    found = known(runs)
    if not 0 < found["collapsed"].to_numpy(dtype=float).sum() < len(found):
        raise ValueError(f"runs: expected some that collapsed and some that did not, got {len(found)} runs of one kind")
    fits = [_fit(name, found, num_draws) for name in names or CANDIDATES]
    return sorted(fits, key=lambda one: one.deviance)


def expected(name: str, unaided: pd.DataFrame, runs: pd.DataFrame) -> float:
    """The expected number of collapses among `runs` by the regression on the `unaided` ones, in [0, len(runs)].

    x is that of each run's own first step: under R3 the trainer replays mu's experts there already.
    """
    a, b = logistic(*_points(name, known(unaided)))
    x, _ = _points(name, known(runs))
    return float((1.0 / (1.0 + np.exp(-(a + b * x)))).sum())


def known(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose gap has a logarithm and whose end is known."""
    found = runs.loc[(runs["kl"] > 0) & runs["collapsed"].notna()]
    assert isinstance(found, pd.DataFrame)
    return found


def _points(name: str, runs: pd.DataFrame) -> tuple[Numbers, Numbers]:
    columns = {column: runs[column].to_numpy(dtype=np.float64) for column in ("kl", "f2", "chi2", "length", "N")}
    return np.log(CANDIDATES[name](columns)), runs["collapsed"].to_numpy(dtype=np.float64)


def _fit(name: str, runs: pd.DataFrame, num_draws: int) -> BorderFit:
    x, y = _points(name, runs)
    a, b = logistic(x, y)
    share = y.mean()
    null = -2 * len(y) * (share * math.log(share) + (1 - share) * math.log(1 - share))
    # Runs of one seed share an initial model, so the bootstrap draws seeds.
    groups = [np.flatnonzero(runs["seed"].to_numpy() == seed) for seed in runs["seed"].unique()]
    # A fixed seed: the page comes out the same from the same rows.
    generator, borders = np.random.default_rng(0), []
    for _ in range(num_draws):
        drawn = np.concatenate([groups[i] for i in generator.integers(len(groups), size=len(groups))])
        # Seeds whose runs all end alike have no border.
        if 0 < y[drawn].sum() < len(drawn):
            slope = logistic(x[drawn], y[drawn])
            borders.append(_border(*slope))
    low, high = np.quantile(borders, [0.025, 0.975]) if borders else (math.nan, math.nan)
    return BorderFit(
        name, len(y), int(y.sum()), deviance(a, b, x, y), null, auc(x, y), b, _border(a, b), float(low), float(high)
    )


def _border(a: float, b: float) -> float:
    # Within the range of exp: a nearly flat regression has its border beyond every float.
    return math.exp(min(700.0, max(-700.0, -a / b))) if b != 0 else math.nan


def logistic(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """(a, b) with the least deviance(a, b) + RIDGE b^2, of P(y = 1) = 1 / (1 + exp(-(a + b x)))."""
    middle = x.mean()  # centred, so that a and b are nearly uncorrelated and BFGS converges fast

    def loss(ab: np.ndarray) -> tuple[float, np.ndarray]:
        """Half of the objective and its gradient: the sums of P(y = 1) - y and of its product with x."""
        excess = special.expit(ab[0] + ab[1] * (x - middle)) - y
        gradient = np.array([excess.sum(), (excess * (x - middle)).sum() + RIDGE * ab[1]])
        return 0.5 * deviance(ab[0], ab[1], x - middle, y) + 0.5 * RIDGE * ab[1] ** 2, gradient

    a, b = optimize.minimize(loss, np.zeros(2), jac=True, method="BFGS").x
    return float(a - b * middle), float(b)


def deviance(a: float, b: float, x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """-2 log likelihood of y in {0, 1} under P(y = 1) = 1 / (1 + exp(-(a + b x))); at least 0."""
    logits = a + b * x
    # log(1 + e^logits) without overflow: a search may step far out.
    return float(2 * (np.logaddexp(0.0, logits) - y * logits).sum())


def auc(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """The share of pairs (1, 0) of y with the larger x at 1, ties half: Mann and Whitney's U over its maximum."""
    ranks = stats.rankdata(x)
    ones = y == 1
    n1, n0 = int(ones.sum()), int((~ones).sum())
    return float((ranks[ones].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


__all__ = ["CANDIDATES", "RIDGE", "BorderFit", "auc", "deviance", "expected", "fit_all", "known", "logistic"]
