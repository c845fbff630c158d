"""From rows to words: each prediction's effect and verdict in each regime, with Holm's correction over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from sandbox.ledger.cells import Changes, Regime, key
from sandbox.ledger.claim import Claim, Prediction, Row
from sandbox.ledger.statistics import Effect, Word, decisive_p, effect, holm, ratio_of_means, verdict


@dataclass(frozen=True)
class Outcome:
    """What the runs say of one prediction in one regime; effect and verdict are None while seeds are missing, or
    where a ratio is asked for and a seed (on `ratio_of_means`: every seed) has a 0. Where its premise failed, the
    verdict says so, and no p is taken.

    `values`: (treatment, control) of the measure, a pair a seed. `effect` is on the prediction's scale: a difference,
    or the logarithm of a factor.
    """

    claim: Claim
    prediction: Prediction
    regime: str
    values: tuple[tuple[float, float], ...]
    effect: Effect | None
    p: float | None
    """After Holm's correction over all outcomes of the ledger."""
    word: Word | None
    alone: Word | None
    """The word that the prediction's own p gives, before any correction."""

    @property
    def leans(self) -> Literal["for", "against"] | None:
        """To which side its own test points, where the correction leaves it inconclusive; None where to neither."""
        if self.word != "inconclusive" or self.alone in (None, "inconclusive"):
            return None
        return "for" if self.alone == "reproduced" else "against"


def outcomes(
    claims: Sequence[Claim],
    regimes: Sequence[Regime],
    rows: Mapping[str, Row],
    seeds: int | None = None,
    *,
    changes: Changes = (),
) -> list[Outcome]:
    """An outcome for every claim, regime that it is tried in, and prediction, in that order.

    On `seeds` seeds (None: each claim's own); `changes` as for `cells.cell`.
    """
    tried = [(claim, regime) for claim in claims for regime in regimes if regime.name in claim.regimes]
    places = [(claim, regime, prediction) for claim, regime in tried for prediction in claim.predictions]
    values = [
        _values(prediction, regime, claim.seeds(regime.name, seeds), rows, changes)
        for claim, regime, prediction in places
    ]
    effects = [
        _effect(prediction, pairs) if len(pairs) == len(claim.seeds(regime.name, seeds)) > 1 else None
        for (claim, regime, prediction), pairs in zip(places, values, strict=True)
    ]
    moot = [
        _is_moot(prediction, regime, claim.seeds(regime.name, seeds), rows, changes)
        for claim, regime, prediction in places
    ]
    decided = [i for i, found in enumerate(effects) if found is not None and not moot[i]]
    raw = [decisive_p(effects[i], places[i][2].expected, _margin(places[i][2])) for i in decided]  # pyright: ignore
    own, adjusted = dict(zip(decided, raw, strict=True)), dict(zip(decided, holm(raw), strict=True))
    found = []
    for i, (claim, regime, prediction) in enumerate(places):
        p, of = adjusted.get(i), effects[i]
        word, alone = _word(prediction, of, p), _word(prediction, of, own.get(i))
        word = "not applicable" if moot[i] else word
        found.append(Outcome(claim, prediction, regime.name, tuple(values[i]), of, p, word, alone))
    return found


def together(words: Sequence[Word | None]) -> Word | None:
    """The verdict on a claim from those on its predictions: None if any is missing, reproduced if all are.

    opposite where one is and none is reproduced; inconclusive where one is and none speaks against; else not
    reproduced. Those that are not applicable say nothing; not applicable where all are.
    """
    if not words or any(word is None for word in words):
        return None
    words = [word for word in words if word != "not applicable"]
    if not words:
        return "not applicable"
    if all(word == "reproduced" for word in words):
        return "reproduced"
    if "opposite" in words and "reproduced" not in words:
        return "opposite"
    if "inconclusive" in words and "not reproduced" not in words and "opposite" not in words:
        return "inconclusive"
    return "not reproduced"


def _is_moot(
    prediction: Prediction, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row], changes: Changes
) -> bool:
    """Whether the arm of the premise has all its runs, and none of them collapsed."""
    if prediction.premise is None:
        return False
    found = [rows.get(key(regime, prediction.premise, seed, changes)) for seed in seeds]
    return all(row is not None and row["first_step"] is None for row in found)


def _values(
    prediction: Prediction, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row], changes: Changes
) -> list[tuple[float, float]]:
    """(treatment, control) of the seeds whose cells have rows with both numbers, of runs that may be compared."""
    pairs = []
    for seed in seeds:
        sides = [[rows.get(key(regime, arm, seed, changes)) for arm in side] for side in prediction.sides]
        found = [row for side in sides for row in side]
        present = [row for row in found if row is not None]
        if len(present) < len(found) or any(len({row.get(n) for row in present}) > 1 for n in prediction.measure.same):
            continue
        values = [fmean(prediction.measure.of(row) for row in side if row is not None) for side in sides if side]
        treatment, other = values if len(values) == 2 else (values[0], float(prediction.control))  # pyright: ignore
        if math.isfinite(treatment) and math.isfinite(other):
            pairs.append((treatment, other))
    return pairs


def _effect(prediction: Prediction, pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """The effect on the prediction's scale; None where a 0 leaves no ratio."""
    match prediction.scale:
        case "difference":
            return effect([treatment - control for treatment, control in pairs], prediction.measure.fall)
        case "spread":
            middles = [median(side) for side in zip(*pairs, strict=True)]
            deviations = [abs(treatment - middles[0]) - abs(control - middles[1]) for treatment, control in pairs]
            return effect(deviations, prediction.measure.fall)
        case "ratio":
            has_zero = min(min(pair) for pair in pairs) <= 0
            return None if has_zero else effect([math.log(treatment / control) for treatment, control in pairs])
        case "ratio_of_means":
            has_no_mean = min(sum(side) for side in zip(*pairs, strict=True)) <= 0
            return None if has_no_mean else ratio_of_means(pairs)


def _word(prediction: Prediction, found: Effect | None, p: float | None) -> Word | None:
    if found is None or p is None:
        return None
    word: Word = verdict(found, prediction.expected, _margin(prediction), p)
    if word == "opposite" and not prediction.sides[1]:
        return "not reproduced"  # beyond a threshold there is a side, but no opposite
    return word


def _margin(prediction: Prediction) -> float:
    return math.log(prediction.margin) if prediction.is_factor else prediction.margin


__all__ = ["Outcome", "outcomes", "together"]
