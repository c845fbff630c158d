"""The whole procedure held to its level and its power: choice of test, exact tests, intersection-union, Holm.

Thirty claims whose truth lies on the edge of what they say: ten of normal numbers with equal spreads, ten with unequal
ones, ten of collapses. Whatever is decided of them is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sandbox.claims import REGIMES
from sandbox.ledger.cells import key
from sandbox.ledger.claim import FRESH, Arm, Claim, Measure, Prediction
from sandbox.ledger.power import level_of, power, seeds_needed
from sandbox.ledger.statistics import ALPHA, Expected, two_sided
from sandbox.ledger.verdicts import findings

pytestmark = pytest.mark.unchecked

REGIME = REGIMES[0]
ARMS = tuple(Arm(f"arm{i}", (("num_steps", str(40 + i)),)) for i in range(4))
NUM_CLAIMS, NUM_LEDGERS = 30, {8: 80, 20: 20}


def _measure(number: int, kind: str) -> Measure:
    return Measure(f"x{number}", "a number", "1", lambda row: row[f"x{number}"], kind=kind)  # pyright: ignore


def _said(
    measure: Measure, expected: Expected, margin: float, treatment: Any = ARMS[0], control: Any = ARMS[1]
) -> Prediction:
    return Prediction("w", treatment, control, measure, expected, margin)


def _claims(seeds: int) -> list[Claim]:
    """Each with two predictions: one on its edge, one on its edge or, in every other claim, plainly true."""
    made = []
    for number in range(NUM_CLAIMS):
        measure = _measure(number, "event" if number >= 20 else "number")
        first = _said(measure, "more", 0.25 if number >= 20 else 1.0)
        second = _said(measure, "less", 0.0, ARMS[2], ARMS[3])
        fields = {"home": REGIME.name, "num_seeds": seeds, "first_seed": FRESH, "regimes": (REGIME.name,)}
        made.append(Claim(number, f"c{number}", "s", "here", (first, second), **fields))
    return made


def _draw(draws: np.random.Generator, number: int, arm: int) -> float:
    is_true = number % 2 == 0 and arm == 3
    if number >= 20:
        share = 0.55 if arm == 0 else 1.0 if is_true else 0.0 if number % 2 == 0 and arm == 2 else 0.3
        return float(draws.random() < share)
    spread = 1.0 if number < 10 else (1.0, 2.0, 0.5, 1.5)[arm]
    return draws.normal(1.0 if arm == 0 else 9.0 if is_true else 0.0, spread)


@pytest.mark.parametrize("seeds", [8, 20])
def test_a_ledger_of_claims_on_their_edge_is_seldom_decided(seeds: int) -> None:
    """The share of ledgers with any verdict is at most 5%, and that of claims that their own p decides, too.

    Three binomial standard errors are allowed.
    """
    draws, claims, ledgers = np.random.default_rng(seeds), _claims(seeds), NUM_LEDGERS[seeds]
    keys = {(arm, seed): key(REGIME, ARMS[arm], FRESH + seed) for arm in range(4) for seed in range(seeds)}
    wrong, alone = 0, 0
    for _ in range(ledgers):
        rows = {
            name: {f"x{number}": _draw(draws, number, arm) for number in range(NUM_CLAIMS)}
            for (arm, _), name in keys.items()
        }
        found = findings(claims, [REGIME], rows)
        wrong += any(one.word != "inconclusive" for one in found)
        alone += sum(two_sided(*one.joint) < ALPHA for one in found if one.joint)
    for share, number in ((wrong / ledgers, ledgers), (alone / ledgers / NUM_CLAIMS, NUM_CLAIMS * ledgers)):
        assert share <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / number)
    assert alone > 0


NUMBER, EVENT = _measure(0, "number"), _measure(0, "event")
PLANS: list[tuple[Prediction, Callable[[np.random.Generator, int], float]]] = [
    (_said(NUMBER, "more", 0.5), lambda g, arm: g.normal(1.0 * (arm == 0), 0.5)),
    (_said(NUMBER, "same", 0.6), lambda g, arm: g.normal(0.0, 0.5)),
    (_said(NUMBER, "less", 0.0), lambda g, arm: g.normal(-0.5 * (arm == 0), 0.5)),
    (_said(NUMBER, "at_most", 0.4, control=0.0), lambda g, arm: g.normal(0.0, 0.5)),
    (_said(NUMBER, "more", 0.35, ARMS[:2], ARMS[2:]), lambda g, arm: g.normal(0.7 * (arm < 2), 0.5)),
    (_said(EVENT, "more", 0.25), lambda g, arm: float(g.random() < (0.875 if arm == 0 else 0.125))),
]


@pytest.mark.parametrize(("prediction", "draw"), PLANS, ids=lambda plan: getattr(plan, "expected", None))
def test_the_power_that_was_promised_is_there(
    prediction: Prediction, draw: Callable[[np.random.Generator, int], float]
) -> None:
    """With the seeds that a plan asks for at the first step over 30 claims, 80% of 200 draws are found to hold.

    Within three standard errors below, of the plan's own power; Welch's degrees of freedom cost up to 2% of it.
    """
    level, generator = level_of(NUM_CLAIMS), np.random.default_rng(5)
    seeds = seeds_needed(prediction, 0.5, level)
    assert seeds is not None and 5 < seeds <= 40
    promised = power(prediction, 0.5, seeds, level)
    assert promised >= 0.8 > power(prediction, 0.5, seeds - 2, level)
    fields = {"home": REGIME.name, "num_seeds": seeds, "first_seed": FRESH, "regimes": (REGIME.name,)}
    claim = Claim(0, "c", "s", "here", (prediction,), **fields)
    held = 0
    for _ in range(200):
        rows = {
            key(REGIME, arm, FRESH + seed): {"x0": draw(generator, place)}
            for place, arm in enumerate(claim.arms)
            for seed in range(seeds)
        }
        (found,) = findings([claim], [REGIME], rows)
        held += found.joint is not None and found.joint[0] < level
    error = math.sqrt(promised * (1 - promised) / 200)
    assert promised - 3 * error - 0.02 < held / 200 < promised + 3 * error + 0.02
