"""Moments and tails of the weights: what a cap or a band cuts off, the chi-square and the effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.theory.bound_problems import Case, cases, draw_problem, one_step
from tests.theory.test_bounds_corrections import caps
from theory.bounds import weights
from theory.divergences import effective_sample_size
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree
from theory.objectives import correction
from theory.streams import stream

EXCESS = {
    "token_tis": weights.token_excess,
    "prefix_tis": weights.prefix_excess,
    "seq_tis": weights.sequence_excess,
}


@given(cases("levels"), caps)
def test_tails_are_those_of_the_weights(case: Case, cap: float) -> None:
    """The mass cut off is E_mu[(weight - C)^+] of the production weights, summed over responses token by token."""
    problem = case.problem
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    paths = tree.paths(0, tree.num_responses)
    mu_BT, gap_BT = tree.gather(mu, paths), tree.gather(pi, paths) - tree.gather(mu, paths)
    mu_B1, mask_BT = mu_BT.sum(1, keepdim=True).exp(), paths.is_response_BT
    for name, excess in EXCESS.items():
        whole_BT = correction(name, numerator="pi", cap=math.inf).weight(gap_BT, mask_BT)
        cut_BT = correction(name, numerator="pi", cap=cap).weight(gap_BT, mask_BT)
        direct_T = torch.where(mask_BT, mu_B1 * (whole_BT - cut_BT), 0.0).sum(0)
        torch.testing.assert_close(excess(problem, cap), direct_T, rtol=1e-9, atol=1e-13)
    lo, hi = 0.6, 1.0 + cap
    kept_BT = correction("icepop", numerator="pi", lo=lo, hi=hi).weight(gap_BT, mask_BT)
    direct_T = torch.where(mask_BT, mu_B1 * (gap_BT.exp() - kept_BT), 0.0).sum(0)
    torch.testing.assert_close(weights.outside(problem, lo, hi), direct_T, rtol=1e-9, atol=1e-13)


@given(st.floats(1e-6, 50.0), st.sampled_from([0.3, 0.9, 1.0, 1.05, 1.5, 2.0, 5.0]))
def test_the_largest_excess_is_attained_by_two_points(chi2: float, cap: float) -> None:
    """A weight of two values, mean 1 and variance chi2, reaches `largest_excess`; at most chi2 / (4 (C - 1))."""
    limit = float(weights.largest_excess(torch.tensor(chi2), cap))
    root = math.sqrt(chi2 + (cap - 1) ** 2)
    low, high = (cap - root, cap + root) if 2 * cap >= 1 + chi2 else (0.0, 1 + chi2)
    p_high = (1 - low) / (high - low)
    assert low > -1e-9
    assert p_high * (high - 1) ** 2 + (1 - p_high) * (low - 1) ** 2 == pytest.approx(chi2, rel=1e-6)
    assert limit == pytest.approx(p_high * (high - cap) + (1 - p_high) * max(low - cap, 0.0), rel=1e-6)
    if cap > 1:
        assert limit <= chi2 / (4 * (cap - 1)) * (1 + 1e-12)


@given(cases("levels"))
def test_the_variance_of_the_weight_is_chi_square(case: Case) -> None:
    """Var_mu(W_<=t) by enumeration is prefix_chi2: for responses cut at t tokens, and for whole ones."""
    problem = case.problem
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    log_mu_Y = tree.log_probabilities(mu)
    paths = tree.paths(0, tree.num_responses)
    log_w_BT = (tree.gather(pi, paths) - tree.gather(mu, paths)).cumsum(1)
    variance_T = (log_mu_Y.exp()[:, None] * log_w_BT.expm1().square()).sum(0)
    torch.testing.assert_close(weights.prefix_chi2(problem), variance_T, rtol=1e-8, atol=1e-14)
    # Given that a step is reached, the token's own weight.
    own_BT = (tree.gather(pi, paths) - tree.gather(mu, paths)).expm1().square()
    reach_T = torch.stack([log_mu_Y.exp()[tree.lengths > t].sum() for t in range(tree.max_length)])
    token_T = (log_mu_Y.exp()[:, None] * own_BT).sum(0) / reach_T
    torch.testing.assert_close(weights.token_chi2(problem), token_T, rtol=1e-8, atol=1e-14)


def test_chi_square_multiplies_over_steps_that_forget() -> None:
    """Conditionals that ignore the prefix: 1 + Var W = prod_t (1 + chi2_t), the bound's equality; KL adds up."""
    tree = PrefixTree(3, 4)
    generator = stream(0, "independent steps")
    rows = [[torch.randn(1, 3, generator=generator).expand(n, -1) for n in tree.sizes] for _ in range(2)]
    target = TabularPolicy(tree, tuple(rows[0]))
    mu = [x.log_softmax(1) for x in rows[1]]
    problem = Problem(target, mu, mu, torch.zeros(81))
    bound = weights.weight_variance(problem)
    chi2 = [float(((p.exp() - q.exp()) ** 2 / q.exp())[0].sum()) for p, q in zip(target.logp(), mu, strict=True)]
    assert float(bound.lhs) == pytest.approx(math.prod(1 + x for x in chi2) - 1, rel=1e-12)
    assert float(bound.ratio) == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(weights.token_chi2(problem), torch.tensor(chi2), rtol=1e-12, atol=0)


def test_the_kl_gives_the_variance_where_pi_is_mu_on_an_event() -> None:
    """pi nearly mu conditioned on an event of probability 0.4: W is 2.5 there, Var W = exp(KL) - 1 = 1.5, ESS = 0.4."""
    tiny = 1e-12
    problem = one_step([0.75, 0.25 - tiny, tiny], [0.3, 0.1, 0.6], [0.0, 0.0, 0.0])
    assert float(weights.weight_variance_kl(problem).ratio) == pytest.approx(1, abs=1e-9)
    assert float(weights.weight_variance_kl(problem).rhs) == pytest.approx(1.5, abs=1e-9)
    assert float(weights.effective_sample_size(problem).lhs) == pytest.approx(0.4, abs=1e-9)
    near = draw_problem("tabular", "near", 7, 3, 3, False, "levels")
    # KL is half of chi2 to first order in the step.
    step = float(weights.prefix_chi2(near)[-1]) ** 0.5
    assert float(weights.weight_variance_kl(near).ratio) == pytest.approx(0.5, abs=2 * step)


def test_the_effective_sample_size_tends_to_its_limit() -> None:
    """ESS/n of n responses drawn from mu tends to 1/(1 + chi2) like 1/sqrt(n), by the metric that runs report."""
    problem = draw_problem("bigram", "apart", 0, 3, 2, True, "levels")
    tree = problem.target.tree
    log_mu_Y = tree.log_probabilities(problem.logp_mu)
    log_w_Y = tree.log_probabilities(problem.target.logp()) - log_mu_Y
    limit = float(weights.effective_sample_size(problem).lhs)
    assert 0.1 < limit < 0.9
    gaps = {}
    for n in (100, 10_000, 1_000_000):
        draws = torch.multinomial(log_mu_Y.exp(), n, replacement=True, generator=stream(0, "ess", n))
        share = float(effective_sample_size(log_w_Y[draws], torch.ones(n, dtype=torch.bool)))
        gaps[n] = abs(share - limit) * math.sqrt(n)
    # Delta method: the deviation times sqrt(n) is normal, of a spread that these weights' fourth moment gives.
    w_Y = log_w_Y.exp()
    p_Y, m2 = log_mu_Y.exp(), float((log_mu_Y.exp() * w_Y**2).sum())
    spread = math.sqrt(float((p_Y * (limit * (2 * (w_Y - 1) - (w_Y**2 / m2 - 1))).square()).sum()))
    assert all(gap < 4 * spread for gap in gaps.values()), (gaps, spread)
    everything = float(effective_sample_size(log_w_Y, torch.ones(len(log_w_Y), dtype=torch.bool)))
    assert everything != pytest.approx(limit, rel=1e-3)  # weighed by mu, not response by response
