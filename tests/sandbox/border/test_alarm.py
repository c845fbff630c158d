"""Laws of sandbox/border/alarm.py: when an alarm goes off, what counts as in time, and what a choice finds."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from sandbox.border.alarm import BASE, AlarmRule, alarm_at, by_updates, choose, share_text, shares, tried
from sandbox.claims import CLAIMS
from sandbox.ledger.course import fall_step

NUM_WINDOWS = 20
KL, REWARD, ENTROPY = "rollout_corr/k3_kl", "reward/mean", "actor/entropy"


def run(
    metric: str, values: list[float | None], collapses_at: int | None = None, num_steps: int = NUM_WINDOWS
) -> dict[str, Any]:
    """A row with one metric; its accuracy falls to 0 at `collapses_at`, or holds."""
    fall = num_steps + 1 if collapses_at is None else collapses_at
    evaluations = [[step, 0.4 if step < fall else 0.0] for step in range(num_steps + 1)]
    return {"series": {metric: values}, "evaluations": evaluations, "num_steps": num_steps, "arm": "grpo-N8"}


def rising(window: int, low: float = 1.0, high: float = 3.0) -> list[float | None]:
    return [low if i < window else high for i in range(NUM_WINDOWS)]


def test_an_alarm_goes_off_at_the_end_of_the_first_window_beyond() -> None:
    """Above for what is feared to rise, below for what is feared to fall; relative, never within the beginning."""
    assert alarm_at(AlarmRule(KL, False, 2.0), run(KL, rising(5))) == 6 / NUM_WINDOWS
    assert alarm_at(AlarmRule(KL, False, 3.0), run(KL, rising(5))) is None
    assert alarm_at(AlarmRule(REWARD, False, 2.0), run(REWARD, rising(5, 3.0, 1.0))) == 6 / NUM_WINDOWS
    assert alarm_at(AlarmRule(KL, False, 0.5), run(KL, rising(5))) == 1 / NUM_WINDOWS
    assert alarm_at(AlarmRule(KL, True, 0.5), run(KL, rising(5))) == (BASE + 1) / NUM_WINDOWS


@pytest.mark.parametrize(("num_steps", "last"), [(20, 6), (25, 8), (50, 15), (400, 120)])
def test_an_alarm_waits_for_the_last_step_of_its_window(num_steps: int, last: int) -> None:
    """The sixth window's last step: of 25 steps 8, since windows then hold one or two. A collapse at that step is not
    warned of: the window's mean has the step in it."""
    inside = [step for step in range(1, num_steps + 1) if (step - 1) * NUM_WINDOWS // num_steps == 5]
    assert inside[-1] == last
    row = run(KL, rising(5), num_steps=num_steps)
    rule = AlarmRule(KL, False, 2.0)
    assert alarm_at(rule, row) == last / num_steps
    # The level falls below half at the second evaluation of 0.
    found = [tried(rule, [run(KL, rising(5), last + more, num_steps)]).in_time for more in (-1, 0)]
    assert found == [0, 1]


def test_an_alarm_may_come_between_the_first_low_evaluation_and_the_level() -> None:
    """At step 6 it is before the level shows the fall, at step 7, but not before the first evaluation of 0."""
    rule, rows = AlarmRule(KL, False, 2.0), [run(KL, rising(5), fall) | {"seed": fall} for fall in (6, 7)]
    assert shares(rule, rows)[0].startswith("2 of 2 ") and shares(rule, rows, fall_step)[0].startswith("1 of 2 ")


def test_a_relative_rule_knows_no_units() -> None:
    values = [1e-3 * value for value in rising(7) if value is not None]
    assert alarm_at(AlarmRule(KL, True, 2.0), run(KL, [*values])) == 8 / NUM_WINDOWS
    assert alarm_at(AlarmRule(KL, True, 3.5), run(KL, [*values])) is None


@pytest.mark.parametrize("values", [[], [None] * NUM_WINDOWS, [0.0] * NUM_WINDOWS])
def test_no_data_is_no_alarm(values: list[float | None]) -> None:
    assert alarm_at(AlarmRule(KL, True, 0.1), run(KL, values)) is None


def test_an_alarm_is_in_time_late_false_or_silent() -> None:
    """One run of each kind, late where both are seen at once, and one that does not count: its end is unknown."""
    rows = [
        run(KL, rising(5), collapses_at=15), run(KL, rising(10), collapses_at=10), run(KL, rising(99), collapses_at=10),
        run(KL, rising(5)), run(KL, rising(99)), run(KL, rising(99)), run(KL, rising(5)) | {"evaluations": []},
    ]  # fmt: skip
    found = tried(AlarmRule(KL, False, 2.0), rows)
    assert (found.num_collapsed, found.in_time, found.num_others, found.false) == (3, 1, 3, 1)
    assert found.score == 0.0
    # Levels are means of three evaluations, so that the fall at step 15 is seen at 16; the alarm is at 6.
    assert found.lead == pytest.approx(10 / NUM_WINDOWS)


def test_the_choice_finds_the_limit_that_was_planted() -> None:
    """Runs that collapse pass 2 by much, others do not: the best rule tells them apart, and does so on new runs."""
    generator = np.random.default_rng(0)

    def draw(collapses: bool) -> dict[str, Any]:
        values = generator.uniform(0.8, 1.8, NUM_WINDOWS)
        values[8:] += 2.0 * collapses
        return run(KL, values.tolist(), collapses_at=15 if collapses else None)

    rows, others = ([draw(i % 2 == 0) for i in range(40)] for _ in range(2))
    (rule, score), *_ = choose(rows)
    assert rule.metric == KL and score == 1.0
    assert tried(rule, others).score > 0.9


def test_runs_of_one_kind_choose_nothing() -> None:
    assert choose([run(KL, rising(5))]) == [] and math.isnan(tried(AlarmRule(KL, False, 2.0), []).score)


def test_every_arm_tells_its_updates_per_rollout() -> None:
    """Rows are put together by the N of their arms, for all arms of the ledger that train at the border."""
    arms = {arm for claim in CLAIMS for arm in (*claim.arms, *claim.also) if claim.home == "border"}
    found = by_updates([{"arm": arm.name} for arm in arms])
    assert list(found) == [1, 2, 4, 8, 16]
    numbers = {arm.name: arm.num_minibatches for arm in arms}
    assert all(numbers[row["arm"]] == n for n, own in found.items() for row in own)


def test_a_metric_that_tells_n_is_not_chosen() -> None:
    """The entropy is low at N = 8, where most runs collapse, and no lower in those; the KL tells some collapses at
    each N. Over all runs together the entropy would have the larger score, over N it has none."""
    drawn = []
    for n, low, falling in ((1, 1.0, 2), (8, 0.1, 8)):
        for number in range(10):
            falls = number < falling
            series = {ENTROPY: [low] * NUM_WINDOWS, KL: [3.0 if falls and number % 2 else 1.0] * NUM_WINDOWS}
            drawn.append(run(KL, [], collapses_at=10 if falls else None) | {"arm": f"grpo-N{n}", "series": series})
    found = {rule.metric: (rule, score) for rule, score in choose(drawn, (KL, ENTROPY))}
    assert found[KL][1] == pytest.approx(0.5) and found[ENTROPY][1] == 0.0
    assert tried(AlarmRule(ENTROPY, False, 0.5), drawn).score == pytest.approx(0.6)
    assert tried(found[KL][0], drawn).score == pytest.approx(0.5)


def test_a_share_of_independent_runs_has_its_exact_interval() -> None:
    """Clopper and Pearson, where every run has a seed of its own: 0 of n ends at 1 - 0.025^(1/n)."""
    assert share_text([(seed, False) for seed in range(10)]) == f"0 of 10 (0% to {1 - 0.025**0.1:.0%})"
    assert share_text([(seed, seed < 3) for seed in range(10)]) == "3 of 10 (7% to 65%)" and share_text([]) == "no run"


def test_runs_of_one_seed_that_end_alike_count_once() -> None:
    """Ten copies of each of 40 runs, under its seed, say as much as the 40: the interval is nearly the same."""
    once = [(seed, seed % 4 == 0) for seed in range(40)]
    ends = [re.findall(r"(\d+)%", share_text(outcomes)) for outcomes in (once, once * 10)]
    assert all(abs(int(a) - int(b)) <= 1 for a, b in zip(*ends, strict=True))
    # Runs that differ within a seed as much as between seeds are independent.
    assert share_text([(i % 10, i // 10 % 4 == 0) for i in range(400)]) == share_text(
        [(i, i % 4 == 0) for i in range(400)]
    )
