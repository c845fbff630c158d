"""The algorithm's description refuses what cannot run, and its warm-up is linear."""

from __future__ import annotations

import pytest

from theory.algorithm import Algorithm, OptimizerSettings
from theory.objectives import preset
from theory.routing.passes import MODES


def test_warm_up_is_linear_then_constant():
    """The rate of update n is rate * min(1, (n + 1) / warmup_steps); without warm-up it is the rate from the start."""
    warm = OptimizerSettings(learning_rate=0.8, warmup_steps=4)
    assert [warm.rate_at(n) for n in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert OptimizerSettings(learning_rate=0.8).rate_at(0) == 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "R"}, f"expected one of {', '.join(MODES)}, got 'R'"),
        ({"num_prompts": 6, "num_minibatches": 4}, "num_minibatches: expected a divisor of num_prompts = 6, got 4"),
        ({"mode": "Pr2", "freeze_router": True}, "freeze_router leaves Pr2's predictor nothing to predict"),
        ({"num_responses": 1}, "num_responses: expected num_responses >= 2, got 1"),
        ({"label_noise": 1.5}, r"label_noise: expected 0 <= label_noise <= 1, got 1\.5"),
        ({"dynamic_sampling_rounds": 0}, "dynamic_sampling_rounds: expected at least 1, got 0"),
        ({"label_noise": 0.1, "dynamic_sampling_rounds": 2}, "label_noise: expected 0 beside dynamic sampling"),
    ],
)
def test_impossible_combinations_are_refused(changes, message):
    """A mode, batch or freeze that cannot run is one ValueError with the values in it."""
    with pytest.raises(ValueError, match=message):
        Algorithm(preset("minirl"), **changes)


@pytest.mark.parametrize(("mode", "plain"), [("Pr2", "R2"), ("Pr3", "R3")])
def test_a_predictor_that_never_learns_is_said(mode, plain):
    """With one mini-batch per rollout Pr2 and Pr3 are R2 and R3: one line that names the field, and else none."""
    (line,) = Algorithm(preset("minirl"), mode=mode).notes
    assert line.startswith(f"batch.num_minibatches: with 1 {mode} is {plain}: its predictor learns from")
    assert Algorithm(preset("minirl"), mode=mode, num_minibatches=2).notes == ()
    assert Algorithm(preset("minirl"), mode=plain).notes == ()
