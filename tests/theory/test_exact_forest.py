"""A forest is a tree whose first tokens an environment draws; a network on it has the gradients of autograd."""

from __future__ import annotations

import math

import pytest
import torch

from theory.exact.estimator import estimate
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.levels import expected_length, token_kl
from theory.exact.networks import NetworkPolicy, node_features
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem, expected_reward, true_gradient
from theory.exact.tree import PrefixTree
from theory.objectives import preset
from theory.streams import stream


def test_one_context_is_a_tree() -> None:
    """Moments, distances and the true gradient of a forest of one context are those of its tree, to the bit."""
    tree, generator = PrefixTree(3, 3, has_end=True), stream(0, "forest")
    forest = Forest.uniform(tree, 1)
    on_tree, mu = TabularPolicy.random(tree, generator), TabularPolicy.random(tree, generator).logp()
    on_forest = TabularPolicy(forest, on_tree.logits)
    reward_Y = torch.rand(tree.num_responses, generator=generator, dtype=torch.float64)
    found = [
        estimate(Problem(policy, mu, mu, reward_Y), preset("minirl"), Group(None)) for policy in (on_tree, on_forest)
    ]
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0].truth, found[1].truth)
    assert found[0].variance == found[1].variance
    assert token_kl(tree, mu, on_tree.logp()) == token_kl(forest, mu, on_tree.logp())


@pytest.mark.parametrize("has_end", [False, True])
def test_openings_are_first_tokens_that_no_policy_chooses(has_end: bool) -> None:
    """Contexts of probability p(v) are the subtrees below the first token v of one tree whose first step is p."""
    generator, V = stream(1, "forest"), 3
    whole = PrefixTree(V, 4, has_end)
    W = whole.num_continuing
    first = torch.rand(W, generator=generator, dtype=torch.float64)
    first /= first.sum()
    below = TabularPolicy.random(whole, generator).logp()[1:]
    # The environment never ends a response itself.
    start = torch.cat([first.log(), torch.full((V - W,), -math.inf, dtype=torch.float64)])[None]
    forest = Forest(V, 3, has_end, tuple(first.tolist()), (0,) * W)
    direct = {
        tuple(paths.tokens_BT[i, : paths.length_B[i]].tolist()): float(p)
        for rows, paths in whole.chunks()
        for i, p in enumerate(whole.log_probabilities([start, *below])[rows].exp())
    }
    log_p_Y = forest.log_probabilities(below)
    paths, context_Y = forest.whole, forest.context_of_response
    for i, log_p in enumerate(log_p_Y.tolist()):
        tokens = (int(context_Y[i]), *paths.tokens_BT[i, : paths.length_B[i]].tolist())
        assert math.exp(log_p) == pytest.approx(direct[tokens], rel=1e-12)
    assert float(log_p_Y.exp().sum()) == pytest.approx(1.0, abs=1e-14)
    assert expected_length(forest, below) == pytest.approx(expected_length(whole, [start, *below]) - 1, rel=1e-12)


def test_numbers_of_nodes_edges_and_responses() -> None:
    """Every node of every context is reached by the responses through it; parts of the paths are those of the whole."""
    forest = Forest.uniform(PrefixTree(3, 3, has_end=True), 2, 2)
    assert forest.num_contexts == 4 and forest.prompts == (0, 0, 1, 1)
    assert forest.sizes == (4, 8, 16) and forest.num_edges == 84
    assert forest.num_responses == 4 * forest.tree.num_responses
    for t in range(3):
        on = forest.whole.is_response_BT[:, t]
        assert set(forest.whole.nodes_BT[on, t].tolist()) == set(range(forest.sizes[t]))
        for node, prefix in enumerate(forest.prefixes(t).tolist()):
            through = on & (forest.whole.nodes_BT[:, t] == node)
            assert (forest.whole.tokens_BT[through][:, :t] == torch.tensor(prefix, dtype=torch.int64)).all()
            assert (forest.context_of_response[through] == forest.context_of_node(t)[node]).all()
    assert sorted(forest.edge_BT[forest.whole.is_response_BT].unique().tolist()) == list(range(84))
    part = forest.paths(5, 30)
    assert torch.equal(part.nodes_BT, forest.whole.nodes_BT[5:30])
    assert torch.equal(forest.lengths, forest.whole.length_B)


def test_a_network_has_the_gradient_of_its_value() -> None:
    """grad J by the pull-back is the central difference of J; squared norms are those of each path's own pull-back."""
    forest = Forest.uniform(PrefixTree(3, 3, has_end=True), 2, 2)
    generator, h = stream(2, "forest"), 1e-5
    policy = NetworkPolicy.random(forest, generator, num_hidden=3)
    reward_Y = torch.rand(forest.num_responses, generator=generator, dtype=torch.float64)
    logp = policy.logp()
    gradient = true_gradient(Problem(policy, logp, logp, reward_Y))
    for q in range(0, len(policy.parameters), 5):
        step = torch.zeros_like(policy.parameters)
        step[q] = h
        high, low = (expected_reward(forest, policy.moved(s * step).logp(), reward_Y) for s in (1, -1))
        # A central difference errs by h^2 times a third derivative, and by rounding over h.
        assert float(gradient[q]) == pytest.approx((high - low) / (2 * h), abs=1e-9)
    c_BT = torch.randn(forest.num_responses, 3, generator=generator, dtype=torch.float64)
    c_BT = torch.where(forest.whole.is_response_BT, c_BT, 0.0)
    norms_B = policy.squared_norms(c_BT, forest.whole)
    for i in (0, 7, forest.num_responses - 1):
        edges = forest.zero_edges()
        forest.scatter(edges, c_BT[i : i + 1], forest.paths(i, i + 1))
        assert float(norms_B[i]) == pytest.approx(float(policy.pullback(edges).square().sum()), rel=1e-10)


def test_every_node_has_features_of_its_own() -> None:
    """No two nodes look alike to a network: prompt, opening, depth and tokens are all there."""
    forest = Forest.uniform(PrefixTree(3, 3), 2, 2)
    rows = node_features(forest)
    assert len(rows.unique(dim=0)) == len(rows) == sum(forest.sizes)


def test_bad_forests_are_refused() -> None:
    """Probabilities that are none, a prompt that is missing, lists of two lengths: each in one line."""
    with pytest.raises(ValueError, match=r"expected positive numbers with the sum 1, got \(0.5, 0.4\)"):
        Forest(3, 2, False, (0.5, 0.4), (0, 1))
    with pytest.raises(ValueError, match=r"prompts: expected the numbers from 0 without a gap, got \(0, 2\)"):
        Forest(3, 2, False, (0.5, 0.5), (0, 2))
    with pytest.raises(ValueError, match="prompts: expected one for each of 2 contexts, got 1"):
        Forest(3, 2, False, (0.5, 0.5), (0,))
    with pytest.raises(ValueError, match="expected at most 4,000,000 responses"):
        Forest.uniform(PrefixTree(3, 12), 10)
    with pytest.raises(
        ValueError, match=r"got 27,000,000,000,000 \(3 prompts, 1,000,000,000,000 openings of each, 9 r"
    ):
        Forest.uniform(PrefixTree(3, 2), 3, 10**12)
