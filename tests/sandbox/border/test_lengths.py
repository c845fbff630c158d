"""Laws of sandbox/border/lengths.py, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lab.tasks.arithmetic_styles import columns
from sandbox.border.alarm import choose
from sandbox.border.lengths import (
    alarm_elsewhere,
    asked_power,
    is_branch,
    is_on_sums,
    least_power,
    lengths,
    markdown,
    orders,
    places,
    said,
)
from sandbox.border.study import BorderStudy
from sandbox.claims import CLAIMS, REGIMES
from sandbox.claims.border_arms import SUMS, at, sums
from sandbox.ledger.cells import cell, key

(BORDER,) = (regime for regime in REGIMES if regime.name == "border")
KL = "rollout_corr/k3_kl"


def row(place: tuple[int, str, str], seed: int, kl: float, falls: bool) -> tuple[str, dict[str, Any]]:
    """Key and row of a run on sums whose accuracy holds, or falls after the first evaluation."""
    arm = sums(*place)
    accuracies = [0.3, *[0.0 if falls else 0.4] * 8]
    return key(BORDER, arm, seed), {
        "regime": "border", "arm": arm.name, "seed": seed, "num_steps": 8,
        "evaluations": [[i, value] for i, value in enumerate(accuracies)],
        "first": {KL: kl, "response_length/mean": 10.0 * place[0]}, "series": {KL: [kl] * 20},
    }  # fmt: skip


def test_sums_are_the_same_gaps_on_another_task() -> None:
    """Digits set the task, its length and its teacher; engine, N and remedy are those of the map's arm."""
    made, like = cell(BORDER, sums(6, "r0.2", "R3"), 104).config, cell(BORDER, at("r0.2", "R3", 8), 104).config
    assert made.task.kind == "arithmetic" and (made.task.min_digits, made.task.max_digits) == (6, 6)
    assert made.algorithm.sampling.max_tokens > len(columns([999_999, 999_999], "+"))
    assert made.engine == like.engine and made.algorithm.replay == like.algorithm.replay
    assert made.algorithm.batch == like.algorithm.batch and made.cold_start.seed == 104
    assert len({sums(*place).name for place in SUMS}) == len(SUMS)


def test_places_count_collapses_and_multiply_means() -> None:
    """KL x N of the mean KL, N = 8, and the same with the mean length; rows of other configs are left out."""
    given = dict(
        row((6, "r0.2", "none"), seed, kl, falls) for seed, kl, falls in ((104, 0.04, True), (105, 0.06, False))
    )
    (one,) = places(lengths(given, BORDER)).to_dict("records")
    assert (one["n"], one["collapsed"], one["kl"]) == (2, 1, pytest.approx(0.05))
    assert (one["KL x N"], one["KL x length x N"]) == (pytest.approx(0.4), pytest.approx(24.0))
    assert lengths({"0123456789ab": next(iter(given.values()))}, BORDER).empty
    # A run that was never right: whether it collapsed is not known.
    assert lengths({name: one | {"evaluations": [[0, 0.0], [4, 0.0]]} for name, one in given.items()}, BORDER).empty


def test_a_number_orders_two_places_where_the_larger_one_collapses_more() -> None:
    long, short = ({"collapsed": c, "n": 10, "x": x} for c, x in ((9, 0.4), (1, 2.4)))
    assert not orders(long, short, "x") and orders(long, short | {"x": 0.1}, "x")
    assert not orders(long, short | {"collapsed": 9, "x": 0.1}, "x")


def test_the_page_says_which_number_holds() -> None:
    """KL x length x N is 0.05 x 60 x 8 = 24 against 0.05 x 20 x 8: it orders them, and KL x N, equal, does not."""
    given = dict([row((6, "r0.2", "none"), 104, 0.05, True), row((2, "r0.5", "none"), 104, 0.05, False)])
    assert "| 60 | r0.2 | no remedy | 0.05 | 1 of 1 |" in markdown(given, BORDER)
    told = said(given, BORDER)
    assert "`KL x length x N` orders the two lengths as their collapses do; `KL x N` does not" in told
    assert markdown({}, BORDER) == said({}, BORDER) == ""
    # Only one length: nothing to compare.
    assert said(dict([row((6, "r0.2", "none"), 104, 0.05, True)]), BORDER) == ""


def test_the_least_power_makes_both_places_alike() -> None:
    """A length three times as large and a KL a ninth: the square of the length, and the page says so.

    Engines whose long runs do not collapse more often at 5% say nothing; one that asks for more than another counts.
    """
    long, short = {"kl": 0.05, "length": 60.0}, {"kl": 0.45, "length": 20.0}
    assert least_power(long, short) == pytest.approx(2.0)
    given = dict(row((6, "r0.2", "none"), seed, 0.05, True) for seed in range(104, 109))
    given |= dict(row((2, "r0.5", "none"), seed, 0.45, False) for seed in range(104, 109))
    said_of_both = said(given, BORDER)
    assert asked_power(given, BORDER) == pytest.approx(2.0)
    one = dict([*given.items()][4:6])
    assert asked_power(one, BORDER) is None and "length^p" not in said(one, BORDER)
    for falling, power in ((3, 2.0), (4, 3.0)):  # Fisher's p is 0.08 with 3 of 5, and 0.024 with 4
        places_too = [row((6, "r0.1", "none"), 104 + i, 0.45 / 27, i < falling) for i in range(5)]
        assert asked_power(given | dict(places_too), BORDER) == pytest.approx(power)
    words = "for a power p above 3, by 4 of 5 long runs at a KL of 0.0167 (["
    assert words in said(given | dict(places_too), BORDER)
    assert "neither `KL x N` nor `KL x length x N` orders the two lengths as their collapses do;" in said_of_both
    assert "; `KL x length^p x N` does for a power p above 2 (" in said_of_both


def test_the_alarm_is_chosen_on_the_maps_task_alone() -> None:
    """Countdown's early seeds choose a limit on the KL between 0.1 and 0.3; sums are only tried on it."""
    countdown = {}
    for seed, kl, falls in ((100, 0.3, True), (101, 0.1, False), (102, 0.3, True), (103, 0.1, False)):
        _, one = row((2, "r0.5", "none"), seed, kl, falls)
        arm = at("r0.5", "none", 8)
        rising = [0.1] * 2 + [kl] * 18
        countdown[key(BORDER, arm, seed)] = one | {"arm": arm.name, "series": {KL: rising}, "num_steps": 8}
    # Early runs on sums, which stand at a large KL all along: with them a rule on the rise of the KL would be better.
    on_sums = dict(row((6, "r0.2", "none"), seed, 0.5, False) for seed in (20, 21, 104))
    alone, both = BorderStudy(countdown, BORDER), BorderStudy(countdown | on_sums, BORDER)
    assert alarm_elsewhere(alone.alarms, countdown, BORDER) == ""
    assert BorderStudy(on_sums, BORDER).alarms == [] and alarm_elsewhere([], on_sums, BORDER) == ""
    assert both.alarms == alone.alarms
    said = alarm_elsewhere(both.alarms, both.rows, BORDER)
    assert choose(list(countdown.values()))[0][0].words in said
    assert "the 3 runs on sums" in said and "3 of 3" in said and "no run collapses in time" in said
    assert [is_on_sums(one) for one in (*countdown.values(), *on_sums.values())] == [False] * 4 + [True] * 3


def test_branches_are_the_rows_of_arms_made_by_branches() -> None:
    """An arm's rows are told apart from whole runs by its name, in every claim."""
    arms = [arm for claim in CLAIMS for arm in claim.arms]
    assert sum(arm.made_by == "branch" for arm in arms) == 9
    assert all(is_branch({"arm": arm.name}) == (arm.made_by == "branch") for arm in arms)
