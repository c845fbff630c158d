"""Laws of sandbox/ledger/power.py: seeds that suffice and no more, spreads by their order, and what is out of reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sandbox.claims import REGIMES
from sandbox.ledger.cells import key
from sandbox.ledger.claim import FRESH, Arm, Claim, Measure, Prediction
from sandbox.ledger.power import (
    LEAST,
    MOST,
    POWER,
    SEARCHED,
    assumed_text,
    level_of,
    needs,
    power,
    seeds_needed,
)
from sandbox.ledger.spreads import Spreads

HOME, OTHER = REGIMES[:2]
ONE, TWO = (Arm(f"arm{i}", (("num_steps", str(40 + i)),)) for i in range(2))
X = Measure("x", "a number", "1", lambda row: row["x"])
EVENT = Measure("e", "an event", "1", lambda row: row["x"], kind="event")
TIME = Measure("t", "a time", "1", lambda row: row["x"], kind="time")
LEVEL = level_of(40)


def said(expected: Any = "more", margin: float = 0.05, measure: Measure = X, **fields: Any) -> Prediction:
    given = {"treatment": ONE, "control": TWO} | fields
    return Prediction("w", measure=measure, expected=expected, margin=margin, **given)


def claim(*predictions: Prediction, **fields: Any) -> Claim:
    return Claim(1, "c", "s", "here", predictions, home=HOME.name, **fields)


def rows(
    regime: Any, sd: float, seeds: int, arms: tuple[Arm, ...] = (ONE, TWO), seconds: float = 36.0
) -> dict[str, Any]:
    """Rows whose arms have this very SD."""
    ramp = np.linspace(-1.0, 1.0, seeds)
    values = sd * ramp / ramp.std(ddof=1)
    return {
        key(regime, arm, seed): {
            "x": 1.0 + float(values[seed]), "regime": regime.name, "arm": arm.name, "seed": seed, "seconds": seconds,
        }
        for arm in arms
        for seed in range(seeds)
    }  # fmt: skip


def test_the_level_is_that_of_holms_first_step() -> None:
    """5% over the claims, two-sided."""
    assert level_of(40) == 0.05 / 40 / 2


@pytest.mark.parametrize("sd", [0.02, 0.05, 0.08])
def test_the_seeds_are_those_of_the_textbook(sd: float) -> None:
    """Near 2 (z_alpha + z_power)^2 (SD / distance)^2 for two arms, with a few more for Student's t."""
    found = seeds_needed(said(), sd, LEVEL)
    normal = 2 * (stats.norm.isf(LEVEL) + stats.norm.ppf(POWER)) ** 2 * (sd / 0.05) ** 2
    assert found is not None and max(LEAST, normal) <= found <= max(LEAST, normal) + 6
    assert power(said(), sd, found, LEVEL) >= POWER
    assert found == LEAST or power(said(), sd, found - 1, LEVEL) < POWER


def test_what_is_more_asked_for_needs_more_seeds() -> None:
    """`same` needs more than `at_most`; several arms a side need fewer; a number as control fewer than an arm."""
    many = said("at_most", treatment=(ONE, TWO), control=(TWO, ONE))
    asked = (said("same"), said("at_most"), many, said("at_most", control=0.0))
    same, at_most, pooled, alone = (seeds_needed(one, 0.05, LEVEL) for one in asked)
    assert same and at_most and pooled and alone and same > at_most > max(pooled, alone)


def test_without_a_margin_the_effect_is_one_sd() -> None:
    """So the seeds do not depend on the spread, known or not."""
    found = {seeds_needed(said("less", 0.0), sd, LEVEL) for sd in (0.01, 3.0, math.nan)}
    assert len(found) == 1 and found.pop() == seeds_needed(said(margin=1.0), 1.0, LEVEL)
    assert assumed_text(said("less", 0.0), math.nan) == "-1 SD"


def test_events_are_planned_by_the_exact_test() -> None:
    """Half of the runs more than the margin; all or none against a number; more for `at_most`."""
    more, number = said("more", 0.25, EVENT), said("less", 0.0, EVENT, control=0.25)
    assert assumed_text(more, 0.5) == "+0.75" and assumed_text(number, 0.5) == "no run"
    seeds = seeds_needed(number, 0.5, LEVEL)
    assert seeds is not None and 0.75**seeds < LEVEL <= 0.75 ** (seeds - 1)
    # A planned share, or difference, takes the place of all the runs, or of half more than the margin.
    planned = power(said("less", 0.0, EVENT, control=0.25, planned=-0.2), 0.5, seeds, LEVEL)
    assert planned == pytest.approx(stats.binom.pmf(0, seeds, 0.05)) and planned < power(number, 0.5, seeds, LEVEL)
    smaller = said("more", 0.25, EVENT, planned=0.5)
    assert power(smaller, 0.5, 14, LEVEL) < power(more, 0.5, 14, LEVEL) and assumed_text(smaller, 0.5) == "+0.5"
    assert power(said("more", 0.25, EVENT, planned=0.75), 0.5, 14, LEVEL) == power(more, 0.5, 14, LEVEL)
    found, equal = seeds_needed(more, 0.5, LEVEL), seeds_needed(said("at_most", 0.25, EVENT), 0.5, LEVEL)
    assert found is not None and equal is not None and 10 < found < 40 < equal


def test_times_are_planned_by_events_and_by_the_floor() -> None:
    """At margin 0 by the rates; with a margin no seeds suffice that could have missed it."""
    seeds = seeds_needed(said("less", 0.0, TIME), math.nan, LEVEL)
    assert seeds is not None and 25 < seeds <= MOST
    least = seeds_needed(said("less", 0.1, TIME), 0.01, LEVEL)
    assert least is not None and 0.9**least <= LEVEL < 0.9 ** (least - 1)


def test_a_spread_is_the_claims_own_then_its_homes_then_the_worst() -> None:
    """Ten degrees of freedom each; where none is known there is no number of seeds."""
    strange = Arm("strange", (("num_steps", "44"),))
    others = claim(said("more", 0.1, treatment=strange, control=0.0))
    ledger, one = [claim(said()), others], said()
    own = rows(HOME, 0.02, 7)
    home, far = rows(HOME, 0.04, 12, (strange,)), rows(OTHER, 0.3, 8) | rows(REGIMES[2], 0.2, 8)
    found = [Spreads(ledger, REGIMES, r).of(one, HOME.name) for r in (own | home | far, home | far, far, {})]
    assert [spread.of for spread in found] == ["own arms", HOME.name, OTHER.name, "unknown"]
    assert [spread.sd for spread in found[:3]] == pytest.approx([0.02, 0.04, 0.3])
    assert seeds_needed(one, found[3].sd, LEVEL) is None


def test_the_least_powerful_prediction_counts_and_has_its_cost() -> None:
    """Seeds, the prediction that asks for them, and hours of all arms; beyond forty, and none asked for, no reach."""
    kept = rows(HOME, 0.05, 12)
    need = needs([claim(said(margin=0.5), said(margin=0.05))], REGIMES, kept)[1]
    assert need.limiting.margin == 0.05 and need.seeds == seeds_needed(said(), 0.05, level_of(1))
    assert need.hours == pytest.approx(need.seeds * 2 * 36.0 / 3600) and not need.is_out_of_reach
    far = needs([claim(said(margin=0.005))], REGIMES, kept)[1]
    assert far.seeds is not None and MOST < far.seeds < SEARCHED and far.is_out_of_reach
    asked = needs([claim(said(margin=0.005), fresh_seeds=8)], REGIMES, kept)[1]
    assert not asked.is_out_of_reach and asked.power(8) < 0.1
    assert list(asked.claim.deciding()) == list(range(FRESH, FRESH + 8))


def test_of_predictions_that_need_as_many_seeds_the_least_powerful_counts() -> None:
    """Five seeds are the fewest, so predictions of different power ask for as many; the order does not matter."""
    kept, sure, unsure = rows(HOME, 0.05, 12), said(margin=0.5), said(margin=0.18)
    for predictions in ((sure, unsure), (unsure, sure)):
        need = needs([claim(*predictions, fresh_seeds=LEAST)], REGIMES, kept)[1]
        assert (need.seeds, need.limiting) == (LEAST, unsure)
        assert need.power(LEAST) == power(unsure, 0.05, LEAST, level_of(1)) < power(sure, 0.05, LEAST, level_of(1))
    # With other numbers of seeds another prediction may be the least powerful: an exact test's power is a sawtooth.
    both = (said("more", 0.25, EVENT), said("less", 0.0, EVENT, control=0.25))
    need = needs([claim(*both)], REGIMES, kept)[1]
    assert all(need.power(n) == min(power(one, 0.5, n, level_of(1)) for one in both) for n in range(5, 30))


def test_the_level_counts_the_claims_to_be_decided() -> None:
    """Holm's family: those with deciding seeds. A claim that has none yet would be one more."""
    kept, decided = rows(HOME, 0.05, 12), [replace(claim(said(), fresh_seeds=8), number=i) for i in (1, 2)]
    found = needs([*decided, replace(claim(said()), number=3)], REGIMES, kept)
    assert [found[i].level for i in (1, 2, 3)] == [level_of(2), level_of(2), level_of(3)]


def test_a_planned_effect_stands_for_twice_the_margin() -> None:
    """Only the distance beyond the margin counts, on either side of zero and of one."""
    planned, twice = said("more", 0.02, planned=0.12), said("more", 0.1)
    assert seeds_needed(planned, 0.05, LEVEL) == seeds_needed(twice, 0.05, LEVEL)
    assert seeds_needed(said("less", 0.02, planned=-0.12), 0.05, LEVEL) == seeds_needed(twice, 0.05, LEVEL)
    no_margin = said("more", 0.0, planned=0.1)
    assert seeds_needed(no_margin, 0.05, LEVEL) == seeds_needed(twice, 0.05, LEVEL)
    factor = said("less", 1.1, scale="ratio", planned=1 / 1.21)
    assert seeds_needed(factor, 0.1, LEVEL) == seeds_needed(said("more", 1.1, scale="ratio"), 0.1, LEVEL)
    assert (assumed_text(planned, 0.05), assumed_text(factor, 0.1)) == ("+0.12", "× 0.826")


@pytest.mark.parametrize(
    ("expected", "margin", "planned", "scale"),
    [("more", 0.05, 0.05, "difference"), ("less", 0.05, 0.1, "difference"), ("more", 1.1, 1.05, "ratio"),
     ("less", 1.1, 1.2, "ratio"), ("at_most", 0.05, 0.1, "difference")],
)  # fmt: skip
def test_a_plan_within_the_margin_is_refused(expected: str, margin: float, planned: float, scale: str) -> None:
    with pytest.raises(ValueError, match="planned: expected an effect beyond the margin"):
        said(expected, margin, planned=planned, scale=scale)
