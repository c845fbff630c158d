"""Laws of M2PO in the sandbox: each update has the bounds that its whole mini-batch gives under pi."""

from __future__ import annotations

import math

import pytest

from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, UpdateStats
from theory.loop import global_step
from theory.objectives import Objective, preset

M2PO = preset("grpo_dapo", m2_budget=1e-3, eps_low=0.0, eps_high=0.0)


def updates(size: int) -> list[tuple[MiniBatch, Objective, UpdateStats]]:
    """The two updates of a global step with micro-batches of this size."""
    engine = worlds.training_engine(worlds.model(), learning_rate=5e-3, micro_batch_size=size)
    taken: list[tuple[MiniBatch, Objective, UpdateStats]] = []
    update = engine.update

    def watched(minibatch, objective, plan):
        taken.append((minibatch, objective, update(minibatch, objective, plan)))
        return taken[-1][2]

    engine.update = watched
    algorithm = Algorithm(M2PO, num_prompts=4, num_responses=3, num_minibatches=2, max_tokens=6)
    result = global_step(0, algorithm, worlds.rollout_engine("exact", worlds.model()), engine, worlds.EvenTokens(), 1)
    assert "rollout_corr/drift" not in result.metrics
    return taken


def test_bounds_are_known_before_the_gradient_pass() -> None:
    """The first mini-batch has none, as pi is old; the second has those of pi before its step, in any micro-batches."""
    bounds = []
    for size in (128, 2):
        (_, free, _), (minibatch, objective, stats) = updates(size)
        assert (free.trust_region.eps_low, free.trust_region.eps_high) == (1.0, math.inf)  # pyright: ignore
        batch = minibatch.rollouts.padded()
        expected = M2PO.within_budget(
            stats.logp_pi_BT, minibatch.logp_old_BT, batch.logp_mu_BT, minibatch.advantages_B[:, None],
            batch.is_response_BT,
        )  # fmt: skip
        assert objective == expected and 0 < objective.trust_region.eps_high < math.inf  # pyright: ignore
        assert stats.metrics["actor/pg_clipfrac"] > 0
        bounds.append(objective.trust_region.eps_high)  # pyright: ignore
    # The first update's weights differ by the order of float32 sums.
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-2)
