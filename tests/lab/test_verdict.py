"""Laws of the verdict: each rule fires on its own planted collapse, none on a healthy noisy run; nothing is guessed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.verdict import ENTROPY, KL, REWARD, Verdict, VerdictRules, judge

NUM_STEPS = 60
Records = list[dict[str, Any]]


def healthy(seed: int = 0, num_steps: int = NUM_STEPS) -> Records:
    """A run that learns: rising reward, falling entropy, flat KL, each with the noise of a small batch."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_steps, 3, generator=generator, dtype=torch.float64).tolist()
    return [
        {
            "step": i + 1,
            REWARD: min(1.0, max(0.0, 0.3 + 0.5 * i / num_steps + 0.08 * noise[i][0])),
            KL: 2e-4 * math.exp(0.5 * noise[i][1]),
            ENTROPY: 0.6 * math.exp(-1.5 * i / num_steps + 0.2 * noise[i][2]),
        }
        for i in range(num_steps)
    ]


def plant(name: str, value: Callable[[float, int], float], start: int = 40) -> Records:
    """The healthy run with one series changed from index `start` on (index 40 is step 41)."""
    records = healthy()
    for i in range(start, NUM_STEPS):
        records[i][name] = value(records[i][name], i - start)
    return records


PLANTED = {
    "reward_fall": (plant(REWARD, lambda v, n: 0.2 * v), 44),
    "kl_blowup": (plant(KL, lambda v, n: v * 3.0 ** (n + 1)), 43),
    "entropy_collapse": (plant(ENTROPY, lambda v, n: 0.01 * v), 41),
    "non_finite": ([*healthy()[:40], healthy()[40] | {"actor/grad_norm": math.inf}, *healthy()[41:]], 41),
}
"""Rule to a run on which it fires, and the step at which it does on this run's noise."""


@pytest.mark.parametrize("rule", PLANTED)
def test_each_rule_fires_on_its_own_collapse_alone(rule: str) -> None:
    """The planted collapse is found by its rule only, near the step where it began."""
    records, step = PLANTED[rule]
    verdict = judge(records)
    assert verdict.stable is False and [reason.rule for reason in verdict.reasons] == [rule]
    assert verdict.first_step == step


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_noise_fires_no_rule(seed: int) -> None:
    """Runs that differ from a healthy one by noise alone are stable."""
    verdict = judge(healthy(seed))
    assert verdict.stable is True and verdict.reasons == () and verdict.undecided == ()


@pytest.mark.parametrize("rule", ["reward_fall", "kl_blowup", "entropy_collapse"])
def test_what_lasts_less_than_the_patience_does_not_fire(rule: str) -> None:
    """A collapse that ends one step before the patience is over is no collapse, with or without smoothing."""
    rules = VerdictRules(window=1, early_steps=5)
    value = {"reward_fall": 0.0, "kl_blowup": 1.0, "entropy_collapse": 1e-6}[rule]
    name = {"reward_fall": REWARD, "kl_blowup": KL, "entropy_collapse": ENTROPY}[rule]
    for length, fires in ((rules.patience - 1, False), (rules.patience, True)):
        records = healthy()
        for i in range(30, 30 + length):
            records[i][name] = value
        verdict = judge(records, rules)
        assert [(r.rule, r.step) for r in verdict.reasons] == ([(rule, 31)] if fires else [])


def test_low_entropy_is_not_held_against_a_solved_task() -> None:
    """The same entropy that is a collapse at reward 0.5 is none at reward 1, and the other way round."""
    records = plant(ENTROPY, lambda v, n: 1e-4, start=20)
    assert judge(records).stable is False
    for record in records:
        record[REWARD] = 1.0
    assert judge(records).stable is True


@pytest.mark.parametrize(("end", "has_held"), [(0.61, True), (0.59, False), (0.03, False)])
def test_a_lost_entropy_says_whether_the_reward_held(end: float, has_held: bool) -> None:
    """At 0.75 of its peak of 0.8 or more the reward held, and the sentence has both numbers; noise holds nowhere."""
    peak = 0.04 if end < 0.05 else 0.8
    rewards = [peak] * 30 + [end] * 30
    run = [{"step": n, REWARD: x, KL: 1e-4, ENTROPY: 1.0 if n < 20 else 1e-4} for n, x in enumerate(rewards, start=1)]
    (reason,) = judge(run).reasons
    assert reason.rule == "entropy_collapse" and reason.reward_held is has_held
    words = "below 0.05 (early median 1)"
    assert reason.sentence.endswith(f"{words}; the reward ends at 0.61, its peak is 0.8." if has_held else f"{words}.")


def test_an_exact_engine_never_blows_up() -> None:
    """A KL of rounding size may grow a thousandfold: below the floor no multiple of it is a blow-up."""
    records = healthy()
    for i, record in enumerate(records):
        record[KL] = 1e-12 * 1.3**i
    assert judge(records).stable is True


def test_a_non_finite_value_counts_at_any_length_and_in_either_form() -> None:
    """One NaN decides, in memory or as metrics.jsonl writes it, however few steps there are."""
    for broken in ({"step": 2, KL: math.nan}, {"step": 2, KL: None, "non_finite": [KL]}):
        verdict = judge([healthy()[0], broken])
        assert verdict.stable is False and verdict.first_step == 2 and KL in verdict.reasons[0].sentence


def test_too_little_data_is_undecided() -> None:
    """No steps, too few steps, or a series that a rule needs and lacks: never called stable, and the reason is said."""
    short = judge(healthy(num_steps=19))
    assert short.stable is None and "19 steps" in short.undecided[0]
    alone = healthy(num_steps=1)[0]
    assert judge([alone]).undecided == ("1 step is recorded, and the rules need 20",)
    once = [{k: v for k, v in record.items() if k != KL or i == 3} for i, record in enumerate(healthy())]
    assert judge(once).undecided == (f"{KL} is recorded at 1 step, and the rules need 20",)
    # Row 0 is an evaluation before the first step, and none of them.
    with_row_0 = judge([{"step": 0, "eval/accuracy": 0.3}, *healthy(num_steps=19)])
    assert with_row_0.undecided == short.undecided and with_row_0.summary["num_steps"] == 19
    assert judge([]).stable is None
    for name in (REWARD, KL, ENTROPY):
        lacking = [{k: v for k, v in record.items() if k != name} for record in healthy()]
        verdict = judge(lacking)
        assert verdict.stable is None and verdict.reasons == () and name in verdict.undecided[0]


@pytest.mark.parametrize("first", [0.0, 0.05, 0.07])
def test_a_reward_that_is_all_noise_is_undecided(first: float) -> None:
    """A run without a level to fall from may have died at once: it is not stable, and the sentence names the rule."""
    rewards = [first, *([0.0] * 19)]
    run = [{"step": n, REWARD: reward, KL: 1e-4, ENTROPY: 1.0} for n, reward in enumerate(rewards, start=1)]
    verdict = judge(run)
    assert verdict.stable is None and verdict.reasons == ()
    (cause,) = verdict.undecided
    assert cause.startswith(f"{REWARD} peaks at {first:.3g} (step 1)") and "0.05 (verdict.reward_min)" in cause
    assert judge(run, VerdictRules(reward_min=0.0)).stable is (None if first == 0 else False)
    blown_up = [record | {KL: 1.0} for record in run]
    assert judge(blown_up).stable is False


def test_a_collapse_is_a_collapse_even_where_another_series_is_missing() -> None:
    """One rule's evidence does not depend on metrics that another lacks."""
    records = [{k: v for k, v in r.items() if k != ENTROPY} for r in plant(KL, lambda v, n: 1.0)]
    assert judge(records).stable is False


def test_thresholds_are_what_decides() -> None:
    """The same series is stable or not by the threshold alone, and the reason reports value and threshold."""
    records = plant(KL, lambda v, n: 0.05)
    verdict = judge(records, VerdictRules(kl_factor=1e9, kl_limit=0.04))
    (reason,) = verdict.reasons
    assert (reason.value, reason.threshold) == (0.05, 0.04)
    assert judge(records, VerdictRules(kl_factor=1e9, kl_limit=0.06)).stable is True


def test_the_verdict_is_json_and_carries_its_rules() -> None:
    """verdict.json says what was decided, why and by which thresholds; every rule has a sentence."""
    rules = VerdictRules(kl_limit=0.07)
    for records in ([], healthy(), *(records for records, _ in PLANTED.values())):
        verdict: Verdict = judge(records, rules)
        found = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
        assert found["stable"] is verdict.stable and found["thresholds"]["kl_limit"] == 0.07
        assert "0.07" in found["rules"]["kl_blowup"] and set(found["rules"]) == {*PLANTED, "remarks"}
        assert set(found["thresholds"]) == set(VerdictRules.model_fields)
        assert all(reason["rule"] in found["rules"] for reason in found["reasons"])


@pytest.mark.parametrize(
    "change",
    [
        {"noise_margin": -1.0},
        {"end_fraction": 0.0},
        {"reward_fall": 1.5},
        {"patience": 0},
        {"kl_factor": 0.5},
        {"min_steps": 6},
    ],
)
def test_senseless_thresholds_are_refused(change: dict[str, Any]) -> None:
    """A threshold outside its range is an error that names it."""
    with pytest.raises(ValueError, match=next(iter(change))):
        VerdictRules(**change)


def test_steps_must_ascend() -> None:
    """Metrics of two runs glued together are refused."""
    with pytest.raises(ValueError, match="got 1 after 60"):
        judge([*healthy(), *healthy()])
