"""Laws of an objective with centering in the exact estimator: mean and variance over all groups, by its own code."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from tests.theory.exact_world import World, make_world
from theory import advantages
from theory.exact.estimator import estimate
from theory.exact.expected import expected_update
from theory.exact.groups import Group
from theory.exact.problem import Problem
from theory.objectives import Objective, Top, correction, preset

OBJECTIVES: dict[str, Objective] = {
    "no weight": preset("reinforce", centering="full"),
    "no weight, one token": preset("reinforce", centering="top_k", centering_k=1),
    "PPO": preset("ppo", centering="full", advantage="group_mean"),
    "GRPO": preset("grpo", centering="full"),
    "token mean": preset("grpo_dapo", centering="full"),
    "IcePop": preset("reinforce", correction=correction("icepop", lo=0.8, hi=1.2), centering="full"),
}

GROUPS = [Group(3), Group(None), Group(None, "none")]


def by_hand(world: World, objective: Objective, size: int) -> tuple[torch.Tensor, float]:
    """Mean and variance of one group's gradient over every group of that size, by autograd through the logits."""
    tree, problem, paths = world.tree, world.problem, world.paths
    leaves = [x.clone().requires_grad_() for x in problem.target.logp()]
    logp = [x.log_softmax(1) for x in leaves]
    starts = torch.tensor([sum(tree.sizes[:t]) for t in range(tree.max_length)])
    node_BT = paths.nodes_BT + starts
    mu_NV = torch.cat(list(problem.logp_mu))
    ids_NK = mu_NV.topk(min(objective.num_top, tree.num_tokens), dim=1).indices
    sides = (logp, list(problem.logp_old), list(problem.logp_mu))
    pi, old, mu = (tree.gather(x, paths) for x in sides)
    tops = [torch.cat(x)[node_BT].gather(2, ids_NK[node_BT]) for x in sides]
    p_Y = mu.sum(1).exp()
    mean, second = torch.zeros(sum(x.numel() for x in leaves), dtype=torch.float64), 0.0
    # One order for all of a group's: no objective knows the order (test_objective_masks.py).
    groups = itertools.product(range(tree.num_responses), repeat=size)
    for chosen, number in Counter(tuple(sorted(group)) for group in groups).items():
        rows = list(chosen)
        top = Top(*(x[rows] for x in tops), is_complete=ids_NK.shape[1] == tree.num_tokens)
        gains_B = advantages.ADVANTAGES[objective.advantage](problem.reward_Y[rows][None])[0]
        output = objective(pi[rows], old[rows], mu[rows], gains_B, paths.is_response_BT[rows], top=top)
        parts = torch.autograd.grad(output.objective, leaves, retain_graph=True)
        gradient = torch.cat([part.reshape(-1) for part in parts])
        probability = number * float(p_Y[rows].prod())
        mean += probability * gradient
        second += probability * float(gradient.square().sum())
    return mean, size * (second - float(mean.square().sum()))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_moments_are_those_of_all_groups(name: str) -> None:
    """Mean and variance over every pair of responses, ragged ones too, are what the estimator gives."""
    world = make_world("tabular", V=3, T=2)
    mean, variance = by_hand(world, OBJECTIVES[name], 2)
    found = estimate(world.problem, OBJECTIVES[name], Group(2))
    torch.testing.assert_close(found.mean, mean, atol=1e-12, rtol=0)
    assert found.variance == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "group"), [(name, GROUPS[(i + j) % 3]) for i, name in enumerate(OBJECTIVES) for j in range(2)]
)
def test_the_mean_is_the_expected_update(name: str, group: Group) -> None:
    """A response at a time, or node by node: one gradient. No drift is left where all of mu is taken off."""
    problem = make_world("bigram", V=3, T=3).problem
    found, update = estimate(problem, OBJECTIVES[name], group), expected_update(problem, OBJECTIVES[name], group)
    torch.testing.assert_close(found.mean, update.gradient, atol=1e-12, rtol=0)
    if OBJECTIVES[name].centering == "full":
        assert float(update.drift.norm()) < 1e-13


def test_where_mu_is_pi_mean_and_variance_stay() -> None:
    """With equal policies there is nothing to take off, in the mean or in any response; with a gap the variance is
    another."""
    world = make_world("bigram", V=3, T=3)
    equal = Problem(
        world.problem.target, world.problem.target.logp(), world.problem.target.logp(), world.problem.reward_Y
    )
    pairs = [
        [estimate(problem, preset("reinforce", centering=c), Group(4)) for c in ("none", "full")]
        for problem in (equal, world.problem)
    ]
    torch.testing.assert_close(pairs[0][0].mean, pairs[0][1].mean, atol=1e-13, rtol=0)
    assert pairs[0][1].variance == pytest.approx(pairs[0][0].variance, rel=1e-12)
    assert abs(pairs[1][1].variance / pairs[1][0].variance - 1) > 1e-3


def test_top_k_goes_to_full() -> None:
    """Mean and variance at k = V - 1, whose tail is one token, are those of all of mu; k = 1 is nearer than none."""
    problem = make_world("bigram", V=3, T=3).problem
    found = [estimate(problem, preset("reinforce", centering="top_k", centering_k=k), Group(4)) for k in (1, 2, 3)]
    full = estimate(problem, preset("reinforce", centering="full"), Group(4))
    none = estimate(problem, preset("reinforce"), Group(4))
    for one in found[1:]:
        torch.testing.assert_close(one.mean, full.mean, atol=1e-12, rtol=0)
        assert one.variance == pytest.approx(full.variance, rel=1e-9)
    assert 1e-6 < float((found[0].mean - full.mean).norm()) < float((none.mean - full.mean).norm())
