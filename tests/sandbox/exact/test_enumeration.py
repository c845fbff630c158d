"""Every response of a tree through the rollout engine: enumeration is generation with all tokens taken."""

from __future__ import annotations

import pytest
import torch

from sandbox.engines import EngineConfig, RouterNoise
from sandbox.engines.stale_weights import StaleWeights
from sandbox.exact.audit import moe_problem
from sandbox.exact.routed_policy import exact_rollouts, rollout_engine, routed_policy, target_policy
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from tests.sandbox.exact.tree_world import (
    PROMPT,
    REWARD_Y,
    ROUNDING,
    TOKEN_IS,
    TREE,
    World,
    furthest,
    loaded,
    same_edges,
    tiny_moe,
)
from theory.contracts import Sampling
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.tree import PrefixTree
from theory.routing.passes import RoutingPlan
from theory.streams import stream


def model(dtype: torch.dtype = torch.float64) -> MoE:
    return tiny_moe(4, stream(2, "model"), dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.float64, ROUNDING)])
def test_exact_engine_is_old_is_pi(dtype: torch.dtype, tolerance: float) -> None:
    """Without a defect or a step decoding, the old pass and the gradient pass are one, in float32 bit for bit.

    The kernels' batch invariance is float32's; float64 products round by their number of rows, measured 9e-16.
    """
    problem = moe_problem(model(dtype), EngineConfig(), "none", TREE, PROMPT, REWARD_Y)
    assert furthest(list(problem.logp_mu), list(problem.logp_old)) <= tolerance
    assert furthest(list(problem.logp_old), problem.target.logp()) <= tolerance
    assert problem.disagreement == 0


@pytest.mark.parametrize("name", ["exact", "weights-fp8", "activations-fp8"])
def test_enumeration_is_generation(name: str) -> None:
    """A sampled response has the log-probabilities and the routes that the enumeration gives it."""
    engine = loaded(model(), name)
    every = engine.enumerate(PROMPT, TREE)
    by_tokens = {tuple(r.tokens.tolist()): y for y, r in enumerate(every.responses)}
    assert len(by_tokens) == TREE.num_responses
    sampled = engine.generate([PROMPT], Sampling(max_tokens=TREE.max_length, num_responses=200, seed=5))
    assert every.experts is not None and sampled.experts is not None
    for b, response in enumerate(sampled.responses):
        y = by_tokens[tuple(response.tokens.tolist())]
        same = every.responses[y]
        assert (same.finish, same.version) == (response.finish, response.version)
        assert torch.equal(every.experts.rows(y), sampled.experts.rows(b))
        # float64 products may round by their number of rows: measured 0 to 4e-16.
        assert float((same.logp_mu - response.logp_mu).abs().max()) < ROUNDING


def test_noise_is_drawn_once_a_prefix() -> None:
    """A noisy engine is a policy on the tree: one seed gives the same bits twice, another gives others.

    Its first token meets the very draws of `generate`, whose prompt is prefilled in the same way.
    """
    engine = rollout_engine(model(), EngineConfig(defects=(RouterNoise(std=1.0),)), TREE)
    engine.load_model(model(), version=0)
    first, again, other = (engine.enumerate(PROMPT, TREE, seed).padded().logp_mu_BT for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert abs(float(first.sum(1).exp().sum()) - 1) < ROUNDING
    sampled = engine.generate([PROMPT], Sampling(max_tokens=1, num_responses=50, seed=0))
    whole = engine.enumerate(PROMPT, TREE, 0)
    first_of = {int(r.tokens[0]): r.logp_mu[0] for r in whole.responses}
    assert all(torch.equal(r.logp_mu[0], first_of[int(r.tokens[0])]) for r in sampled.responses)


def test_a_tree_without_an_end_has_no_stop_token() -> None:
    """Where no token ends a response, all have the longest length, and the exact law of the passes holds too."""
    tree, weights = PrefixTree(3, 3), tiny_moe(3, stream(5, "model"))
    reward_Y = torch.rand(tree.num_responses, generator=stream(5, "reward"), dtype=torch.float64)
    problem = moe_problem(weights, EngineConfig(), "R3", tree, PROMPT, reward_Y)
    assert furthest(list(problem.logp_mu), list(problem.logp_old)) < ROUNDING
    assert problem.trained is not None and same_edges(problem.trained.logp(), problem.target.logp())
    assert estimate(problem, TOKEN_IS, Group(None, "none")).bias < ROUNDING
    whole = routed_policy(weights, tree, exact_rollouts(weights, tree, PROMPT), RoutingPlan("natural"))
    assert same_edges(whole.logp(), target_policy(weights, tree, PROMPT).logp())


def test_another_tree_is_refused() -> None:
    """Vocabulary and end token must be the engine's."""
    with pytest.raises(ValueError, match=r"expected a tree over .* \(4, \(3,\)\) as the engine's, got \(5, \(4,\)\)"):
        loaded(model(), "exact").enumerate(PROMPT, PrefixTree(5, 2, has_end=True))
    with pytest.raises(ValueError, match=r"\(4, \(3,\)\) as the engine's, got \(4, \(\)\)"):
        loaded(model(), "exact").enumerate(PROMPT, PrefixTree(4, 2))


def test_what_does_not_fit_is_refused(world: World) -> None:
    """A predictor under the wrong mode, a dense model, stale weights and a short step are each named."""
    weights, rest = world.model, (TREE, PROMPT, REWARD_Y)
    with pytest.raises(ValueError, match=r"predictor: expected one .* got none under Pr2"):
        moe_problem(weights, EngineConfig(), "Pr2", *rest)
    with pytest.raises(ValueError, match=r"predictor: .* got one for layers \[0\] under R2"):
        moe_problem(weights, EngineConfig(), "R2", *rest, predictor={0: torch.zeros(8, 4, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"step_Q: expected 2104 numbers, .* got 3"):
        moe_problem(weights, EngineConfig(), "none", *rest, step_Q=torch.zeros(3, dtype=torch.float64))
    stale = EngineConfig(defects=(StaleWeights(versions=1),))
    with pytest.raises(
        ValueError,
        match=r"earlier weights \(old weights are step_Q\), got stale weights by 1",
    ):
        moe_problem(weights, stale, "none", *rest)
    dense = MoE(ModelConfig(4, 8, 1, 2, 1, 4, dense_size=8, dense_layers=(0,)), stream(0, "dense")).double()
    with pytest.raises(ValueError, match="model: expected at least 1 MoE layer, got 0"):
        moe_problem(dense, EngineConfig(), "none", *rest)
