"""Distances of single steps: TV, KL and chi-square of pi from mu with one step replaced, and where they are empty."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.theory.bound_problems import Case, cases, draw_problem
from tests.theory.test_bounds_gradient import REWARDS
from theory.bounds import steps
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree


def replaced(logp_p: list[Tensor], logp_step: list[Tensor], t: int) -> list[Tensor]:
    """The policy p with step t replaced: its edges, depth by depth."""
    return [step if s == t else p for s, (p, step) in enumerate(zip(logp_p, logp_step, strict=True))]


@given(cases(*REWARDS, forbidding=True))
def test_distances_are_those_of_nu_t(case: Case) -> None:
    """TV, KL and chi2 of each step are those of pi and of mu with step t replaced, response by response."""
    problem = case.problem
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    p_Y, log_p_Y = tree.log_probabilities(pi).exp(), tree.log_probabilities(pi)
    tv_T, kl_T, chi2_T = steps.whole_tv(tree, pi, pi, mu), steps.step_kl(tree, pi, mu), steps.step_chi2(tree, pi, mu)
    for t in range(tree.max_length):
        log_nu_Y = tree.log_probabilities(replaced(list(mu), list(pi), t))
        nu_Y, reaches_Y = log_nu_Y.exp(), tree.lengths > t
        assert float(nu_Y.sum()) == pytest.approx(1, rel=1e-12)
        assert float(tv_T[t]) == pytest.approx(float((p_Y - nu_Y).abs().sum()) / 2, rel=1e-9, abs=1e-14)
        direct_kl = float(torch.where(p_Y > 0, p_Y * (log_p_Y - log_nu_Y), 0.0).sum())
        assert float(kl_T[t]) == pytest.approx(direct_kl, rel=1e-9, abs=1e-13)
        squares_Y = torch.where(nu_Y > 0, (p_Y - nu_Y) ** 2 / nu_Y, 0.0)
        assert float(chi2_T[t]) == pytest.approx(float(squares_Y[reaches_Y].sum()), rel=1e-9, abs=1e-13)


@given(cases("normal", forbidding=True))
def test_the_weights_distance_is_twice_the_total_variation(case: Case) -> None:
    """E_mu|W - w_t| = 2 TV(pi, nu_t), less what pi and mu differ by on the responses that ended before t."""
    problem = case.problem
    tree, bound = problem.target.tree, steps.step_weights(problem)
    p_Y, q_Y = (tree.log_probabilities(x).exp() for x in (problem.target.logp(), problem.logp_mu))
    ended_T = [float((p_Y - q_Y).abs()[tree.lengths <= t].sum()) for t in range(tree.max_length)]
    torch.testing.assert_close(bound.lhs + torch.tensor(ended_T), bound.rhs, rtol=1e-9, atol=1e-13)
    if not tree.has_end:
        assert sum(ended_T) == 0


def test_a_response_that_ended_has_no_step() -> None:
    """Where pi and mu differ only in whether to end at once, no later step sees it: distance 0 there, but TV is not."""
    tree = PrefixTree(3, 2, has_end=True)
    pi = TabularPolicy(tree, (torch.tensor([[0.2, 0.2, 0.6]]).log(), torch.zeros(2, 3)))
    mu = [torch.tensor([[0.4, 0.4, 0.2]]).log(), pi.logp()[1]]
    problem = Problem(pi, mu, mu, torch.arange(7.0))
    bound = steps.step_weights(problem)
    # At step 2 the two continuing prefixes differ by 0.2 each, the ended response by 0.4.
    torch.testing.assert_close(bound.lhs, torch.tensor([0.0, 0.4]), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(bound.rhs, torch.tensor([0.0, 0.8]), rtol=1e-12, atol=1e-15)


def test_an_update_that_undoes_the_engines_error_makes_the_split_loose() -> None:
    """pi = mu: the distance is 0, and its two parts are not."""
    problem = draw_problem("tabular", "apart", 0, 3, 3, False, "normal")
    logp = problem.target.logp()
    bound = steps.step_split(Problem(problem.target, logp, problem.logp_old, problem.reward_Y))
    assert float(bound.lhs.abs().max()) == 0
    assert float(bound.rhs.min()) > 0.1


def test_bretagnolle_huber_takes_over_where_pinsker_is_empty() -> None:
    """The smaller of the two is Pinsker's up to KL = 1.5936, and stays below 1 for any KL."""
    kl = torch.tensor([1e-8, 1.59, 1.60, 40.0])
    pinsker, both = (kl / 2).sqrt(), steps.tv_from_kl(kl)
    assert (both == pinsker).tolist() == [True, True, False, False]
    assert float(both[-1]) <= 1
    assert float(both[2]) == pytest.approx(math.sqrt(1 - math.exp(-1.6)), rel=1e-12)
