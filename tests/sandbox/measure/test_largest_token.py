"""Laws of sandbox/measure/largest_token.py: the norms are the update's, and a planted token is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sandbox.measure.largest_token import LargestToken, largest_token
from sandbox.training.engine import SandboxTrainingEngine
from tests.sandbox.ledger.test_gradients import TASK, learner
from theory.contracts import MiniBatch, UpdateStats
from theory.loop import global_step
from theory.objectives import preset
from theory.objectives.objective import Objective
from theory.routing.passes import RoutingPlan

Look = Callable[[SandboxTrainingEngine, MiniBatch, Objective, RoutingPlan], None]


def step(look: Look, n: int = 1) -> UpdateStats:
    """A global step of GRPO, looked at before each of its updates; the stats of the last one."""
    made, stats = learner("grpo", n), list[UpdateStats]()
    engine = made.training_engine
    update = engine.update

    def looked_at(minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        look(engine, minibatch, objective, plan)
        stats.append(update(minibatch, objective, plan))
        return stats[-1]

    engine.update = looked_at
    global_step(0, made.algorithm, made.rollout, engine, TASK, 7)
    return stats[-1]


def test_the_norm_is_that_of_the_update() -> None:
    """Also where the mini-batch comes after another one, so that pi is not old; float32 sums in another order."""
    found: list[LargestToken] = []
    stats = step(lambda *of: found.append(largest_token(*of)), n=2)
    assert len(found) == 2
    assert found[-1].norm == pytest.approx(stats.metrics["actor/grad_norm"], rel=1e-5)
    assert found[-1].norm > 0 and found[-1].norm_without != found[-1].norm


def planted(minibatch: MiniBatch, logp_pi_BT: torch.Tensor) -> tuple[MiniBatch, tuple[int, int]]:
    """The mini-batch with one token of negative advantage that old found 2,000 times less likely than pi does."""
    (b, *_) = (minibatch.advantages_B < 0).nonzero()[:, 0].tolist()
    old_BT = logp_pi_BT.clone()
    old_BT[b, 0] -= math.log(2000.0)
    return replace(minibatch, logp_old_BT=old_BT), (b, 0)


def test_a_planted_token_is_found_and_a_second_clip_removes_it() -> None:
    """It has all but a small part of GRPO's gradient; under a dual clip at 3 another token is the largest, and the
    norm is as small as without it."""
    found: list[tuple[LargestToken, LargestToken, tuple[float, float]]] = []

    def look(engine: SandboxTrainingEngine, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> None:
        logp_pi_BT = engine.differentiable(minibatch.rollouts, plan)[0].logp_BT.detach()
        spoiled, place = planted(minibatch, logp_pi_BT)
        dual = replace(objective, trust_region=preset("ppo_dual_clip").trust_region)
        own = minibatch.advantages_B[place[0]].item(), logp_pi_BT[place].item()
        found.append((largest_token(engine, spoiled, objective, plan), largest_token(engine, spoiled, dual, plan), own))

    step(look)
    ((free, bounded, (advantage, logp_pi)),) = found
    assert (free.advantage, free.logp_pi) == pytest.approx((advantage, logp_pi))
    assert free.logp_pi - free.logp_old == pytest.approx(math.log(2000.0), rel=1e-5)
    assert free.norm > 10 * free.norm_without
    assert bounded.norm == pytest.approx(free.norm_without, rel=1e-4)
    assert bounded.logp_pi - bounded.logp_old == pytest.approx(0.0, abs=1e-5)
