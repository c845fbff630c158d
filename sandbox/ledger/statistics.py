"""Effects over seeds, and the verdict on a prediction: paired Student intervals, two-sided tests, Holm's correction.

Two arms share their seeds, hence their prompts, initial weights and streams, so an effect is a mean of differences
within a seed. With n = 5 a percentile bootstrap covers far less than it says; Student's t is exact for normal ones. It
is far off where most seeds tie and a rare one falls by much: see `Effect.fall`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Expected = Literal["more", "less", "same", "at_most"]
"""What a prediction says of the effect e and its margin m >= 0: e > m, e < -m, |e| < m, or e < m."""

Word = Literal["reproduced", "not reproduced", "opposite", "inconclusive", "not applicable"]
"""The last one: the event of which something is predicted did not happen."""

ALPHA = 0.05
"""Level of the verdicts, over the whole ledger."""


@dataclass(frozen=True)
class Effect:
    """A mean over n seeds, its standard error, and its 95% Student interval [low, high], in the measure's unit.

    fall: how far one seed may lie from the others, where a rare event moves a seed so far and most have none (1 for
    the share of a run before it collapses). A true mean at a distance d from the one seen may then be due to one seed
    in fall / d, and n seeds show none of those with probability (1 - d / fall)^n: no p is below that. Without a `fall`,
    where all seeds agree to the bit, there is no spread to go by, and a p is that of the sign test, 2^-n.
    """

    n: int
    mean: float
    error: float
    low: float
    high: float
    fall: float | None = None

    def p_above(self, bound: float) -> float:
        """One-sided p of the hypothesis that the true effect is at most `bound`: small where it is above."""
        return self._p(self.mean - bound)

    def p_below(self, bound: float) -> float:
        """One-sided p of the hypothesis that the true effect is at least `bound`: small where it is below."""
        return self._p(bound - self.mean)

    def _p(self, distance: float) -> float:
        """One-sided p of the hypothesis that the true mean lies this far, or farther, to the other side."""
        if distance <= 0 and self.error == 0.0:
            return 1.0
        unseen = 0.0 if self.fall is None else (1.0 - min(1.0, max(0.0, distance) / self.fall)) ** self.n
        if self.error == 0.0:
            return 0.5**self.n if self.fall is None else unseen
        return max(unseen, float(stats.t.sf(distance / self.error, self.n - 1)))


def effect(differences: Sequence[float], fall: float | None = None) -> Effect:
    """The mean of one number a seed, mean +- t_{0.975, n-1} s / sqrt(n); ValueError for fewer than 2 or non-finite."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        raise ValueError(f"differences: expected at least 2 seeds, got {len(values)}")
    if not np.isfinite(values).all():
        raise ValueError(f"differences: expected finite numbers, got {differences}")
    n, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(n))
    if error <= 1e-12 * abs(mean):  # what rounding leaves of equal differences
        error = 0.0
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return Effect(n, mean, error, mean - half, mean + half, fall)


@dataclass(frozen=True)
class RatioOfMeans(Effect):
    """log(mean of a / mean of b) over n pairs (a, b), by Fieller's method.

    That the ratio is above rho is tested as mean(a - rho b) > 0, which holds where single b are 0; the interval is of
    the rho > 0 that the two-sided test at 5% keeps, so it may reach to 0 or without end: -inf or inf on this scale.
    """

    pairs: tuple[tuple[float, float], ...] = ()

    def p_above(self, bound: float) -> float:
        return self._contrast(bound).p_above(0.0)

    def p_below(self, bound: float) -> float:
        return self._contrast(bound).p_below(0.0)

    def _contrast(self, bound: float) -> Effect:
        return effect([a - math.exp(bound) * b for a, b in self.pairs])


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> RatioOfMeans:
    """log(mean a / mean b) with Fieller's interval; ValueError where a mean is not above 0, or for fewer than 2."""
    values = np.asarray(pairs, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise ValueError(f"pairs: expected at least 2 seeds, got {n}")
    a, b = values.mean(axis=0)
    if not (a > 0 and b > 0):
        raise ValueError(f"pairs: expected means above 0, got {a:g} and {b:g}")
    (aa, ab), (_, bb) = np.cov(values.T) / n
    t2 = stats.t.ppf(0.975, n - 1) ** 2
    # (a - rho b)^2 <= t^2 (aa - 2 rho ab + rho^2 bb), a quadratic in rho that rho = a / b satisfies
    square, linear, constant = b * b - t2 * bb, a * b - t2 * ab, a * a - t2 * aa
    root = math.sqrt(max(0.0, linear * linear - square * constant))
    if square > 0:
        low, high = (linear - root) / square, (linear + root) / square
    else:  # b may be 0: no upper end; a lower one where a is not 0
        low, high = (constant / (linear + root) if constant > 0 and linear + root > 0 else 0.0), math.inf
    error = math.sqrt(max(0.0, aa / a**2 - 2 * ab / (a * b) + bb / b**2))
    ends = (math.log(low) if low > 0 else -math.inf, math.log(high))
    return RatioOfMeans(n, math.log(a / b), error, *ends, pairs=tuple((float(x), float(y)) for x, y in values))


def decisive_p(found: Effect, expected: Expected, margin: float) -> float:
    """The p that Holm's correction ranks: of the two-sided test at the bound that parts yes from no, in [0, 1].

    more, less, at_most: H0 e = +-m. same: twice the less of the equivalence test (both |e| bounds, the larger p) and
    the test that e lies outside.
    """
    yes, no = _sides(found, expected, margin)
    return min(1.0, 2.0 * min(yes, no))


def verdict(found: Effect, expected: Expected, margin: float, adjusted_p: float) -> Word:
    """The word for an effect whose decisive p is `adjusted_p` after correction.

    inconclusive where it is not below ALPHA. Else the side on which the effect lies decides; `opposite` is an effect
    that is, at the level of its own test, beyond the margin on the other side (more and less only).
    """
    if adjusted_p >= ALPHA:
        return "inconclusive"
    yes, no = _sides(found, expected, margin)
    if yes < no:
        return "reproduced"
    beyond = {"more": found.p_below(-margin), "less": found.p_above(margin)}.get(expected, 1.0)
    return "opposite" if 2.0 * beyond < ALPHA else "not reproduced"


def _sides(found: Effect, expected: Expected, margin: float) -> tuple[float, float]:
    """One-sided p's: small first where the prediction holds, small second where it fails."""
    if margin < 0 or (expected == "same" and margin == 0):
        raise ValueError(f"margin: expected {'more than' if expected == 'same' else 'at least'} 0, got {margin}")
    match expected:
        case "more":
            return found.p_above(margin), found.p_below(margin)
        case "less":
            return found.p_below(-margin), found.p_above(-margin)
        case "at_most":
            return found.p_below(margin), found.p_above(margin)
        case "same":
            inside = max(found.p_below(margin), found.p_above(-margin))
            return inside, min(found.p_above(margin), found.p_below(-margin))
    raise ValueError(f"expected: one of more, less, same, at_most; got {expected!r}")


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p's, in the order given: max over ranks j <= i of min(1, (m - j + 1) p_(j)).

    The chance of any false rejection among the m is at most the level at which the adjusted ones are read.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


__all__ = ["ALPHA", "Effect", "Expected", "Word", "decisive_p", "effect", "holm", "ratio_of_means", "verdict"]
