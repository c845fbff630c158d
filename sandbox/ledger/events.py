"""Effects on events and their times: exact unconditional tests of two shares, and the log-rank test.

Shares (measures of kind `event`): p1 - p2 against a margin. Tables are ordered by the score statistic of Farrington and
Manning (1990), whose variance is that of the likeliest shares at the margin; p is the probability of a table at least
as extreme, maximised over the nuisance share (Chan 1998; Barnard at margin 0). It is exact for every n, and seeds that
all agree need no special rule. Against a number: binomial, with the interval of Clopper and Pearson. Several arms on a
side are counted together: the count of independent runs with unequal shares varies less than a binomial one (Hoeffding
1956), so the test is conservative.

Times (kind `time`): the log-rank test at margin 0, where runs that last are censored. An event is dated by the next
evaluation, so if two arms are evaluated at other spacings, both are dated on the wider one (`dated`): else the arm that
is evaluated more often would seem to fall earlier. With a margin, shares of the run are compared within a seed by
Student's t with the floor of `Effect.fall`: we know no other sound test at 5 to 40 seeds for a difference of means most
of whose values are 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from sandbox.ledger.contrasts import Column
from sandbox.ledger.statistics import Effect

GRID = 128
"""Number of values of the nuisance share at which p is computed; then 33 more around the largest."""


def score(n1: int, n2: int, margin: float) -> NDArray[np.float64]:
    """Farrington and Manning's statistic of p1 - p2 = margin for all (n1 + 1) (n2 + 1) tables; 0 / 0 is 0."""
    one, two = np.arange(n1 + 1)[:, None] / n1, np.arange(n2 + 1)[None, :] / n2
    theta = n2 / n1
    # The likeliest p1 with p2 = p1 - margin: the root in [0, 1] of a x^3 + b x^2 + c x + d.
    a = 1.0 + theta
    b = -(1.0 + theta + one + theta * two + margin * (theta + 2.0))
    c = margin**2 + margin * (2.0 * one + theta + 1.0) + one + theta * two
    d = -one * margin * (1.0 + margin)
    v = b**3 / (27 * a**3) - b * c / (6 * a**2) + d / (2 * a)
    u = np.sign(v) * np.sqrt(np.maximum(0.0, b**2 / (9 * a**2) - c / (3 * a)))
    # Where u is 0 the three roots coincide: any angle gives them.
    cosine = np.divide(v, u**3, out=np.zeros_like(v), where=np.abs(u) > 1e-9)
    w = (np.pi + np.arccos(np.clip(cosine, -1.0, 1.0))) / 3.0
    p1 = np.clip(2.0 * u * np.cos(w) - b / (3 * a), max(0.0, margin), min(1.0, 1.0 + margin))
    p2 = np.clip(p1 - margin, 0.0, 1.0)
    error = np.sqrt(np.maximum(0.0, p1 * (1 - p1) / n1 + p2 * (1 - p2) / n2))
    top = one - two - margin
    # A difference without a variance is infinitely far out: nothing is more extreme than such a table.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(top) < 1e-9, 0.0, top / np.where(error < 1e-9, 0.0, error))


def tail(region: NDArray[np.bool_], margin: float) -> float:
    """The largest probability, over shares with p1 - p2 = margin, of a table in the region."""
    low, high = max(0.0, -margin), min(1.0, 1.0 - margin)
    n1, n2 = (size - 1 for size in region.shape)

    def at(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        first, second = _chances(n1, np.clip(shares + margin, 0.0, 1.0)), _chances(n2, shares)
        return ((first @ region) * second).sum(axis=1)

    # The probability may have several maxima in the share: a grid first, then a finer one around its best point.
    grid = np.linspace(low, high, GRID)
    found = at(grid)
    best, width = grid[found.argmax()], (high - low) / (GRID - 1)
    near = np.linspace(max(low, best - width), min(high, best + width), 33)
    return float(min(1.0, max(found.max(), at(near).max())))


def _chances(number: int, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Binomial probabilities of 0 to `number` events, a row per share."""
    k = np.arange(number + 1)
    return special.comb(number, k) * shares[:, None] ** k * (1.0 - shares[:, None]) ** (number - k)


@functools.lru_cache(maxsize=65536)
def exact_p(k1: int, n1: int, k2: int, n2: int, margin: float) -> float:
    """One-sided p of p1 - p2 <= margin from k1 of n1 and k2 of n2: small if p1 - p2 is above the margin."""
    if margin >= 1.0:  # no difference of shares is above 1
        return 1.0
    if margin < -1.0:  # every difference is above such a margin
        return 0.0
    found = score(n1, n2, margin)
    # The tolerance keeps ties, which rounding separates, in the region.
    return tail(found >= found[k1, k2] - 1e-9, margin)


@dataclass(frozen=True)
class Shares(Effect):
    """p1 - p2 of two counts, or p1 - a number; the interval has the margins that neither one-sided test rejects."""

    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Events and runs of the treatment, then of the control."""
    number: float | None = None

    def p_above(self, bound: float) -> float:
        k1, n1, k2, n2 = self.counts
        if self.number is None:
            return exact_p(k1, n1, k2, n2, round(bound, 12))
        share = self.number + bound
        # P(K >= k1): sf alone is P(K > k1). A bound that no share can be below counts as a share of 0.
        return float(stats.binom.sf(k1 - 1, n1, max(share, 0.0))) if share < 1.0 else 1.0

    def p_below(self, bound: float) -> float:
        k1, n1, k2, n2 = self.counts
        if self.number is None:
            return exact_p(k2, n2, k1, n1, round(-bound, 12))
        share = self.number + bound
        return float(stats.binom.cdf(k1, n1, min(share, 1.0))) if share > 0.0 else 1.0


def shares(left: Column, right: Column | float) -> Shares:
    """The effect between two sides of 0s and 1s, or a side and a number; ValueError for other values."""
    every = np.concatenate([left, right]) if isinstance(right, np.ndarray) else left
    if not np.isin(every, (0.0, 1.0)).all():
        raise ValueError("event: expected 0 or 1 for every run")
    number = None if isinstance(right, np.ndarray) else float(right)
    k1, n1 = int(left.sum()), len(left)
    k2, n2 = (int(right.sum()), len(right)) if isinstance(right, np.ndarray) else (0, n1)
    mean = k1 / n1 - (k2 / n2 if number is None else number)
    first, second = k1 / n1, (k2 / n2 if number is None else 0.0)
    error = float(np.sqrt(first * (1 - first) / n1 + second * (1 - second) / n2))
    low, high = _ends(k1, n1, k2, n2, number)
    return Shares(min(n1, n2), mean, error, low, high, np.inf, "exact", None, (k1, n1, k2, n2), number)


@functools.lru_cache(maxsize=65536)
def _ends(k1: int, n1: int, k2: int, n2: int, number: float | None) -> tuple[float, float]:
    # Only its p's are used: they need neither the estimate nor the interval.
    bare = Shares(n1, 0.0, 0.0, 0.0, 0.0, np.inf, "exact", None, (k1, n1, k2, n2), number)
    mean = k1 / n1 - (k2 / n2 if number is None else number)
    # Two shares differ by -1 to 1; of one share and a number, the share is in [0, 1].
    least, most = (-1.0, 1.0) if number is None else (-number, 1.0 - number)
    return _end(bare.p_above, least, mean), _end(bare.p_below, most, mean)


def _end(p: Callable[[float], float], outer: float, inner: float) -> float:
    """The end of the interval between `outer` and the estimate: the bound at which p reaches 2.5%, by bisection."""
    if p(outer) > 0.025:
        return outer
    # To a thousandth of the widest range, 2; the outer side is returned, so that no interval is too narrow.
    for _ in range(11):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if p(middle) <= 0.025 else (outer, middle)
    return outer


@dataclass(frozen=True)
class Times(Effect):
    """A difference of mean times; p at 0 is the log-rank test's, at other bounds Student's with the floor."""

    later: float = 1.0
    """One-sided p that the treatment lasts longer: small if it does."""
    sooner: float = 1.0

    def p_above(self, bound: float) -> float:
        return self.later if bound == 0.0 else super().p_above(bound)

    def p_below(self, bound: float) -> float:
        return self.sooner if bound == 0.0 else super().p_below(bound)


def dated(column: Column, spacing: float) -> Column:
    """Times rounded up to multiples of the spacing, still below 1 if they were; a run that lasts keeps its 1."""
    # The tolerance keeps a date that is on the grid but for rounding.
    ends = np.ceil(column / spacing - 1e-9) * spacing
    return np.where(column < 1.0, np.minimum(ends, np.nextafter(1.0, 0.0)), column)


def times(left: Column, right: Column, student: Effect) -> Times:
    """The effect on times in [0, 1], 1 for a run that lasts to its end; `student` has the difference of means.

    It uses Mantel's statistic with its hypergeometric variance; without any event, or if all runs fall at one date,
    both p's are 1.
    """
    later, sooner = 1.0, 1.0
    if (left < 1.0).any() or (right < 1.0).any():
        one, two = (stats.CensoredData(uncensored=x[x < 1.0], right=x[x >= 1.0]) for x in (left, right))
        with np.errstate(invalid="ignore"):  # 0 / 0 without a variance
            z = float(stats.logrank(one, two).statistic)  # above 0 if the first side has more events than expected
        if np.isfinite(z):
            later, sooner = float(stats.norm.cdf(z)), float(stats.norm.sf(z))
    numbers = (student.n, student.mean, student.error, student.low, student.high, student.df)
    return Times(*numbers, "log-rank", student.fall, later, sooner)


__all__ = ["Shares", "Times", "dated", "exact_p", "score", "shares", "tail", "times"]
