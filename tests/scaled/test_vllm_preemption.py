"""Requests that vLLM throws out for want of cache and runs again still have one route and one feature a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scaled import vllm_world as world
from theory.contracts import Sampling

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_preempted_request_keeps_one_route_a_row(tmp_path, prefix_caching):
    """With a cache too small for the batch, requests are thrown out and run again; the record is the trainer's."""
    small = world.engine(world.model(), tmp_path, prefix_caching=prefix_caching, kv_cache_gib=0.0015)
    scheduler = small._engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noted
    sampling = Sampling(max_tokens=100, num_responses=12, seed=5, num_features=5)
    rollouts = small.generate(world.prompts((20, 33)), sampling)
    small.close()
    assert preempted
    assert rollouts.experts.num_missing_rows == 0
    assert (world.abs_diff(world.model(), rollouts) <= 1e-5).all()
    scores = world.trainer_scores(world.model(), rollouts, rollouts.features.feature_rows)
    assert torch.equal(scores.natural.experts, rollouts.experts.experts)
    assert (scores.features.logits - rollouts.features.logits).abs().max() <= 1e-5
