"""The bias under a weight and a baseline, as equalities: the facts stated in theory/exact/decomposition.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.theory.exact_world import make_world
from theory.exact.decomposition import first_order_bias, left_out, pair_terms
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.levels import sequence_kl
from theory.exact.problem import Problem
from theory.exact.rates import reinforce

WEIGHTS = ["none", "token_is", "prefix_tis", "seq_tis"]


def shifted(problem: Problem, baseline: float) -> Problem:
    return dataclasses.replace(problem, reward_Y=problem.reward_Y - baseline)


@pytest.mark.parametrize("kind", ["bigram", "tabular"])
@pytest.mark.parametrize("weight", WEIGHTS[1:])
def test_a_weighted_mean_ignores_the_baseline(kind: str, weight: str) -> None:
    """Fact 1: with a token, prefix or sequence weight a constant taken off the reward leaves the mean as it is."""
    problem = make_world(kind, T=4).problem
    means = [estimate(shifted(problem, b), reinforce(weight), Group(None, "none")).mean for b in (0.0, 0.7, -3.0)]
    assert torch.allclose(means[0], means[1], atol=1e-13)
    assert torch.allclose(means[0], means[2], atol=1e-12)


@pytest.mark.parametrize("kind", ["bigram", "tabular"])
def test_an_unweighted_mean_moves_by_the_gradient_of_the_kl(kind: str) -> None:
    """Fact 2: without a weight a baseline b adds b grad KL(mu || pi); that gradient is finite-differenced here."""
    world = make_world(kind)
    problem, b, h = world.problem, 0.7, 1e-5
    policy, logp_mu = problem.target, problem.logp_mu
    moved = estimate(shifted(problem, b), reinforce("none"), Group(None, "none")).mean
    plain = estimate(problem, reinforce("none"), Group(None, "none")).mean
    gradient = []
    for q in range(len(policy.parameters)):
        step = torch.zeros_like(policy.parameters)
        step[q] = h
        high, low = (sequence_kl(world.tree, logp_mu, policy.moved(s * step).logp()) for s in (1, -1))
        gradient.append((high - low) / (2 * h))
    # A central difference errs by h^2 times a third derivative near 1, and by rounding over h.
    assert torch.allclose(moved - plain, b * torch.tensor(gradient), atol=1e-9)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_pairs_left_out_make_the_bias_to_first_order(weight: str) -> None:
    """Fact 3: halving the distance between mu and pi quarters what the sum over pairs misses of the bias."""
    misses = []
    for distance in (2e-3, 1e-3):
        problem = make_world("counts", T=4, distance=distance).problem
        exact = estimate(problem, reinforce(weight), Group(None, "none"))
        predicted = first_order_bias(pair_terms(problem, 0.0), weight)
        misses.append(float((exact.mean - exact.truth - predicted).norm()))
        if weight != "seq_tis":
            assert misses[-1] < 0.05 * float((exact.mean - exact.truth).norm())
    if weight == "seq_tis":
        assert max(misses) < 1e-14
    else:
        assert misses[0] / misses[1] == pytest.approx(4, rel=0.1)


def test_pairs_of_a_constant_reward_stand_on_the_diagonal() -> None:
    """E_mu[delta_s g_t] is 0 for s > t, and of second order for s < t: the later factor has mean 0 given what came
    before it. So at a constant reward the token weight has no bias, and no weight has that of the diagonal."""
    problem = make_world("counts", T=4).problem
    constant = dataclasses.replace(problem, reward_Y=torch.ones_like(problem.reward_Y))
    terms_TTQ = pair_terms(constant, 0.0)
    later = left_out("token_is", 4) & ~left_out("prefix_tis", 4)
    # For s < t the mean of g_t under mu is not 0 but -grad KL(mu || pi) of that step: of first order, as delta_s is.
    assert float(terms_TTQ[left_out("prefix_tis", 4)].abs().max()) < 1e-15
    assert float(terms_TTQ[later].abs().max()) > 0
    assert estimate(constant, reinforce("token_is"), Group(None, "none")).mean.norm() < 1e-14
    assert float(terms_TTQ.diagonal().norm()) > 1e-2


def test_unknown_weight() -> None:
    """A name that is none of the four is refused."""
    with pytest.raises(ValueError, match="expected one of none, token_is, prefix_tis, seq_tis, got 'x'"):
        left_out("x", 3)
