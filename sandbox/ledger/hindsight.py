"""Power after the runs: how many seeds an inconclusive claim would need at the effects that its own runs found.

The answer says whether more seeds could decide it, or its effect lies too near its margin. Tests and POWER are those
of `power.py`, spreads those of the runs themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy import stats

from sandbox.ledger import events
from sandbox.ledger.power import (
    MOST_HOURS,
    POWER,
    SEARCHED,
    Need,
    SeedsNeeded,
    least_seeds,
    region_power,
    share_power,
    student_power,
)
from sandbox.ledger.statistics import Effect
from sandbox.ledger.verdicts import Finding, Outcome, margin_of


@dataclass(frozen=True)
class AsFound(SeedsNeeded):
    """The needs of an inconclusive claim, at the level of Holm's first step, if the truth were what its own runs found;
    `seeds` is None if SEARCHED do not suffice."""

    is_at_margin: bool
    """Whether the effect that leaves it open lies within a standard error of its margin (one-sided p above 16%)."""

    @property
    def is_beyond(self) -> bool:
        """Whether a second trial would cost more than MOST_HOURS."""
        return not self.hours <= MOST_HOURS


def as_found(one: Finding, need: Need) -> AsFound | None:
    """The needs of a claim at the effects that its runs found; None while runs are missing.

    If every estimate is on the side on which its prediction holds, all must be found to hold; else one of the others
    must be found to fail, at the level over the number of predictions.
    """
    if one.joint is None:
        return None
    outcomes = [(outcome, outcome.p) for outcome in one.applicable if outcome.p is not None]
    failing = [(outcome, p) for outcome, p in outcomes if p[0] > 0.5]
    if failing:
        level = need.level / len(outcomes)
        seeds = _found(lambda n: max(_power_as_found(outcome, n, level, holds=False) for outcome, _ in failing))
        p = min(p[1] for _, p in failing)
    else:
        seeds = _found(lambda n: min(_power_as_found(outcome, n, need.level, holds=True) for outcome, _ in outcomes))
        p = max(p[0] for _, p in outcomes)
    return AsFound(seeds, need.hours_per_seed, is_at_margin=bool(p > stats.norm.sf(1.0)))


def _found(at: Callable[[int], float]) -> int | None:
    return least_seeds(at) if at(SEARCHED) >= POWER else None


def _power_as_found(outcome: Outcome, seeds: int, level: float, holds: bool) -> float:
    """The chance that a prediction is found to hold, or to fail, with so many seeds, at the effect of its outcome."""
    margin, expected = margin_of(outcome.prediction), outcome.prediction.expected
    assert outcome.effect is not None
    # Whether the effect must be found above a bound or below it; for `same` there are two bounds.
    bounds = {"more": [(True, margin)], "less": [(False, -margin)], "at_most": [(False, margin)],
              "same": [(False, margin), (True, -margin)]}[expected]  # fmt: skip
    if holds:
        # All bounds must hold: at least 1 less the chances that each is missed.
        found = (_one_sided(outcome.effect, bound, is_above, seeds, level) for is_above, bound in bounds)
        return max(0.0, 1.0 - math.fsum(1.0 - chance for chance in found))
    # As in statistics.sides, the smaller of two p's counts twice.
    own = level / len(bounds)
    return max(_one_sided(outcome.effect, bound, not is_above, seeds, own) for is_above, bound in bounds)


def _one_sided(found: Effect, bound: float, is_above: bool, seeds: int, level: float) -> float:
    """The chance that the effect is found above (or below) the bound with so many seeds, if it is the one found."""
    if isinstance(found, events.Shares):
        k1, n1, k2, n2 = found.counts
        one, other = (size * seeds // found.n for size in (n1, n2))
        if found.number is not None:
            share, truth = found.number + bound, k1 / n1
            return share_power(one, share, truth, level) if is_above else share_power(one, 1 - share, 1 - truth, level)
        if is_above:
            return region_power(one, other, bound, level, k1 / n1, k2 / n2)
        return region_power(other, one, -bound, level, k2 / n2, k1 / n1)
    p = found.p_above(bound) if is_above else found.p_below(bound)
    if isinstance(found, events.Times) and bound == 0.0:
        # Log-rank: its statistic grows with the root of the number of runs.
        far = float(stats.norm.isf(p)) * math.sqrt(seeds / found.n)
        return float(stats.norm.sf(stats.norm.isf(level) - far))
    # The distance in standard errors, by the p of the test itself: Fieller's has its own.
    far = float(stats.t.isf(p, found.df)) * math.sqrt(seeds / found.n)
    return student_power(far, found.df * (seeds - 1) / (found.n - 1), level)


__all__ = ["AsFound", "as_found"]
