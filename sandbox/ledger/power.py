"""Power before the runs: the number of seeds that a claim needs at home, from recorded spreads, and their cost.

A claim is reproduced if all its predictions hold, so the least powerful one counts. Each should be found to hold with a
chance of 80% at the level of Holm's first step, ALPHA over twice the number of claims to be decided (two-sided), if in
truth

- `more`, `less` of a number: the effect is the `planned` one, else twice the margin; one residual SD if that is 0;
- `same`, `at_most` of a number: it is the `planned` one, else 0 (one residual SD inside a margin of 0);
- `more`, `less` of an event: the difference is the `planned` one, else the margin plus half of the runs, at most all,
  centred at one half; against a number, the planned share, else all of the runs or none; `same`, `at_most`: one half
  on both sides, or the planned difference centred at one half; none of the runs against a number;
- a time at margin 0: events come at four times the rate, so that 3/4 and 29% of the runs fall.

Numbers: noncentral t with the degrees of freedom of the prediction's own arms, or of the pairs where seeds are paired.
Events: the exact test's own region. Times: Schoenfeld's formula (where it gives 82%, simulated runs have 78%). The SD
is that of `spreads.py`. A second trial is planned at what the first one found, if its file says so (`Claim.planned`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from sandbox.ledger import events
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import Claim, Prediction, Row
from sandbox.ledger.spreads import ResidualSpread, Spreads
from sandbox.ledger.statistics import ALPHA
from sandbox.ledger.verdicts import margin_of

POWER = 0.8
LEAST = 5
"""The smallest number of seeds: a spread recorded elsewhere may differ here."""
MOST = 40
"""A first trial that needs more seeds is out of reach: its cost is shown, and it is not run."""
MOST_HOURS = 3.0
"""A second trial, planned at the effect that the first one found, has as many seeds as it needs, at this cost at most,
in hours of one thread."""
SEARCHED = 4096
"""The largest number of seeds in the search."""


@dataclass(frozen=True)
class SeedsNeeded:
    """The seeds for POWER, None if unknown or beyond the search, and hours of one thread for the runs of a seed (nan
    without a row)."""

    seeds: int | None
    hours_per_seed: float

    @property
    def hours(self) -> float:
        """Hours of one thread for the needed seeds; nan if unknown."""
        return math.nan if self.seeds is None else self.seeds * self.hours_per_seed


@dataclass(frozen=True)
class Need(SeedsNeeded):
    """The needs of a claim at home, and the prediction that needs the most seeds, with its spread; of several, the
    least powerful with so many. `plans`: every prediction with its spread."""

    claim: Claim
    limiting: Prediction
    spread: ResidualSpread
    level: float
    plans: tuple[tuple[Prediction, ResidualSpread], ...]

    @property
    def is_out_of_reach(self) -> bool:
        """Whether it would need more than MOST seeds, and has no deciding seeds."""
        return self.seeds is not None and self.seeds > MOST and not self.claim.deciding()

    def power(self, seeds: int) -> float:
        """The power of its least powerful prediction with so many seeds, in [0, 1]; nan without a spread."""
        if seeds < 2:
            return math.nan
        found = [power(one, spread.sd, seeds, self.level, spread.is_paired) for one, spread in self.plans]
        return math.nan if any(map(math.isnan, found)) else min(found)


def level_of(num_claims: int) -> float:
    """The one-sided level of a prediction at Holm's first step over so many claims."""
    return ALPHA / (2 * num_claims)


def distance(prediction: Prediction, sd: float) -> float:
    """The assumed distance of a number's effect beyond (or within) its margin, on the prediction's scale."""
    margin = margin_of(prediction)
    if prediction.planned is not None:
        effect = _planned(prediction)
        within = {"at_most": margin - effect, "same": margin - abs(effect)}
        return within.get(prediction.expected, abs(effect) - margin)
    return margin if margin > 0 else sd


def _planned(prediction: Prediction) -> float:
    assert prediction.planned is not None
    return math.log(prediction.planned) if prediction.is_factor else prediction.planned


def power(prediction: Prediction, sd: float, seeds: int, level: float, is_paired: bool = False) -> float:
    """The chance that a true prediction is found to hold with so many seeds, in [0, 1]; nan without a spread.

    `is_paired`: sd is that of the difference within a seed.
    """
    kind, sides = prediction.measure.kind, prediction.sides
    if kind == "event":
        return _event_power(prediction, seeds, level)
    if kind == "time" and prediction.margin == 0.0:
        # Events on both sides: 3/4 of the runs, and 1 - (1/4)^(1/4) = 29% at a quarter of the rate.
        fell = seeds * (0.75 + 1.0 - 0.25**0.25)
        return float(stats.norm.sf(stats.norm.isf(level) - math.log(4.0) * math.sqrt(fell) / 2.0))
    if margin_of(prediction) == 0.0 and kind == "number" and prediction.planned is None:
        sd = 1.0  # the effect is assumed in units of it
    if not math.isfinite(sd):
        return math.nan
    if kind == "time" and (1.0 - prediction.margin) ** seeds > level:
        return 0.0  # the floor of Effect.fall
    if sd == 0.0:
        return float(0.5**seeds < level)  # equal seeds: the sign test of `Effect`
    arms = [len(side) for side in sides if side]
    error = sd * math.sqrt((1.0 if is_paired else sum(1.0 / number for number in arms)) / seeds)
    df = float((1 if is_paired else sum(arms)) * (seeds - 1))
    near = distance(prediction, sd)
    found = student_power(near / error, df, level)
    if prediction.expected != "same":
        return found
    # Both one-sided tests are needed: 1 less the chances that either is missed, at least.
    far = 2.0 * margin_of(prediction) - near if prediction.planned is not None else near
    return max(0.0, found + student_power(far / error, df, level) - 1.0)


def student_power(far: float, df: float, level: float) -> float:
    """The chance that Student's t finds an effect that is `far` standard errors beyond its bound."""
    quantile = float(stats.t.isf(level, df))
    return float(stats.nct.sf(quantile, df, far)) if far < 30.0 + quantile else 1.0  # scipy's nct gives nan far out


def _event_power(prediction: Prediction, seeds: int, level: float) -> float:
    margin, expected, planned = prediction.margin, prediction.expected, prediction.planned
    if not prediction.sides[1]:
        share = float(prediction.control)  # pyright: ignore
        bound = share + (margin if expected in ("more", "at_most") else -margin)
        truth = share + planned if planned is not None else float(expected == "more")
        if expected != "more":  # few events are many runs without one
            bound, truth = 1.0 - bound, 1.0 - truth
        return share_power(len(prediction.sides[0]) * seeds, bound, truth, level)
    one, other = (len(side) * seeds for side in prediction.sides)
    if expected in ("more", "less"):
        gap = abs(planned) if planned is not None else min(1.0, margin + 0.5)
        sizes = (one, other) if expected == "more" else (other, one)
        return region_power(*sizes, margin, level, 0.5 + gap / 2, 0.5 - gap / 2)
    # p1 - p2 below the margin is p2 - p1 above its negative: the sides change places.
    gap = planned or 0.0
    found = region_power(other, one, -margin, level, 0.5 - gap / 2, 0.5 + gap / 2)
    return max(0.0, 2.0 * found - 1.0) if expected == "same" else found


def share_power(num_runs: int, bound: float, truth: float, level: float) -> float:
    """The chance that the binomial test finds a share `truth` of the runs above the bound."""
    if bound >= 1.0:
        return 0.0
    # The smallest count with P(K > count | bound) within the level.
    count = stats.binom.isf(level, num_runs, max(bound, 0.0))
    return float(stats.binom.sf(count, num_runs, min(truth, 1.0)))


@lru_cache(maxsize=4096)
def region_power(n1: int, n2: int, margin: float, level: float, p1: float, p2: float) -> float:
    """The chance that the exact test finds p1 - p2 above the margin; beyond MOST runs, by normal quantiles."""
    if min(n1, n2) > MOST:
        error = math.sqrt(p1 * (1 - p1) / n1 + p2 * (1 - p2) / n2)
        return 1.0 if error == 0.0 else float(stats.norm.sf(stats.norm.isf(level) - (p1 - p2 - margin) / error))
    found = events.score(n1, n2, margin)
    values = np.unique(found[found > 0])
    # Bisection for the smallest value whose tail is within the level: a larger value has a smaller region and tail.
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if events.tail(found >= values[middle] - 1e-9, margin) <= level:
            high = middle
        else:
            low = middle + 1
    if low == len(values):
        return 0.0
    first, second = (stats.binom.pmf(np.arange(n + 1), n, p) for n, p in ((n1, p1), (n2, p2)))
    return float(first @ (found >= values[low] - 1e-9) @ second)


def seeds_needed(prediction: Prediction, sd: float, level: float, is_paired: bool = False) -> int | None:
    """The smallest number of seeds with POWER, in [LEAST, SEARCHED]; None without a spread."""
    return least_seeds(lambda seeds: power(prediction, sd, seeds, level, is_paired))


def least_seeds(found: Callable[[int], float]) -> int | None:
    """The smallest number of seeds at which this power, a function of their number, is POWER, as in `seeds_needed`."""
    if math.isnan(found(LEAST)):
        return None
    # Assumes that power rises with the seeds. An exact test's power is a sawtooth, so fewer seeds may reach POWER.
    low, high = LEAST, SEARCHED
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) >= POWER else (middle + 1, high)
    return low


def needs(claims: Sequence[Claim], regimes: Sequence[Regime], rows: Mapping[str, Row]) -> dict[int, Need]:
    """The needs of every claim, by its number.

    The level is that of Holm's correction over the claims with deciding seeds; a claim that has none would be one more.
    """
    spreads, homes = Spreads(claims, regimes, rows), {regime.name for regime in regimes}
    is_decided = {claim.number: claim.home in homes and len(claim.deciding()) > 0 for claim in claims}
    found = {}
    for claim in claims:
        level = level_of(sum(is_decided.values()) + (not is_decided[claim.number]))
        plans = tuple((one, spreads.of(one, claim)) for one in claim.as_planned)
        limiting, spread = max(plans, key=lambda plan: _asked(*plan, level))
        arms = dict.fromkeys(arm for one in claim.predictions for arm in one.arms)
        hours = len(arms) * spreads.seconds(claim) / 3600
        seeds = seeds_needed(limiting, spread.sd, level, spread.is_paired)
        found[claim.number] = Need(seeds, hours, claim, limiting, spread, level, plans)
    return found


def _asked(prediction: Prediction, spread: ResidualSpread, level: float) -> tuple[float, float]:
    """The seeds that it needs (infinite without a spread), then 1 - its power with so many: the largest limits."""
    seeds = seeds_needed(prediction, spread.sd, level, spread.is_paired)
    if seeds is None:
        return math.inf, 0.0
    return float(seeds), 1.0 - power(prediction, spread.sd, seeds, level, spread.is_paired)


def assumed_text(prediction: Prediction, sd: float) -> str:
    """The true effect at which the power is computed, in the measure's unit or as a factor."""
    expected, margin, kind = prediction.expected, prediction.margin, prediction.measure.kind
    if kind == "time" and margin == 0.0:
        return "4 times the rate"
    if prediction.planned is not None:
        return f"× {prediction.planned:.3g}" if prediction.is_factor else f"{prediction.planned:+.2g}"
    if kind == "event":
        if not prediction.sides[1]:
            return "all runs" if expected == "more" else "no run"
        return (
            f"{min(1.0, margin + 0.5) * (1 if expected == 'more' else -1):+g}" if expected in ("more", "less") else "0"
        )
    own = margin_of(prediction)
    sign = -1.0 if expected == "less" or (expected in ("same", "at_most") and own == 0) else 1.0
    if own == 0 and math.isnan(sd):
        return f"{sign:+.0f} SD"
    effect = 0.0 if expected in ("same", "at_most") and own > 0 else sign * (2 * own if own > 0 else sd)
    return f"× {math.exp(effect):.3g}" if prediction.is_factor else f"{effect:+.2g}" if effect else "0"


__all__ = [
    "MOST", "MOST_HOURS", "POWER", "SEARCHED", "Need", "SeedsNeeded", "assumed_text", "least_seeds", "level_of",
    "needs", "power", "region_power", "seeds_needed", "share_power", "student_power",
]  # fmt: skip
