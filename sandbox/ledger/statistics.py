"""Effects, the one-sided p's of a prediction, and Holm's correction. Effects come from contrasts.py and events.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

Expected = Literal["more", "less", "same", "at_most"]
"""The form of a prediction on the effect e and its margin m >= 0: e > m, e < -m, |e| < m, or e < m."""

Word = Literal["reproduced", "not reproduced", "opposite", "inconclusive", "not applicable"]
"""The last one: the event of which something is predicted did not happen."""

Stand = Literal["for", "against", "open"]
"""The reading of runs that decide nothing: which side a test at the level finds, without any correction."""

Test = Literal["Welch", "paired", "one sample", "exact", "log-rank"]
"""The test of an effect; `contrasts.py` and `events.py` say which applies when."""

ALPHA = 0.05
"""Level of the verdicts, over the whole ledger."""


@dataclass(frozen=True)
class Effect:
    """An estimate, its standard error, degrees of freedom and 95% interval [low, high], in the measure's unit.

    n: seeds on the side that has fewer. fall: how far one seed may lie from the others, where a rare event moves a seed
    so far and most have none (1 for the share of a run before it collapses). A true mean at a distance d from the one
    seen may then be due to one seed in fall / d, and n seeds show none of those with probability (1 - d / fall)^n: no p
    is below that. Without a `fall`, where all seeds agree to the bit, there is no spread to go by, and a p is that of
    the sign test, 2^-n.
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
        return max(unseen, float(stats.t.sf(distance / self.error, self.df)))


def sides(found: Effect, expected: Expected, margin: float) -> tuple[float, float]:
    """One-sided p's of a prediction: small first where it holds, small second where it fails.

    more: e > m or e <= m; less and at_most alike. same: both |e| bounds (the larger p), or that e lies outside of
    either. ValueError for a margin below 0, or of 0 for `same`.
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
            return inside, min(1.0, 2.0 * min(found.p_above(margin), found.p_below(-margin)))
    raise ValueError(f"expected: one of more, less, same, at_most; got {expected!r}")


def opposite(found: Effect, expected: Expected, margin: float) -> float:
    """One-sided p that the effect is beyond the margin on the other side; 1 where there is none (same, at_most)."""
    return {"more": found.p_below(-margin), "less": found.p_above(margin)}.get(expected, 1.0)


def two_sided(holds: float, fails: float) -> float:
    """The p of the decision between two sides, from the one-sided p of each, in [0, 1]."""
    return min(1.0, 2.0 * min(holds, fails))


def stand(holds: float, fails: float) -> Stand:
    """The side that the two-sided test at ALPHA finds."""
    return "open" if two_sided(holds, fails) >= ALPHA else "for" if holds < fails else "against"


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


__all__ = ["ALPHA", "Effect", "Expected", "Stand", "Test", "Word", "holm", "opposite", "sides", "stand", "two_sided"]
