"""One number for the border: logistic regressions of collapse on candidate numbers.

A candidate x is known before training: it depends on N and on the engine gap of the initial model. P(collapse) =
1 / (1 + exp(-(a + b log x))); the border is x* = exp(-a / b), where half of the runs collapse. The best candidate has
the largest likelihood; the page shows all of them, and how often each is the best of a bootstrap's draws of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import special, stats

Numbers = Float[np.ndarray, " runs"]
Draws = Float[np.ndarray, " draws"]
Weights = Float[np.ndarray, "draws runs"]
"""The number of times that each draw has each run."""

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

RATED: Mapping[str, Callable[[Mapping[str, Numbers]], Numbers]] = {
    "KL x N x rate": lambda r: r["kl"] * r["N"] * r["rate"],
    "KL x N x rate^2": lambda r: r["kl"] * r["N"] * r["rate"] ** 2,
}
"""Candidates with the learning rate, for runs at more than one: at a single rate each of them is KL x N."""

RIDGE = 1e-2
"""Penalty on b^2 / 2: without it the likelihood has no maximum if a candidate separates the runs completely."""

MOST_STEPS = 100
FLAT = 1e-10
"""The largest number of Newton steps, whose convergence is quadratic, and the gradient per run at which they end."""

ALIKE = 2.0
"""Numbers whose deviances differ by less are called equally good: their likelihoods have a ratio below e."""


@dataclass(frozen=True)
class BorderFit:
    """A candidate's regression: its deviance, the area under its ROC curve, and the border x* with a 95% interval.

    deviance: -2 log likelihood, in [0, inf); less is better, and `null` is that without a candidate. auc: share of
    pairs of a collapsed and another run that x orders correctly, in [0, 1]. The interval is a percentile bootstrap over
    seeds; num_best: draws, the same for all candidates, in which this one has the least deviance.
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
    num_best: int


def fit_all(runs: pd.DataFrame, names: Sequence[str] | None = None, num_draws: int = 200) -> list[BorderFit]:
    """A BorderFit per candidate, the least deviance first; ValueError if no run or every run collapsed.

    `runs` has the columns of `table.runs`; runs with an exact engine, whose gap has no logarithm, are left out.
    """
    found = comparable(runs)
    if not 0 < found["collapsed"].to_numpy(dtype=float).sum() < len(found):
        raise ValueError(f"runs: expected some that collapsed and some that did not, got {len(found)} runs of one kind")
    names = list(names or CANDIDATES)
    draws = _draws(found, num_draws)
    drawn = {name: _of_draws(name, found, draws) for name in names}
    deviances = np.array([own for _, own in drawn.values()])
    counts = np.bincount(deviances.argmin(axis=0), minlength=len(names))
    fits = [_fit(name, found, drawn[name][0], int(n)) for name, n in zip(names, counts, strict=True)]
    return sorted(fits, key=lambda one: one.deviance)


def alike(fits: Sequence[BorderFit]) -> list[BorderFit]:
    """The fits that are as good as the best one, to ALIKE, the best first."""
    least = min(one.deviance for one in fits)
    return sorted((one for one in fits if one.deviance - least < ALIKE), key=lambda one: one.deviance)


def expected(name: str, unaided: pd.DataFrame, runs: pd.DataFrame) -> float:
    """The expected number of collapses among `runs` by the regression on the `unaided` ones, in [0, len(runs)].

    x is that of each run's own first step: under R3 the trainer replays mu's experts there already.
    """
    return float(chances(name, unaided, runs).sum())


def chances(name: str, unaided: pd.DataFrame, runs: pd.DataFrame, shift: float = 0.0) -> Numbers:
    """P(collapse) of each of the known `runs` by the regression on the `unaided` ones, with `shift` added to log x."""
    a, b = logistic(*points(name, comparable(unaided)))
    x, _ = points(name, known(runs))
    return special.expit(a + b * (x + shift))


def known(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose gap has a logarithm and whose end is known."""
    found = runs.loc[(runs["kl"] > 0) & runs["collapsed"].notna()]
    assert isinstance(found, pd.DataFrame)
    return found


def comparable(runs: pd.DataFrame) -> pd.DataFrame:
    """The known runs in which every candidate has a logarithm: deviances compare on the same runs only.

    The estimate of chi2 may be negative at a small gap.
    """
    found = known(runs)
    columns = [column for column in ("f2", "chi2") if column in found]
    found = found.loc[(found[columns] > 0).all(axis=1)]
    assert isinstance(found, pd.DataFrame)
    return found


def points(name: str, runs: pd.DataFrame) -> tuple[Numbers, Numbers]:
    """log x of each run and whether it collapsed, 0 or 1."""
    wanted = [column for column in ("kl", "f2", "chi2", "length", "N", "rate") if column in runs]
    columns = {column: runs[column].to_numpy(dtype=np.float64) for column in wanted}
    return np.log({**CANDIDATES, **RATED}[name](columns)), runs["collapsed"].to_numpy(dtype=np.float64)


def _draws(runs: pd.DataFrame, num_draws: int) -> Weights:
    """The draws of a bootstrap over seeds; those whose runs all end alike are left out."""
    y = runs["collapsed"].to_numpy(dtype=np.float64)
    # Runs of one seed share an initial model, so the bootstrap draws seeds.
    groups, seeds = pd.factorize(runs["seed"].to_numpy())
    num_seeds = len(seeds)
    # A fixed seed: the page comes out the same from the same rows.
    generator = np.random.default_rng(0)
    counts = [np.bincount(generator.integers(num_seeds, size=num_seeds), minlength=num_seeds) for _ in range(num_draws)]
    drawn = np.array(counts, dtype=np.float64).reshape(num_draws, num_seeds)[:, groups]
    # Seeds whose runs all end alike have no border.
    num_collapsed = drawn @ y
    return drawn[(num_collapsed > 0) & (num_collapsed < drawn.sum(axis=1))]


def _of_draws(name: str, runs: pd.DataFrame, draws: Weights) -> tuple[Sequence[float], Draws]:
    """The border x* and the deviance of a candidate on the runs of each draw."""
    x, y = points(name, runs)
    a, b = _logistic(x, y, draws)
    return [_border(*ab) for ab in zip(a, b, strict=True)], _deviances(a, b, x, y, draws)


def _fit(name: str, runs: pd.DataFrame, borders: Sequence[float], num_best: int) -> BorderFit:
    x, y = points(name, runs)
    a, b = logistic(x, y)
    share = y.mean()
    null = -2 * len(y) * (share * math.log(share) + (1 - share) * math.log(1 - share))
    low, high = (float(end) for end in np.quantile(borders, [0.025, 0.975])) if borders else (math.nan, math.nan)
    numbers = deviance(a, b, x, y), null, auc(x, y), b, _border(a, b), low, high
    return BorderFit(name, len(y), int(y.sum()), *numbers, num_best)


def _border(a: float, b: float) -> float:
    # Within the range of exp: a nearly flat regression has its border beyond every float.
    return math.exp(min(700.0, max(-700.0, -a / b))) if b != 0 else math.nan


def logistic(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """(a, b) with the least deviance(a, b) + RIDGE b^2, of P(y = 1) = 1 / (1 + exp(-(a + b x)))."""
    a, b = _logistic(x, y, np.ones((1, len(x))))
    return float(a[0]), float(b[0])


def _logistic(x: Numbers, y: Numbers, draws: Weights) -> tuple[Draws, Draws]:
    """`logistic` of every draw: Newton's method on all at once, each step halved until the loss goes down."""
    middle = x.mean()  # centred, so that the two equations are nearly independent
    x = x - middle

    def loss(a: Draws, b: Draws) -> Draws:
        return 0.5 * _deviances(a, b, x, y, draws) + 0.5 * RIDGE * b**2

    a, b = np.zeros((2, len(draws)))
    for _ in range(MOST_STEPS):
        chance = special.expit(a[:, None] + b[:, None] * x)
        excess, spread = draws * (chance - y), draws * chance * (1 - chance)
        down_a, down_b = -excess.sum(axis=1), -excess @ x - RIDGE * b
        if max(np.abs(down_a).max(initial=0.0), np.abs(down_b).max(initial=0.0)) < FLAT * len(x):
            return a - b * middle, b
        aa, ab, bb = spread.sum(axis=1), spread @ x, spread @ x**2 + RIDGE
        step_a = (bb * down_a - ab * down_b) / (aa * bb - ab**2)
        step_b = (aa * down_b - ab * down_a) / (aa * bb - ab**2)
        before, size = loss(a, b), np.ones(len(draws))
        # Rounding may raise a loss that is at its minimum already.
        while (worse := loss(a + size * step_a, b + size * step_b) > before * (1 + 1e-12)).any():
            size[worse] /= 2
        a, b = a + size * step_a, b + size * step_b
    raise AssertionError(f"a logistic regression did not converge in {MOST_STEPS} steps")


def deviance(a: float, b: float, x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """-2 log likelihood of y in {0, 1} under P(y = 1) = 1 / (1 + exp(-(a + b x))); at least 0."""
    return float(_deviances(np.array([a]), np.array([b]), x, y, np.ones((1, len(x))))[0])


def _deviances(a: Draws, b: Draws, x: Numbers, y: Numbers, draws: Weights) -> Draws:
    logits = a[:, None] + b[:, None] * x
    # log(1 + e^logits) without overflow: a search may step far out.
    return 2 * (draws * (np.logaddexp(0.0, logits) - y * logits)).sum(axis=1)


def auc(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """The share of pairs (1, 0) of y with the larger x at 1, ties half: Mann and Whitney's U over its maximum."""
    ranks = stats.rankdata(x)
    ones = y == 1
    n1, n0 = int(ones.sum()), int((~ones).sum())
    return float((ranks[ones].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


__all__ = [
    "ALIKE", "CANDIDATES", "RATED", "RIDGE", "BorderFit", "alike", "auc", "chances", "comparable", "deviance",
    "expected", "fit_all", "known", "logistic", "points",
]  # fmt: skip
