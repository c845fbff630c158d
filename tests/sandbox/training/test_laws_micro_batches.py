"""The law of routes in micro-batches: whatever a pass keeps of its routers is that of the whole batch, row by row."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import worlds
from theory.contracts import Sampling
from theory.routing.passes import RoutingPlan


@pytest.mark.parametrize("size", [1, 3, 5])
def test_routes_do_not_depend_on_micro_batches(size: int) -> None:
    """Used and natural experts and features are the same bits for every micro-batch size, replayed or not.

    A packed record that only the last micro-batch writes (Megatron-LM fork #217) would be replayed by R2 as it is.
    """
    weights = worlds.model()
    rollouts = worlds.rollout_engine("fp8-and-noise", weights).generate(
        worlds.prompts(), Sampling(max_tokens=8, num_responses=3, seed=2, num_features=3)
    )
    assert rollouts.experts is not None
    assert rollouts.features is not None
    rows = rollouts.features.feature_rows
    for routing in (
        RoutingPlan("natural", feature_rows=rows, keep_hidden=True),
        RoutingPlan("replay", record=rollouts.experts, feature_rows=rows, keep_hidden=True),
    ):
        whole = worlds.training_engine(weights).score(rollouts, routing)
        parts = worlds.training_engine(weights, micro_batch_size=size).score(rollouts, routing)
        for a, b in ((whole.experts, parts.experts), (whole.natural, parts.natural)):
            assert a is not None
            assert b is not None
            assert torch.equal(a.offsets, b.offsets)
            assert torch.equal(a.experts, b.experts)
        a, b = whole.features, parts.features
        assert a is not None
        assert b is not None
        assert a.hidden is not None
        assert b.hidden is not None
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(a.hidden, b.hidden)
