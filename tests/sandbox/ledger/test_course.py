"""The course of a run: level, peak, fall and area of pi's held-out accuracy, on courses made by hand."""

from __future__ import annotations

import math

import pytest

from sandbox.ledger.course import (
    area,
    collapse_step,
    collapsed,
    drawdown,
    evaluations,
    fall_step,
    final,
    initial,
    lasting,
    peak,
)


def course(*values: float, num_steps: int = 0) -> dict:
    """A row evaluated at every step from 0 on."""
    return {"num_steps": num_steps or len(values) - 1, "evaluations": [[i, v] for i, v in enumerate(values)]}


def test_a_run_that_dies_at_once_has_collapsed():
    """0.3 before training and nothing after: the level before training is the peak, and the fall begins at once."""
    row = course(0.3, *[0.0] * 20)
    assert initial(row) == peak(row) == 0.3 and final(row) == 0.0
    assert drawdown(row) == 1.0 and collapsed(row) == 1.0
    assert collapse_step(row) == 2  # at step 1 the level is (0.3 + 0) / 2, half of the peak, not below


def test_a_run_that_falls_and_rises_again_has_not_collapsed():
    """The end decides, so a dip is no collapse; the same course without its recovery is one, from the dip on."""
    dip = [0.3, 0.4, 0.4, 0.4, *[0.0] * 6]
    assert collapsed(course(*dip, *[0.38] * 10)) == 0.0 and collapse_step(course(*dip, *[0.38] * 10)) is None
    row = course(*dip, *[0.05] * 10)
    # levels at steps 4 to 6 are 0.27, 0.13, 0: the one at step 5 is the first below half of 0.4
    assert collapsed(row) == 1.0 and collapse_step(row) == 5


def test_one_lucky_evaluation_is_no_peak():
    """0.3 throughout with one 0.9: the peak is the mean of three, 0.5, so 0.3 is not below half of it."""
    row = course(*[0.3] * 8, 0.9, *[0.3] * 12)
    assert peak(row) == pytest.approx(0.5) and collapsed(row) == 0.0


def test_area_is_the_mean_after_step_0_and_keeps_the_last_value():
    """Step 0 counts for nothing; a run planned for eight steps that stopped at four has its last value four times."""
    assert area(course(0.9, 0.1, 0.2, 0.3, 0.4)) == pytest.approx(0.25)
    assert area(course(0.9, 0.1, 0.2, 0.3, 0.4, num_steps=8)) == pytest.approx((1.0 + 4 * 0.4) / 8)
    assert math.isnan(area(course(0.9)))


def test_a_low_last_quarter_with_a_high_last_level():
    """The mean of the last quarter decides that a run collapsed; the step is then the quarter's first."""
    row = course(0.6, *[0.6] * 15, 0.0, 0.0, 0.3, 0.3, 0.5)
    assert final(row) == pytest.approx(0.22) and collapsed(row) == 1.0
    assert collapse_step(row) == 15


def test_a_run_that_a_metric_ended_has_collapsed():
    """A gradient that is not finite at step 6 of 50 ends a run at its best level, or before any evaluation."""
    dead = course(*[0.3] * 6, num_steps=50) | {"rules": ["non_finite"], "last_step": 6}
    assert collapsed(dead) == 1.0 and collapse_step(dead) == 6 and lasting(dead) == pytest.approx(0.12)
    unborn = {"num_steps": 50, "evaluations": [], "rules": ["non_finite"], "last_step": 1}
    assert collapsed(unborn) == 1.0 and lasting(unborn) == pytest.approx(0.02)
    # A metric alone that was not finite, in a run that went on to its end, ends nothing.
    whole = course(*[0.3] * 51) | {"rules": ["non_finite"], "last_step": 50}
    assert collapsed(whole) == 0.0 and fall_step(whole) is None
    fallen = course(0.3, *[0.0] * 20) | {"rules": ["non_finite"], "last_step": 9}
    assert collapse_step(fallen) == 2


def test_the_fall_begins_before_the_level_shows_it():
    """At step 5 the mean of three is the first below half of 0.4; the evaluation of step 4 was low already."""
    row = course(0.3, 0.4, 0.4, 0.4, *[0.0] * 16)
    assert collapse_step(row) == 5 and fall_step(row) == 4
    # Low is below half of the highest level before, 0.4, not of the level there.
    assert fall_step(course(0.4, 0.4, 0.4, 0.18, *[0.15] * 17)) == 3
    # A single low evaluation before it is none of the fall.
    assert fall_step(course(0.3, 0.4, 0.1, 0.4, *[0.0] * 16)) == 4
    assert fall_step(course(*[0.3] * 21)) is None
    # A low last quarter with a high last level is dated by the quarter, whose first evaluation may be high.
    assert fall_step(course(0.6, *[0.6] * 15, 0.0, 0.0, 0.3, 0.3, 0.5)) == 15


def test_lasting_is_the_share_before_the_collapse():
    """1 for a run that stands, and below 1 for one that collapses, however late; nan where nothing is known."""
    assert lasting(course(*[0.3] * 21)) == 1.0
    assert lasting(course(0.3, *[0.0] * 20)) == pytest.approx(2 / 20)
    assert lasting(course(*[0.6] * 16, 0.0, 0.0, 0.3, 0.3, 0.5)) == pytest.approx(15 / 20)
    assert math.isnan(lasting(course(0.0, 0.0)))


def test_an_old_row_has_its_evaluations_from_its_windows():
    """Twenty windows of a run evaluated every tenth of it: step 0 is in the first, the others at their ends."""
    series = [0.3, 0.32, *[None if i % 2 else 0.4 for i in range(1, 19)]]
    row = {"num_steps": 400, "series": {"eval/accuracy": series}}
    assert evaluations(row)[:3] == [(0.0, 0.3), (40.0, 0.32), (80.0, 0.4)] and initial(row) == 0.3
    assert evaluations(row)[-1] == (400.0, 0.4) and area(row) == pytest.approx((0.32 + 9 * 0.4) / 10)
