"""The law of which experts the gradient passes replay: the old pass's under R2 and Pr2, mu's under R3 and Pr3."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.collection import collect
from theory.loop import hand_over
from theory.objectives import preset
from theory.old_pass import old_pass
from theory.routing.predictor import PredictorSettings


@pytest.mark.parametrize(("mode", "source"), [("R2", "old"), ("Pr2", "old"), ("R3", "mu"), ("Pr3", "mu")])
def test_gradient_passes_replay_what_their_mode_says(mode: str, source: str) -> None:
    """R2 without its old pass's own routes would be R3 in its gradient and natural in its ratio (verl #7805)."""
    settings = PredictorSettings(1.0, num_positions=3)
    algorithm = Algorithm(preset("minirl"), mode=mode, predictor=settings, num_prompts=2, num_responses=2, max_tokens=6)
    weights = worlds.model()
    learner = worlds.training_engine(weights, settings if algorithm.passes.trains_predictor else None)
    rollout = worlds.rollout_engine("fp8-and-noise", weights)
    hand_over(algorithm, rollout, learner, version=0)
    collected = collect(0, algorithm, rollout, worlds.EvenTokens(), seed=3)
    old = old_pass(0, algorithm, learner, collected, seed=3)
    assert old.scores.experts is not None
    assert collected.rollouts.experts is not None
    assert old.gradient.record is not None
    experts = {"old": old.scores.experts.experts, "mu": collected.rollouts.experts.experts}
    assert torch.equal(old.gradient.record.experts, experts[source])
    # The engines disagree, so that a wrong source shows; under R3 and Pr3 the old pass replays mu's itself.
    assert torch.equal(experts["old"], experts["mu"]) == (source == "mu")
