"""The exact mean and variance of a gradient against those of responses that the real engine samples."""

from __future__ import annotations

import pytest
import torch

from sandbox.exact.audit import (
    ENGINES,
    learner_of,
    moe_problem,
    moved,
    random_direction,
    router_drift,
    step_at,
)
from sandbox.training.engine import SandboxTrainingEngine
from tests.sandbox.exact.tree_world import PROMPT, REWARD_Y, SEED, STALENESS, TREE, loaded, tiny_moe
from theory.algorithm import Algorithm, OptimizerSettings
from theory.collection import Collected
from theory.contracts import Sampling
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.loop import take
from theory.objectives import preset
from theory.old_pass import old_pass
from theory.routing.measures import router_disagreement
from theory.routing.passes import Mode
from theory.streams import stream


@pytest.mark.parametrize(("engine", "mode"), [("weights-fp8", "R3"), ("exact", "Pr2")])
def test_sampled_gradients_average_to_the_exact_one(engine: str, mode: Mode) -> None:
    """2,000 groups of `generate`, through the loop and `update`, give the exact mean, variance and disagreement."""
    objective, G, P, num_batches = preset("minirl"), 4, 80, 25
    algorithm = Algorithm(objective=objective, mode=mode, num_prompts=P, num_responses=G, max_tokens=TREE.max_length)
    model = tiny_moe(4, stream(SEED, "model"))
    step_Q = step_at(model, random_direction(model, stream(SEED, "direction")), TREE, PROMPT, STALENESS)
    predictor = router_drift(model, step_Q) if mode == "Pr2" else None
    problem = moe_problem(
        model, ENGINES[engine], mode, TREE, PROMPT, REWARD_Y, step_Q=step_Q, predictor=predictor
    )  # fmt: skip
    old_learner = learner_of(model, mode, predictor)
    learner = SandboxTrainingEngine(
        moved(model, step_Q), OptimizerSettings(max_grad_norm=float("inf")), micro_batch_size=P * G
    )
    learner.take_step = lambda: None
    rollout = loaded(model, engine)
    reward_of = {tuple(r.tokens.tolist()): REWARD_Y[y] for y, r in enumerate(rollout.enumerate(PROMPT, TREE).responses)}
    gradients, disagreements = [], []
    for batch in range(num_batches):
        rollouts = rollout.generate([PROMPT] * P, Sampling(TREE.max_length, G, seed=1000 + batch))
        rewards_PG = torch.stack([reward_of[tuple(r.tokens.tolist())] for r in rollouts.responses]).view(P, G)
        old = old_pass(0, algorithm, old_learner, Collected(rollouts, rewards_PG, {}), seed=0)
        advantages_B = (rewards_PG - rewards_PG.mean(1, keepdim=True)).reshape(-1)
        learner.update(take(rollouts, old, advantages_B, list(range(P * G)), 0, 1), objective, old.gradient)
        # `update` descends.
        gradients.append(torch.cat([-p.grad.reshape(-1) for p in learner.parameters if p.grad is not None]))
        assert rollouts.experts is not None and old.scores.natural is not None
        disagreements.append(router_disagreement(rollouts.experts, old.scores.natural))
    sampled = torch.stack(gradients)
    exact = estimate(problem, objective, Group(G))
    directions = [exact.truth, exact.mean, *torch.randn(6, len(exact.mean), generator=stream(4, "d")).double()]
    for direction in directions:
        along = (sampled - exact.mean) @ direction
        assert abs(float(along.mean())) < 4 * float(along.std()) / num_batches**0.5
    squares = (sampled - exact.mean).square().sum(1)
    expected = exact.variance / (P * G)
    assert abs(float(squares.mean()) - expected) < 4 * float(squares.std()) / num_batches**0.5
    shares = torch.tensor(disagreements)
    assert abs(float(shares.mean()) - problem.disagreement) <= 4 * float(shares.std()) / num_batches**0.5
