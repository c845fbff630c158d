"""Effects on measures that are numbers: one test per prediction, chosen from the runs themselves.

Arms share seeds, hence prompts and streams. Pairing by seed removes the effect that a seed has on all arms, and costs
degrees of freedom; in most of the sandbox's measures seeds have no such effect. So, over the arms of a claim in one
regime and one measure, on the scale of the prediction:

1. *paired* (Student, n - 1 degrees of freedom) if the seeds' intraclass correlation across arms is significantly
   above 0 (F test of the two-way layout without replication, 5%), and for measures that can only be compared within a
   pair (times on one kind of machine);
2. *Welch* otherwise (each arm has its own variance, Satterthwaite's degrees of freedom); Student's for an arm and a
   number.

A positive correlation that the F test misses makes Welch's interval too wide, never too narrow. A variance pooled over
the claim's arms would have more degrees of freedom but was rejected: runs that collapse have other spreads than runs
that do not, which 5 to 8 seeds cannot show (docs/decisions/0007 has its level: up to 13% at 5%).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from sandbox.ledger.statistics import ALPHA, Effect, Test

Column = NDArray[np.float64]
"""An arm's numbers, one per seed, in the same order for all arms; nan where a seed has none.

On the nonlinear scales `ratio` and `spread` it belongs to a side: the mean over its arms, put on the scale."""


def seeds_matter(columns: Sequence[Column]) -> bool:
    """Whether seeds have a common effect across arms, significant at ALPHA: F = MS(seeds) / MS(residual).

    It uses the seeds that all arms have; False with fewer than two arms or three such seeds, where no test exists.
    """
    table = np.stack(columns) if columns else np.empty((0, 0))
    table = table[:, np.isfinite(table).all(axis=0)] if table.size else table
    arms, seeds = table.shape
    if arms < 2 or seeds < 3:
        return False
    by_seed, by_arm, mean = table.mean(axis=0), table.mean(axis=1, keepdims=True), table.mean()
    between = arms * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
    residual = float(((table - by_seed - by_arm + mean) ** 2).sum()) / ((seeds - 1) * (arms - 1))
    if residual <= 1e-24 * max(between, 1e-300):  # only rounding is left: F would divide by 0
        return between > 0.0
    return float(special.fdtrc(seeds - 1, (seeds - 1) * (arms - 1), between / residual)) < ALPHA


def choose(columns: Sequence[Column]) -> Test:
    """The test for predictions about arms with these columns, by the module's rule."""
    return "paired" if seeds_matter(columns) else "Welch"


@dataclass(frozen=True)
class ContrastMoments:
    """Means a and b of a prediction's sides, the variances and covariance of those means, df, n and test."""

    a: float
    b: float
    aa: float
    ab: float
    bb: float
    df: float
    n: int
    test: Test


def moments(
    left: Sequence[Column], right: Sequence[Column] | float, test: Test, ratio: bool = False
) -> ContrastMoments:
    """The moments of two sides, each the mean over its arms, for the test `paired` or `Welch`.

    `right` may be a number, without a spread. `ratio`: Satterthwaite's degrees of freedom are those of a - (a / b) b.
    ValueError for a side with fewer than two seeds, or with a value that is not finite.
    """
    others = [] if isinstance(right, float | int) else list(right)
    sizes = [len(column) for column in (*left, *others)]
    if min(sizes) < 2:
        raise ValueError(f"seeds: expected at least 2, got {min(sizes)}")
    if not all(np.isfinite(column).all() for column in (*left, *others)):
        raise ValueError("seeds: expected a finite number for each")
    n = min(sizes)
    a = float(np.mean([column.mean() for column in left]))
    b = float(right) if isinstance(right, float | int) else float(np.mean([column.mean() for column in others]))
    if test == "paired":
        # A number is a column of zeros: it has neither variance nor covariance.
        other = np.mean(others, axis=0) if others else np.zeros(n)
        (aa, ab), (_, bb) = np.cov(np.mean(left, axis=0), other) / n
        return ContrastMoments(a, b, float(aa), float(ab), float(bb), n - 1.0, n, test if others else "one sample")
    # In a - (a / b) b the variance of b counts (a / b)^2 times.
    scale = (a / b) ** 2 if ratio and b else 1.0
    parts = [[float(column.var(ddof=1)) / len(column) / len(side) ** 2 for column in side] for side in (left, others)]
    scaled = [*parts[0], *(scale * part for part in parts[1])]
    # Satterthwaite's rule; without any variance every df is as good.
    bottom = sum(part**2 / (size - 1) for part, size in zip(scaled, sizes, strict=True))
    df = float(sum(scaled) ** 2 / bottom) if bottom > 0 else n - 1.0
    return ContrastMoments(a, b, math.fsum(parts[0]), 0.0, math.fsum(parts[1]), df, n, test if others else "one sample")


def difference(found: ContrastMoments, fall: float | None = None) -> Effect:
    """a - b with its 95% Student interval."""
    mean = found.a - found.b
    error = math.sqrt(max(0.0, found.aa - 2 * found.ab + found.bb))
    if error <= 1e-12 * max(abs(mean), abs(found.a)):  # rounding of equal numbers
        error = 0.0
    half = float(stats.t.ppf(0.975, found.df)) * error
    return Effect(found.n, mean, error, mean - half, mean + half, found.df, found.test, fall)


@dataclass(frozen=True)
class RatioOfMeans(Effect):
    """log(a / b), by Fieller's method.

    A ratio above rho is tested as a - rho b > 0, which is valid even if single seeds of b are 0. The interval has the
    rho > 0 that the two-sided test at 5% does not reject: it may extend to 0 or infinity, -inf or inf on this scale.
    """

    of: ContrastMoments | None = None

    def p_above(self, bound: float) -> float:
        return self._at(bound).p_above(0.0)

    def p_below(self, bound: float) -> float:
        return self._at(bound).p_below(0.0)

    def _at(self, bound: float) -> Effect:
        rho, one = math.exp(bound), self.of
        assert one is not None
        # With the degrees of freedom at the estimate, as in the interval, so that test and interval agree.
        scaled = ContrastMoments(one.a, rho * one.b, one.aa, rho * one.ab, rho**2 * one.bb, one.df, one.n, one.test)
        return difference(scaled)


def ratio_of_means(found: ContrastMoments) -> RatioOfMeans:
    """log(a / b) with Fieller's interval; ValueError if a mean is not above 0."""
    a, b, aa, ab, bb = found.a, found.b, found.aa, found.ab, found.bb
    if not (a > 0 and b > 0):
        raise ValueError(f"sides: expected means above 0, got {a:g} and {b:g}")
    t2 = float(stats.t.ppf(0.975, found.df)) ** 2
    # (a - rho b)^2 <= t^2 (aa - 2 rho ab + rho^2 bb): quadratic in rho, and true for rho = a / b
    square, linear, constant = b * b - t2 * bb, a * b - t2 * ab, a * a - t2 * aa
    root = math.sqrt(max(0.0, linear * linear - square * constant))
    if square > 0:
        low, high = (linear - root) / square, (linear + root) / square
    else:  # b may be 0: no upper end, and a lower one only if a is significantly above 0
        # The lower end is (linear - root) / square, written without its division by 0 where square is 0.
        low, high = (constant / (linear + root) if constant > 0 and linear + root > 0 else 0.0), math.inf
    error = math.sqrt(max(0.0, aa / a**2 - 2 * ab / (a * b) + bb / b**2))
    ends = (math.log(low) if low > 0 else -math.inf, math.log(high))
    return RatioOfMeans(found.n, math.log(a / b), error, *ends, found.df, found.test, None, found)


def on_scale(column: Column, scale: str) -> Column:
    """The column on a scale: itself, its logarithms (nan at or below 0), or its distances from the median."""
    if scale == "ratio":
        return np.log(np.where(column > 0, column, np.nan))
    return np.abs(column - np.nanmedian(column)) if scale == "spread" else column


__all__ = [
    "Column", "ContrastMoments", "RatioOfMeans", "choose", "difference", "moments", "on_scale", "ratio_of_means",
    "seeds_matter",
]  # fmt: skip
