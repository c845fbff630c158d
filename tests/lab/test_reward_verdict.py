"""Laws of the verdict on the reward: the level before training counts, noise does not, and what was lost is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.config.load import config_hash, to_yaml
from lab.levels import highest, levels, noise, trailing_mean
from lab.verdict import ENTROPY, KL, REWARD, Verdict, VerdictRules, judge

LEDGER = VerdictRules(min_steps=80, window=40, patience=40, early_steps=40)
"""The rules of configs/claims/base.yaml on 64 responses per step."""


def verdict_on(rewards: list[float], rules: VerdictRules | None = None) -> Verdict:
    """The verdict on a run with these rewards from step 1 on, and nothing amiss in KL and entropy."""
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.9}]
    records += [{"step": i, REWARD: r, KL: 1e-4, ENTROPY: 0.5} for i, r in enumerate(rewards, start=1)]
    return judge(records, rules)


def rewards_of(p: float, num_steps: int, seed: int, alike: bool) -> list[float]:
    """Mean rewards of 8 prompts x 8 responses per step at a true level of p.

    `alike`: a prompt is solved by all of its responses or by none, which is nearer to the ledger's runs than draws
    one by one: the standard deviation of a step is 0.17 at p = 0.4 and not 0.06, and `hot`, minirl-N1, had 0.16.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = 8 if alike else 64
    return (torch.rand(num_steps, draws, generator=generator) < p).double().mean(1).tolist()


# -- the level before training


@pytest.mark.parametrize("rules", [None, LEDGER], ids=["default", "ledger"])
def test_a_run_that_dies_at_once_has_collapsed(rules: VerdictRules | None) -> None:
    """The first global step samples before any update: its reward is the peak, whatever the window; accuracy is not."""
    verdict = verdict_on([0.219] + [0.0] * 120, rules)
    (reason,) = verdict.reasons
    assert verdict.word == "collapsed" and reason.rule == "reward_fall" and reason.step in (3, 4)
    assert reason.sentence.endswith("below 0.5 of its peak 0.219 (step 1).") and reason.recovered is False
    assert reason.value is not None and reason.threshold is not None and reason.value < reason.threshold < 0.219 / 2


def test_the_reason_names_peak_and_steps() -> None:
    """0.1095 at step 2 is not below half of 0.219 less its noise; 0.073 at step 3 is."""
    verdict = verdict_on([0.219] + [0.0] * 39)
    assert verdict.reasons[0].sentence == "The reward fell to 0.073 at step 3, below 0.5 of its peak 0.219 (step 1)."
    assert verdict.summary["reward_first"] == verdict.summary["reward_peak"] == 0.219
    later = verdict_on([0.2] * 10 + [0.6] * 10 + [0.0] * 20)
    assert later.reasons[0].sentence == "The reward fell to 0.24 at step 23, below 0.5 of its peak 0.6 (step 15)."


def test_a_fall_within_the_first_window_is_seen() -> None:
    """A run that keeps its level for a third of its window, then falls: a full window never sees the height."""
    rewards = [0.3] * 13 + [0.04] * 387
    assert max(v for _, v in trailing_mean(list(enumerate(rewards)), 40)[39:]) < 0.13
    verdict = verdict_on(rewards, LEDGER)
    assert verdict.word == "collapsed" and verdict.reasons[0].step <= 40
    assert verdict.reasons[0].sentence.endswith("its peak 0.3 (step 13).")


# -- noise


@pytest.mark.parametrize("p", [0.2, 0.3])
def test_the_noise_of_small_batches_is_no_collapse(p: float) -> None:
    """Of runs that stay at p none of 100 falls by binomial noise, and at most 2 of 200 where responses are alike.

    Of 20,000 none fell by binomial noise; with alike responses 0.22% at p = 0.2 and 0.03% at 0.3. Without the margin
    that would be 12% and 6%: the first step's noise is a peak then, and the level itself lies below half of it.
    """
    words = [verdict_on(rewards_of(p, 200, seed, alike=False), LEDGER).word for seed in range(100)]
    assert words == ["stable"] * 100
    noisy = [rewards_of(p, 200, seed, alike=True) for seed in range(200)]
    assert sum(verdict_on(rewards, LEDGER).word == "collapsed" for rewards in noisy) <= 2
    without = LEDGER.model_copy(update={"noise_margin": 0.0})
    assert sum(verdict_on(rewards, without).word == "collapsed" for rewards in noisy[:100]) >= 3


def test_the_first_step_adds_no_false_alarm_to_the_default_rules() -> None:
    """32 prompts x 8 alike responses over 70 steps, as the demo has them: at most 2 of 400 runs at 0.3 fall."""
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(400, 70, 32, generator=generator) < 0.3).double().mean(2).tolist()
    assert sum(verdict_on(run).word != "stable" for run in rewards) <= 2


def test_noise_is_the_standard_deviation_of_a_step_around_any_slow_trend() -> None:
    """The successive differences give it with a trend as without; it is 0 for a line of one value or none."""
    generator = torch.Generator().manual_seed(0)
    flat = (0.3 * torch.randn(4000, generator=generator)).tolist()
    for slope in (0.0, 0.01):
        assert noise([(i, v + slope * i) for i, v in enumerate(flat)]) == pytest.approx(0.3, rel=0.03)
    assert noise([]) == noise([(1, 0.5)]) == 0.0


def test_a_short_mean_counts_less_its_standard_error() -> None:
    """n values of a window of w count less margin s sqrt(1/n - 1/w), and a full window counts whole."""
    values = [(i, float(i % 2)) for i in range(1, 9)]  # s = sqrt(1/2)
    found = levels(values, window=4, margin=2.0)
    lost = [level.value - level.sure for level in found]
    assert lost == pytest.approx([2 * (0.5 * (1 / n - 1 / 4)) ** 0.5 for n in (1, 2, 3, 4, 4, 4, 4, 4)])
    assert [(level.step, level.value) for level in found] == trailing_mean(values, 4)
    assert highest(found).step == 4 and highest(levels(values, 4, 0.0)).step == 1


def test_the_trailing_mean_uses_no_future() -> None:
    """A value moves the mean at its own step and the next window - 1 only, by 1 / window where the window is full."""
    flat = [(i, 1.0) for i in range(10)]
    bumped = [(i, 1.0 + 3.0 * (i == 4)) for i in range(10)]
    difference = [b - a for (_, a), (_, b) in zip(trailing_mean(flat, 3), trailing_mean(bumped, 3), strict=True)]
    assert difference == pytest.approx([0, 0, 0, 0, 1, 1, 1, 0, 0, 0])


# -- what was lost


def test_a_run_that_rose_again_is_collapsed_and_says_so() -> None:
    """`recovered` compares the end with the highest level so far, not with that before the first fall."""
    fall = [0.4] * 10 + [0.05] * 10
    verdict = verdict_on(fall + [0.31] * 10)
    (reason,) = verdict.reasons
    assert verdict.word == "collapsed" and reason.recovered is True and verdict.to_json()["reasons"][0]["recovered"]
    assert reason.sentence == (
        "The reward fell to 0.19 at step 13, below 0.5 of its peak 0.4 (step 5); it recovered and ends at 0.31."
    )
    assert verdict.summary["drawdown"] == pytest.approx(1 - 0.31 / 0.4)
    for end, recovered in ((0.21, True), (0.19, False)):
        assert verdict_on(fall + [end] * 10).reasons[0].recovered is recovered
    again = verdict_on(fall + [0.9] * 10 + [0.3] * 10)  # above the half of 0.4, below that of 0.9
    assert again.reasons[0].recovered is False and "recovered" not in again.reasons[0].sentence
    others = judge([{"step": 1, KL: float("nan")}])
    assert others.reasons[0].recovered is None


def test_the_summary_has_first_peak_final_and_drawdown() -> None:
    """Three trailing means, and 1 - final / peak, which is absent where no reward is above 0."""
    summary = verdict_on([0.3] * 10 + [0.8] * 10 + [0.6] * 10).summary
    wanted = {"reward_first": 0.3, "reward_peak": 0.8, "reward_final": 0.6, "drawdown": 0.25}
    assert {name: summary[name] for name in wanted} == pytest.approx(wanted)
    zero = verdict_on([0.0] * 30).summary
    assert zero["reward_peak"] == zero["reward_final"] == 0.0 and "drawdown" not in zero
    assert not any(name.startswith("reward") for name in judge([{"step": 0, "eval/accuracy": 0.5}]).summary)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 8))
def test_the_drawdown_is_a_fraction(rewards: list[float], window: int) -> None:
    """The end is never above the peak, at any length and window."""
    summary = verdict_on(rewards, VerdictRules(window=window)).summary
    assert summary["reward_final"] <= summary["reward_peak"] + 1e-12 and summary["reward_first"] <= max(rewards) + 1e-12
    assert 0 <= summary.get("drawdown", 0) <= 1


def test_a_stable_run_that_ends_well_below_its_start_is_remarked_on() -> None:
    """By the fraction of its rules; a run that ends higher is not, nor one that collapsed, nor one too short."""
    decline = [0.3 - 0.004 * i for i in range(35)]
    verdict = verdict_on(decline)
    (remark,) = verdict.remarks
    assert verdict.word == "stable" and verdict.to_json()["remarks"] == [remark]
    assert remark == "The reward ends at 0.172, below 0.75 of its 0.3 at the start (step 1)."
    assert verdict_on(decline, VerdictRules(end_fraction=0.5)).remarks == ()
    assert verdict_on(decline[:15]).remarks == () and verdict_on([0.4] * 20 + [0.0] * 20).remarks == ()
    assert verdict_on([0.3] * 10 + [0.6] * 10 + [0.35] * 20).remarks == ()


def test_noise_gets_no_remark() -> None:
    """Of 300 runs that stay at 0.3 with alike responses at most 30 are said to have lost (of 2,000, 3 to 4% were)."""
    for rules, num_steps in ((VerdictRules(reward_fall=0.01), 60), (LEDGER, 120)):
        found = [verdict_on(rewards_of(0.3, num_steps, seed, alike=True), rules) for seed in range(300)]
        assert sum(bool(verdict.remarks) for verdict in found) <= 30


# -- runs on disk


def test_rules_newer_than_a_run_leave_its_hash() -> None:
    """At their defaults they are in no dump, so that a config keeps the hash of its folder; a printed one has them."""
    assert config_hash(VerdictRules()) == "5652457ee46b"  # as before they were there
    for name, other in (
        ("noise_margin", VerdictRules(noise_margin=0.5)),
        ("end_fraction", VerdictRules(end_fraction=0.5)),
    ):
        assert config_hash(other) != config_hash(VerdictRules()) and other.model_dump()[name] == 0.5
        assert f"{name}: " in to_yaml(VerdictRules())
