"""Laws of the ledger's power.py and hindsight.py: seeds that suffice and no more, spreads by their order, and what is
out of reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sandbox.claims import REGIMES
from sandbox.ledger import page
from sandbox.ledger.cells import key
from sandbox.ledger.claim import FRESH, Arm, Claim, Measure, Prediction
from sandbox.ledger.hindsight import as_found
from sandbox.ledger.power import (
    LEAST,
    MOST,
    MOST_HOURS,
    POWER,
    SEARCHED,
    assumed_text,
    level_of,
    needs,
    power,
    seeds_needed,
)
from sandbox.ledger.spreads import Spreads
from sandbox.ledger.verdicts import findings

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
    """Rows whose arms have this very SD; the seeds of different arms are in different orders, so that they do not
    matter."""
    ramp = np.linspace(-1.0, 1.0, seeds)
    values = sd * ramp / ramp.std(ddof=1)
    orders = [np.random.default_rng(place).permutation(seeds) for place in range(len(arms))]
    return {
        key(regime, arm, seed): {
            "x": 1.0 + float(values[order[seed]]), "regime": regime.name, "arm": arm.name, "seed": seed,
            "seconds": seconds,
        }
        for arm, order in zip(arms, orders, strict=True)
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
    found = [Spreads(ledger, REGIMES, r).of(one, ledger[0]) for r in (own | home | far, home | far, far, {})]
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
     ("less", 1.1, 1.2, "ratio"), ("at_most", 0.05, 0.1, "difference"), ("same", 0.05, -0.06, "difference"),
     ("same", 1.1, 0.9, "ratio")],
)  # fmt: skip
def test_a_plan_at_which_the_prediction_fails_is_refused(
    expected: str, margin: float, planned: float, scale: str
) -> None:
    with pytest.raises(ValueError, match="planned: expected an effect at which the prediction holds"):
        said(expected, margin, planned=planned, scale=scale)


def test_a_planned_effect_inside_both_bounds_has_the_power_of_both_tests() -> None:
    """Two one-sided tests of Student's at an effect off the centre, on draws: 0.04 is a bound for 4,000 of them."""
    seeds, sd, level, draws = 12, 0.03, 0.01, np.random.default_rng(6)
    for effect in (0.0, -0.02):
        values = effect + draws.normal(0.0, sd, (4000, seeds)) - draws.normal(0.0, sd, (4000, seeds))
        error = values.std(1, ddof=1) / math.sqrt(seeds)
        far = stats.t.isf(level, seeds - 1) * error
        share = float(np.mean((values.mean(1) + far < 0.05) & (values.mean(1) - far > -0.05)))
        found = power(said("same", 0.05, planned=effect), sd * math.sqrt(2.0), seeds, level, is_paired=True)
        assert 0.15 < share < 0.95 and abs(found - share) < 0.04
    plain, centred = (power(one, sd, seeds, level) for one in (said("same"), said("same", planned=0.0)))
    assert plain == pytest.approx(centred, abs=1e-12)


def test_where_seeds_matter_the_spread_is_that_of_the_pairs() -> None:
    """Arms that share what a seed does to them are compared within it: a smaller SD, and one degree of freedom a seed;
    not where an effect is in units of an arm's SD, nor with fewer than eleven seeds."""
    draws, one = np.random.default_rng(4), said(margin=0.05)
    shared, own = draws.normal(0.0, 0.1, 16), draws.normal(0.0, 0.02, (2, 16))
    kept = {
        key(HOME, arm, seed): {
            "x": shared[seed] + own[place, seed], "regime": HOME.name, "arm": arm.name, "seed": seed, "seconds": 36.0,
        }
        for place, arm in enumerate((ONE, TWO)) for seed in range(16)
    }  # fmt: skip
    found = Spreads([claim(one)], REGIMES, kept).of(one, claim(one))
    assert found.is_paired and found.of == "own arms, paired"
    assert found.sd == pytest.approx((own[0] - own[1]).std(ddof=1))
    seeds = seeds_needed(one, found.sd, LEVEL, is_paired=True)
    assert seeds is not None
    quantile = stats.t.isf(LEVEL, seeds - 1)
    expected = stats.nct.sf(quantile, seeds - 1, 0.05 / found.sd * math.sqrt(seeds))
    assert power(one, found.sd, seeds, LEVEL, is_paired=True) == pytest.approx(expected) and expected >= POWER
    assert needs([claim(one)], REGIMES, kept)[1].seeds < needs([claim(one)], REGIMES, rows(HOME, 0.1, 16))[1].seeds
    in_sds, few = said("less", 0.0), {name: row for name, row in kept.items() if row["seed"] < 10}
    assert not Spreads([claim(in_sds)], REGIMES, kept).of(in_sds, claim(in_sds)).is_paired
    assert not Spreads([claim(one)], REGIMES, few).of(one, claim(one)).is_paired


def test_a_second_trial_is_planned_at_what_the_first_one_found() -> None:
    """Its power is that at the effects it names, by place; predictions, and so verdicts, are those of the first."""
    kept = rows(HOME, 0.05, 12)
    first = claim(said(planned=0.15), said("at_most", 0.1), fresh_seeds=8)
    again = first.again(2, 300, 30, planned={0: 0.084, 1: -0.04})
    assert again.predictions == first.predictions and (first.as_planned, first.planned) == (first.predictions, {})
    assert [one.planned for one in again.as_planned] == [0.084, -0.04]
    need = needs([first, again], REGIMES, kept)[2]
    assert need.limiting.planned == 0.084
    assert need.power(30) == pytest.approx(power(said(planned=0.084), 0.05, 30, level_of(2)))
    # R3 may cost at most a margin: the plan is a gain, so the distance is the margin and the gain together.
    gain, twice = said("at_most", 0.1, planned=-0.04), said("more", 0.14)
    assert power(gain, 0.1, 20, LEVEL) == pytest.approx(power(twice, 0.1, 20, LEVEL))
    equal, apart = said("at_most", 0.25, EVENT), said("at_most", 0.25, EVENT, planned=-0.5)
    assert power(apart, 0.5, 20, LEVEL) > power(equal, 0.5, 20, LEVEL)
    assert power(equal, 0.5, 20, LEVEL) > power(replace(equal, planned=0.2), 0.5, 20, LEVEL)
    with pytest.raises(ValueError, match="planned: expected a place below 2, got 2"):
        first.again(2, 300, 30, planned={2: 0.5})
    with pytest.raises(ValueError, match="planned: expected an effect at which the prediction holds"):
        first.again(2, 300, 30, planned={0: 0.05})


def test_a_claim_with_deciding_seeds_is_not_called_out_of_reach() -> None:
    """It has its runs, or will: the seeds that it needs are a number like any other."""
    kept = rows(HOME, 0.05, 12)
    words = [page.power_row(needs([claim(said(margin=0.005), **fields)], REGIMES, kept)[1])[4]
             for fields in ({}, {"fresh_seeds": 8})]  # fmt: skip
    assert words[0] == f"{words[1]} (out of reach)" and int(words[1]) > MOST


def looked_back(columns: dict[Arm, np.ndarray[Any, Any]], *predictions: Prediction) -> Any:
    """The needs of a claim on these numbers of its arms at the effects found, and its finding."""
    seeds = len(next(iter(columns.values())))
    own = claim(*predictions, fresh_seeds=seeds)
    kept = {
        key(HOME, arm, FRESH + seed): {
            "x": float(value), "regime": HOME.name, "arm": arm.name, "seed": FRESH + seed, "seconds": 36.0,
        }
        for arm, values in columns.items() for seed, value in enumerate(values)
    }  # fmt: skip
    (one,) = (one for one in findings([own], REGIMES, kept) if one.decides)
    return as_found(one, needs([own], REGIMES, kept)[1]), one


def test_what_a_claim_lacks_is_seeds_or_a_distance_from_its_margin() -> None:
    """The seeds that the found effect needs are those of its own test; within a standard error of the margin, or on
    its other side, no plan for the other side counts."""
    order = np.random.default_rng(1).permutation(12)
    ramp = np.linspace(-1.0, 1.0, 12)
    noise = 0.05 * ramp / ramp.std(ddof=1)
    near, far = said("more", 0.05), said("more", 0.02)

    found, one = looked_back({ONE: 0.08 + noise, TWO: noise[order]}, near)
    assert one.outcomes[0].effect.test == "Welch" and one.outcomes[0].effect.mean == pytest.approx(0.08)
    plan = seeds_needed(replace(near, planned=0.08), 0.05, level_of(1))
    assert found.seeds == pytest.approx(plan, abs=1) and not found.is_at_margin
    assert found.hours == pytest.approx(found.seeds * 2 * 36.0 / 3600) and found.is_beyond == (found.hours > MOST_HOURS)

    found, _ = looked_back({ONE: 0.06 + noise, TWO: noise[order]}, near)
    assert found.is_at_margin and found.is_beyond
    found, _ = looked_back({ONE: 0.05 + noise, TWO: noise[order]}, near)
    assert found.is_at_margin and found.seeds is None and math.isnan(found.hours)

    # One of two is on the wrong side: it must be found to fail, at half of the level, whatever the other needs.
    found, one = looked_back({ONE: 0.03 + noise, TWO: noise[order]}, near, far)
    assert [outcome.p[0] > 0.5 for outcome in one.outcomes] == [True, False]
    plan = seeds_needed(said("at_most", 0.05, planned=0.03), 0.05, level_of(1) / 2)
    assert found.seeds == pytest.approx(plan, abs=1)


def test_looking_back_uses_the_test_of_each_kind() -> None:
    """Events by the exact test, log-rank by its statistic; `same` needs both of its sides, or either to fail."""
    events = np.array([1.0] * 9 + [0.0] * 3), np.array([1.0] * 3 + [0.0] * 9)
    found, _ = looked_back({ONE: events[0], TWO: events[1]}, said("more", 0.25, EVENT))
    plan = seeds_needed(said("more", 0.25, EVENT, planned=0.5), 0.5, level_of(1))
    assert found.seeds is not None and plan is not None and abs(found.seeds - plan) <= 2
    found, _ = looked_back({ONE: events[0]}, said("more", 0.0, EVENT, control=0.5))
    share = np.array([stats.binom.sf(stats.binom.isf(level_of(1), n, 0.5), n, 0.75) for n in range(5, 60)])
    assert share[found.seeds - 5] >= POWER > share[found.seeds - 6]

    draws = np.random.default_rng(2)
    times = np.minimum(1.0, draws.exponential(0.6, 12)), np.minimum(1.0, draws.exponential(1.5, 12))
    found, one = looked_back({ONE: times[0], TWO: times[1]}, said("less", 0.0, TIME))
    wanted = stats.norm.isf(level_of(1)) + stats.norm.ppf(POWER)
    assert found.seeds == math.ceil(12 * (wanted / stats.norm.isf(one.outcomes[0].p[0])) ** 2)

    order, ramp = np.random.default_rng(1).permutation(12), np.linspace(-0.08, 0.08, 12)
    inside, _ = looked_back({ONE: 0.02 + ramp, TWO: ramp[order]}, said("same", 0.06))
    at_most, _ = looked_back({ONE: 0.02 + ramp, TWO: ramp[order]}, said("at_most", 0.06))
    outside, _ = looked_back({ONE: 0.10 + ramp, TWO: ramp[order]}, said("same", 0.06))
    more, _ = looked_back({ONE: 0.10 + ramp, TWO: ramp[order]}, said("more", 0.06))
    assert inside.seeds >= at_most.seeds and outside.seeds > more.seeds
