"""Effects, the one-sided p's of a prediction, and Holm's correction. Effects come from contrasts.py and events.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

Expected = Literal["more", "less", "same", "at_most"]
"""The form of a prediction about the effect e and its margin m >= 0: e > m, e < -m, |e| < m, or e < m."""

Word = Literal["reproduced", "not reproduced", "opposite", "inconclusive", "not applicable"]
"""A verdict; `not applicable`: the event that the prediction is about did not happen."""

Stand = Literal["for", "against", "open"]
"""The reading of exploratory runs: the side that an uncorrected test at ALPHA finds."""

Test = Literal["Welch", "paired", "one sample", "exact", "log-rank"]
"""The test of an effect; `contrasts.py` and `events.py` choose it."""

ALPHA = 0.05
"""The level of the verdicts, over the whole ledger."""


@dataclass(frozen=True)
class Effect:
    """An estimate, its standard error, degrees of freedom and 95% interval [low, high], in the measure's unit.

    n: seeds on the side with fewer. fall: how far a rare event may move one seed from the others (1 for the share of a
    run before it collapses). A true mean at distance d from the observed one may then be due to one seed in fall / d,
    which n seeds miss with probability (1 - d / fall)^n: no p is below that. Without a `fall`, if all seeds agree to
    the bit, there is no spread, and p is that of the sign test, 2^-n.
    """

    n: int
    mean: float
    error: float
    low: float
    high: float
    df: float
    test: Test
    fall: float | None = None

    def p_above(self, bound: float) -> float:
        """One-sided p of the hypothesis that the true effect is at most `bound`: small if it is above."""
        return self._p(self.mean - bound)

    def p_below(self, bound: float) -> float:
        """One-sided p of the hypothesis that the true effect is at least `bound`: small if it is below."""
        return self._p(bound - self.mean)

    def _p(self, distance: float) -> float:
        """One-sided p of the hypothesis that the true mean is at least this far on the other side."""
        if distance <= 0 and self.error == 0.0:
            return 1.0
        unseen = 0.0 if self.fall is None else (1.0 - min(1.0, max(0.0, distance) / self.fall)) ** self.n
        if self.error == 0.0:
            return 0.5**self.n if self.fall is None else unseen
        return max(unseen, float(stats.t.sf(distance / self.error, self.df)))


def sides(found: Effect, expected: Expected, margin: float) -> tuple[float, float]:
    """One-sided p's of a prediction: the first is small if it holds, the second if it fails.

    more: e > m or e <= m; less and at_most alike. same: e is within both bounds (the larger p), or outside one of them.
    ValueError for a margin below 0, or of 0 for `same`.
    """
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
            # Outside on one of two sides: the smaller p counts twice (Bonferroni).
            return inside, min(1.0, 2.0 * min(found.p_above(margin), found.p_below(-margin)))
    raise ValueError(f"expected: one of more, less, same, at_most; got {expected!r}")


def opposite(found: Effect, expected: Expected, margin: float) -> float:
    """One-sided p that the effect is beyond the margin on the other side; 1 if there is none (same, at_most)."""
    return {"more": found.p_below(-margin), "less": found.p_above(margin)}.get(expected, 1.0)


def two_sided(holds: float, fails: float) -> float:
    """The two-sided p, in [0, 1], from the one-sided p of each side."""
    return min(1.0, 2.0 * min(holds, fails))


def stand(holds: float, fails: float) -> Stand:
    """The side that the two-sided test at ALPHA finds."""
    return "open" if two_sided(holds, fails) >= ALPHA else "for" if holds < fails else "against"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p's, in the given order: max over ranks j <= i of min(1, (m - j + 1) p_(j)).

    Rejecting those below a level keeps the chance of any false rejection among the m at or below that level.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        # Holm stops at the first hypothesis that it keeps, so no later one may have a smaller adjusted p.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


__all__ = ["ALPHA", "Effect", "Expected", "Stand", "Test", "Word", "holm", "opposite", "sides", "stand", "two_sided"]
