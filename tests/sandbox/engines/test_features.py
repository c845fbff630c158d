"""Router features of generation: where they stand, and that they are what the training engine would see."""

from __future__ import annotations

import torch

from tests.contracts import worlds
from theory.contracts import Sampling
from theory.routing.passes import RoutingPlan


def test_features_of_generation_are_the_trainers_own():
    """The exact engine's h_old and p_old are those of a natural training pass on the same rows, bit for bit.

    Prompts are ragged, responses end at different tokens and leave the batch, and some rows alone are drawn.
    """
    weights = worlds.model(dense_layers=(1,))
    rollouts = worlds.rollout_engine("exact", weights).generate(
        worlds.prompts(6), Sampling(max_tokens=24, num_responses=3, seed=2, num_features=5)
    )
    lengths = [len(r.tokens) for r in rollouts.responses]
    assert min(lengths) < 6 and max(lengths) == 24
    features = rollouts.features
    routing = RoutingPlan("natural", feature_rows=features.feature_rows, keep_hidden=True)
    expected = worlds.training_engine(weights).score(rollouts, routing).features
    assert features.layer_numbers == (0, 2) == expected.layer_numbers
    assert features.offsets.diff().tolist() == [min(length, 5) for length in lengths]
    assert torch.equal(features.hidden, expected.hidden)
    assert torch.equal(features.logits, expected.logits)
