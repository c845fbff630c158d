"""From rows to verdicts: every prediction's effect, and one decision per claim at its home, with Holm's correction.

A claim is *reproduced* if all of its predictions hold: an intersection-union test, whose p is the largest of theirs,
without further correction. It is *not reproduced* if one fails: p is the number of predictions times their least. The
two give a two-sided p, and Holm's correction runs over all claims to be decided, with p = 1 for one that lacks runs: no
verdict is lost when another claim's runs come, and the level holds at every look. Other regimes, and seeds below FRESH,
are exploratory: for, against and open, without correction; they decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from sandbox.ledger import contrasts, events
from sandbox.ledger.cells import Changes, Regime, key
from sandbox.ledger.claim import Arm, Claim, Measure, Prediction, Row
from sandbox.ledger.contrasts import Column
from sandbox.ledger.course import collapsed
from sandbox.ledger.statistics import ALPHA, Effect, Stand, Word, holm, opposite, sides, stand, two_sided


@dataclass(frozen=True)
class Outcome:
    """The evidence on one prediction; effect and p's are None while runs are missing, or if a 0 has no ratio.

    `values`: (treatment, control) of the measure, a pair per seed. `effect` is on the prediction's scale: a difference
    or the logarithm of a factor.
    """

    prediction: Prediction
    values: tuple[tuple[float, float], ...]
    effect: Effect | None = None
    is_moot: bool = False
    """Whether it is not applicable: its premise has all its runs, and none collapsed."""

    @property
    def p(self) -> tuple[float, float] | None:
        """One-sided p's that it holds and that it fails, without correction."""
        if self.effect is None or self.is_moot:
            return None
        return sides(self.effect, self.prediction.expected, margin_of(self.prediction))

    @property
    def stand(self) -> Stand | None:
        """The reading of its own two-sided test, without correction."""
        return None if self.p is None else stand(*self.p)


@dataclass(frozen=True)
class Finding:
    """A claim in one regime on one set of seeds: all its outcomes and their joint reading."""

    claim: Claim
    regime: str
    seeds: range
    decides: bool
    """Whether it is at the claim's home on fresh seeds; else it is exploratory."""
    outcomes: tuple[Outcome, ...]
    p: float | None = None
    """Two-sided p of the claim: after Holm's correction if it decides, else its own. None while runs are missing, and
    if no prediction is applicable."""
    word: Word | None = None
    """The verdict, if it decides."""

    @property
    def applicable(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.is_moot]

    @property
    def is_complete(self) -> bool:
        """Whether every applicable prediction has its runs."""
        return all(one.effect is not None for one in self.applicable)

    @property
    def joint(self) -> tuple[float, float] | None:
        """One-sided p's of the claim: that all predictions hold (the largest), that one fails (their number times the
        least)."""
        found = [p for one in self.applicable if (p := one.p) is not None]
        if not found or not self.is_complete:
            return None
        return max(p for p, _ in found), min(1.0, len(found) * min(p for _, p in found))

    @property
    def stand(self) -> Stand | None:
        """Its reading without correction."""
        return None if self.joint is None else stand(*self.joint)


def findings(
    claims: Sequence[Claim],
    regimes: Sequence[Regime],
    rows: Mapping[str, Row],
    seeds: int | None = None,
    *,
    changes: Changes = (),
) -> list[Finding]:
    """For every claim, its deciding finding at home, then its exploratory ones in each regime where it was tried.

    They are on `seeds` seeds (None: each claim's own); `changes` as for `cells.cell`.
    """
    by_name, found = {regime.name: regime for regime in regimes}, []
    for claim in claims:
        own = [(claim.home, claim.deciding(seeds), True)]
        own += [(name, claim.seen(name, seeds), False) for name in claim.places]
        for name, chosen, decides in own:
            if name in by_name and chosen:
                made = _outcomes(claim, by_name[name], chosen, rows, changes)
                found.append(Finding(claim, name, chosen, decides, made))
    family = [one for one in found if one.decides]
    decided = iter(_corrected(family))
    return [next(decided) if one.decides else _decided(one, None) for one in found]


def among_ready(found: Sequence[Finding]) -> list[Finding]:
    """The deciding findings that have their runs, with the p and verdict of Holm's correction over these only.

    They would be the verdicts if no other claim were to be tried; they may be lost when other runs come.
    """
    return _corrected([one for one in found if one.decides and one.joint is not None])


def _corrected(family: Sequence[Finding]) -> list[Finding]:
    """The findings with the p and verdict of Holm's correction over them; a claim that lacks runs has p = 1."""
    own = [1.0 if (joint := one.joint) is None else two_sided(*joint) for one in family]
    # The factor of each in the correction: the number of those whose p is not smaller.
    factors = [sum(other >= p for other in own) for p in own]
    return [_decided(*each) for each in zip(family, holm(own), factors, strict=True)]


def _decided(one: Finding, adjusted: float | None, factor: int = 1) -> Finding:
    if one.joint is None:
        is_moot = one.decides and not one.applicable
        return replace(one, word="not applicable") if is_moot else one
    if adjusted is None:
        return replace(one, p=two_sided(*one.joint))
    return replace(one, p=adjusted, word=_word(one, one.joint, adjusted, factor))


def _word(one: Finding, joint: tuple[float, float], adjusted: float, factor: int) -> Word:
    """The verdict at an adjusted p; `opposite` if a prediction that compares arms is beyond its margin on the other
    side (its p times their number, two-sided, and times the claim's factor in Holm's correction) and none of the
    claim's predictions holds by its own test."""
    if adjusted >= ALPHA:
        return "inconclusive"
    if joint[0] < joint[1]:
        return "reproduced"
    beyond = [
        opposite(o.effect, o.prediction.expected, margin_of(o.prediction))
        for o in one.applicable
        if o.effect is not None and o.prediction.sides[1]
    ]
    is_beyond = any(2.0 * len(one.applicable) * factor * p < ALPHA for p in beyond)
    return "opposite" if is_beyond and all(o.stand != "for" for o in one.applicable) else "not reproduced"


def _outcomes(
    claim: Claim, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row], changes: Changes
) -> tuple[Outcome, ...]:
    numbers = _Numbers(claim, regime, seeds, rows, changes)
    made = []
    for one in claim.predictions:
        pairs = numbers.pairs(one)
        # No test on a part of the seeds: a free choice of when to look would break its level.
        effect = numbers.effect(one) if len(pairs) == len(seeds) > 1 else None
        made.append(Outcome(one, pairs, effect, numbers.is_moot(one)))
    return tuple(made)


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a claim's arms in a regime, on these seeds."""

    claim: Claim
    regime: Regime
    seeds: Sequence[int]
    rows: Mapping[str, Row]
    changes: Changes
    kept: dict[tuple[Arm, Measure], Column] = field(default_factory=dict)

    def found(self, arm: Arm) -> list[Row | None]:
        """The arm's rows, one per seed; None where it has not run."""
        return [self.rows.get(key(self.regime, arm, seed, self.changes)) for seed in self.seeds]

    def column(self, arm: Arm, measure: Measure) -> Column:
        """The arm's numbers, one per seed; nan where there is none."""
        if (arm, measure) not in self.kept:
            numbers = [math.nan if row is None else measure.of(row) for row in self.found(arm)]
            self.kept[arm, measure] = np.array(numbers)
        return self.kept[arm, measure]

    def is_moot(self, prediction: Prediction) -> bool:
        if prediction.premise is None:
            return False
        # A run that is missing, or whose end is unknown (nan), may have collapsed: the prediction stays applicable.
        return all(row is not None and collapsed(row) == 0.0 for row in self.found(prediction.premise))

    def pairs(self, prediction: Prediction) -> tuple[tuple[float, float], ...]:
        """(treatment, control) for the seeds that have both numbers, from comparable runs."""
        left, right = self._means(prediction)
        kept = np.isfinite(left) & np.isfinite(right) & self._comparable(prediction)
        return tuple((float(a), float(b)) for a, b in zip(left[kept], right[kept], strict=True))

    def _means(self, prediction: Prediction) -> tuple[Column, Column]:
        """Each side's mean over its arms, one per seed; a control that is a number is repeated."""
        # nan where an arm lacks its number: a side needs all of its arms.
        one, other = (
            np.mean([self.column(arm, prediction.measure) for arm in side], axis=0) if side else None
            for side in prediction.sides
        )
        assert one is not None
        return one, np.full(len(self.seeds), prediction.control) if other is None else other  # pyright: ignore

    def _comparable(self, prediction: Prediction) -> NDArray[np.bool_]:
        fields = prediction.measure.same
        if not fields:
            return np.ones(len(self.seeds), dtype=bool)
        rows = list(zip(*(self.found(arm) for side in prediction.sides for arm in side), strict=True))
        return np.array([all(len({row.get(n) for row in one if row is not None}) < 2 for n in fields) for one in rows])

    def effect(self, prediction: Prediction) -> Effect | None:
        """The effect on the prediction's scale, by the test of contrasts.py or events.py; None if it has none. Every
        seed must have its numbers."""
        measure, scale = prediction.measure, prediction.scale
        (left, group), (right, _) = self._columns(prediction, 0), self._columns(prediction, 1)
        if measure.kind == "event":
            return events.shares(np.concatenate(left), np.concatenate(right) if right else _number(prediction))
        if not all(np.isfinite(column).all() for column in (*left, *right)):
            return None  # a logarithm of 0
        control = right or _number(prediction)
        test = "paired" if measure.same or measure.kind == "time" else contrasts.choose(group)
        found = contrasts.moments(left, control, test, ratio=scale == "ratio_of_means")
        if scale == "ratio_of_means":
            return contrasts.ratio_of_means(found) if found.a > 0 and found.b > 0 else None
        if measure.kind == "time":
            student = contrasts.difference(found, fall=1.0)
            # The log-rank test compares two arms, and has no margin.
            is_plain = prediction.margin == 0.0 and len(left) == len(right) == 1
            return events.times(*self._dated(prediction, left[0], right[0]), student) if is_plain else student
        return contrasts.difference(found)

    def _dated(self, prediction: Prediction, left: Column, right: Column) -> tuple[Column, Column]:
        """Both arms' times on the wider of their spacings; as they are if the arms have one spacing."""
        spacing = prediction.measure.spacing
        if spacing is None:
            return left, right
        rows = [row for (arm,) in prediction.sides for row in self.found(arm) if row is not None]
        known = [value for row in rows if not math.isnan(value := spacing(row))]
        # Equal but for rounding, as 40 of 400 steps and 5 of 50.
        is_one = not known or math.isclose(min(known), max(known))
        return (left, right) if is_one else (events.dated(left, max(known)), events.dated(right, max(known)))

    def _columns(self, prediction: Prediction, side: int) -> tuple[list[Column], list[Column]]:
        """The columns of one side, and those of every prediction of the claim with this measure and scale."""
        measure, scale = prediction.measure, prediction.scale
        alike = [one for one in self.claim.predictions if (one.measure, one.scale) == (measure, scale)]
        groups = list(dict.fromkeys(arms for one in alike for arms in one.sides if arms))
        if scale in ("difference", "ratio_of_means"):  # linear: a mean over arms is one of their columns
            groups = [(arm,) for arm in dict.fromkeys(arm for arms in groups for arm in arms)]
        made = {arms: contrasts.on_scale(np.mean([self.column(arm, measure) for arm in arms], axis=0), scale)
                for arms in groups}  # fmt: skip
        own = prediction.sides[side]
        return ([made[own]] if own in made else [made[arm,] for arm in own]), list(made.values())


def _number(prediction: Prediction) -> float:
    """The number with which a treatment is compared, on the prediction's scale; on `spread`: 0."""
    number = float(prediction.control)  # pyright: ignore
    return math.log(number) if prediction.scale == "ratio" else 0.0 if prediction.scale == "spread" else number


def margin_of(prediction: Prediction) -> float:
    """The margin on the scale of the effect."""
    return math.log(prediction.margin) if prediction.is_factor else prediction.margin


def mean_of(outcome: Outcome, side: int) -> float:
    """The mean over seeds of the measure, on the treatment's side (0) or the control's (1); nan without a run."""
    return fmean(pair[side] for pair in outcome.values) if outcome.values else math.nan


__all__ = ["Finding", "Outcome", "among_ready", "findings", "margin_of", "mean_of"]
