"""The first-order gap: the production objective's own bias, the bounds on it, the numbers where each is tight."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.effort import few, heavy
from tests.theory.bound_problems import Case, assert_holds, cases, draw_problem, two_steps
from theory.bounds import BOUNDS, Bound, conditional, gradient, steps
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.problem import Problem, true_gradient
from theory.exact.rates import reinforce

STEPS = tuple(f for f in BOUNDS.values() if f.__module__ == steps.__name__)
GAPS = tuple(f for f in BOUNDS.values() if f.__module__ in (gradient.__name__, conditional.__name__))
ALONE = Group(num_responses=None, baseline="none")
REWARDS = ("levels", "signed", "constant", "normal")


# ---- lhs <= rhs ------------------------------------------------------------------------------------------------------


@heavy
@given(cases(*REWARDS, forbidding=True))
def test_every_bound_holds(case: Case) -> None:
    """lhs <= rhs on random trees, policies and rewards with all corners; both sides non-negative and never NaN.

    Each step of the proof is its own inequality: what is given up adds up from bound to bound.
    """
    problem, rhs = case.problem, {}
    for function in (*STEPS, *GAPS):
        bound = function(problem)
        assert_holds(bound)
        assert bound.name == function.__name__
        rhs[bound.name.removeprefix("gap_")] = float(bound.rhs.sum())
    longest = max(float(x_nV.max()) for x_nV in steps.edge_norms(problem.target))
    H = float(problem.reward_Y.max() - problem.reward_Y.min()) / 2
    pi, mu, tree = problem.target.logp(), problem.logp_mu, problem.target.tree
    chi2_T = steps.step_chi2(tree, pi, mu)
    rhs["chi2"] = 2 * H * longest * float((steps.reached(tree, mu) * chi2_T).sqrt().sum()) / 2
    rhs["fisher_chi2"] = H * math.sqrt(float(gradient.fisher_eigenvalue(problem) * chi2_T.sum()))
    for smaller, larger in (
        ("triangle", "centred"),
        ("centred", "tv"),
        ("tv", "pinsker"),
        ("centred", "centred_kl"),
        ("centred_kl", "pinsker"),
        ("centred", "chi2"),
        ("cauchy_schwarz", "chi2"),
        ("centred", "split"),
        ("conditional_fisher", "fisher"),
        ("fisher", "fisher_chi2"),
        ("prefix", "conditional"),
        ("conditional", "conditional_kl"),
    ):
        assert rhs[smaller] <= rhs[larger] * (1 + 1e-9) + 1e-12, (smaller, larger, rhs)


@few
@given(cases(*REWARDS))
def test_equal_policies_have_no_gap(case: Case) -> None:
    """With mu = old = pi every side of every bound is 0, up to the rounding of a centred reward."""
    problem = case.problem
    logp = problem.target.logp()
    same = Problem(problem.target, logp, logp, problem.reward_Y)
    for function in (*STEPS, *GAPS):
        bound = function(same)
        assert float(bound.lhs.abs().max()) == 0
        assert float(bound.rhs.abs().max()) == 0


@few
@given(cases("constant"))
def test_a_constant_reward_has_no_gap(case: Case) -> None:
    """A constant reward is a baseline: the gap is 0, and so is every right side but those of R_max."""
    problem = case.problem
    for function in GAPS:
        bound = function(problem)
        assert float(bound.lhs.abs().max()) == 0
        if function not in (gradient.gap_tv, gradient.gap_pinsker):
            assert float(bound.rhs.abs().max()) == 0


# ---- what is bounded -------------------------------------------------------------------------------------------------


@given(cases("levels", "signed"))
def test_the_gap_is_the_bias_of_what_trains(case: Case) -> None:
    """gap = grad J_seq - E[token-weighted gradient], and prefix_gap the same of W_<=t, of the production objective."""
    problem = case.problem
    truth = true_gradient(problem)
    size = float(truth.abs().max()) + 1
    for weight, expected in (
        ("token_is", gradient.gap(problem)),
        ("prefix_tis", conditional.prefix_gap(problem)),
        ("seq_tis", torch.zeros_like(truth)),
    ):
        mean = estimate(problem, reinforce(weight), ALONE, truth=truth).mean
        # Expectations under mu of weights up to e^50; the largest difference seen is 3e-14.
        torch.testing.assert_close(truth - mean, expected, rtol=0, atol=1e-11 * size)


@given(cases("normal"), st.integers(0, 9999))
def test_a_baseline_of_the_prefix_is_free(case: Case, seed: int) -> None:
    """E_mu[b(y_<t) w_t g_t] = E_mu[b(y_<t) W g_t] = 0 for any b: the gap of R and of R - b is one vector."""
    problem = case.problem
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    generator = torch.Generator().manual_seed(seed)
    # Of the first four tokens' prefixes; constant along an edge's siblings.
    baseline = [torch.randn(n, 1, generator=generator).expand(-1, tree.num_tokens) for n in tree.sizes]
    for weight in ("token", "sequence"):
        edges = tree.zero_edges()
        for _, paths in tree.chunks():
            mu_BT, log_w_BT = tree.gather(mu, paths), tree.gather(pi, paths) - tree.gather(mu, paths)
            log_weight_BT = log_w_BT if weight == "token" else log_w_BT.sum(1, keepdim=True)
            each_BT = (mu_BT.sum(1, keepdim=True) + log_weight_BT).exp() * tree.gather(baseline, paths)
            tree.scatter(edges, each_BT, paths)
        assert float(problem.target.pullback(edges).abs().max()) < 1e-12  # a sum of at most 4^5 terms of order one


# ---- discrepancy and staleness ---------------------------------------------------------------------------------------


@given(cases(*REWARDS))
def test_the_gap_splits_along_equation_5(case: Case) -> None:
    """The two parts add up to the gap; each is the whole of it where the other's policies are equal."""
    problem = case.problem
    (staleness, discrepancy), whole = gradient.gap_parts(problem), gradient.gap(problem)
    size = 1 + float(whole.norm())
    torch.testing.assert_close(staleness + discrepancy, whole, rtol=0, atol=1e-13 * size)
    pi, mu = problem.target.logp(), problem.logp_mu
    # With old = pi nothing is stale, with old = mu nothing discrepant.
    for old, nothing in ((pi, 0), (mu, 1)):
        parts = gradient.gap_parts(Problem(problem.target, mu, old, problem.reward_Y))
        assert float(parts[nothing].abs().max()) == 0
        torch.testing.assert_close(parts[1 - nothing], whole, rtol=0, atol=1e-13 * size)


# ---- tight, by number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.4, 1e-2, 1e-5])
def test_the_first_order_bounds_are_attained(delta: float) -> None:
    """Two even steps, mu off by delta at the second: ||gap|| = sqrt(2) delta, and the bounds meet it or nearly so."""
    problem = two_steps(delta)
    # KL(1/2 || 1/2 + delta) = -log(1 - 4 delta^2) / 2 and chi2 = 4 delta^2 / (1 - 4 delta^2): exact as delta -> 0.
    pinsker, chi2 = 2 * delta / math.sqrt(-math.log1p(-4 * delta**2)), math.sqrt(1 - 4 * delta**2)
    both = max(pinsker, delta / math.sqrt(-math.expm1(math.log1p(-4 * delta**2) / 2)))
    expected = {
        gradient.gap_triangle: 1.0,
        gradient.gap_tv: 1.0,
        gradient.gap_centred: 1.0,
        conditional.gap_conditional: 1.0,
        conditional.gap_conditional_fisher: 1.0,
        conditional.gap_prefix: 1.0,
        gradient.gap_pinsker: pinsker,
        gradient.gap_centred_kl: both,
        conditional.gap_conditional_kl: pinsker,
        gradient.gap_cauchy_schwarz: chi2,
        gradient.gap_fisher: chi2,
    }
    for function, ratio in expected.items():
        bound = function(problem)
        assert float(bound.lhs) == pytest.approx(math.sqrt(2) * delta, rel=1e-9)  # rounding of 1e-16 / delta
        assert float(bound.ratio) == pytest.approx(ratio, rel=1e-9), bound
    split = gradient.gap_split(problem)  # old is mu: all of it is staleness
    assert split.lhs.tolist() == pytest.approx([math.sqrt(2) * delta, 0.0], rel=1e-9)
    assert split.rhs.tolist() == pytest.approx([math.sqrt(2) * delta, 0.0], rel=1e-9)
    at_first = {
        steps.step_weights: 1.0,
        steps.step_pinsker: pinsker,
        steps.step_bretagnolle_huber: both,
        steps.step_cauchy_schwarz: chi2,
        steps.step_split: 1.0,
    }
    for function, ratio in at_first.items():
        assert float(function(problem).ratio[0]) == pytest.approx(ratio, rel=1e-9)
        assert float(function(problem).lhs[1]) == 0


def test_a_reward_that_is_not_centred_doubles_the_plain_bound() -> None:
    """Adding 1 to R in {-1, 1} moves neither the gap nor the centred bounds, and doubles those with R_max."""
    problem = two_steps(0.1)
    shifted = Problem(problem.target, problem.logp_mu, problem.logp_old, problem.reward_Y + 1)
    for function in GAPS:
        before, after = function(problem), function(shifted)
        factor = 2 if function in (gradient.gap_tv, gradient.gap_pinsker) else 1
        torch.testing.assert_close(after.lhs, before.lhs, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(after.rhs, factor * before.rhs, rtol=1e-12, atol=1e-15)


def test_the_best_constant_leaves_the_variance() -> None:
    """min over b of E[m (R - b)^2] is the total weight times the weighted variance; 0 for no weight."""
    m_Y, R_Y = torch.tensor([0.2, 0.3, 1.5]), torch.tensor([1.0, -2.0, 0.5])
    moments = torch.stack([(m_Y * R_Y**k).sum() for k in range(3)])[:, None]
    mean = float((m_Y * R_Y).sum() / m_Y.sum())
    spread = gradient.spread(torch.cat([moments, torch.zeros(3, 1)], dim=1))
    assert spread.tolist() == pytest.approx([float((m_Y * (R_Y - mean) ** 2).sum()), 0.0], rel=1e-12)


@pytest.mark.parametrize("distance", ["near", "apart"])
def test_the_conditional_variance_is_the_gaps_natural_norm(distance: str) -> None:
    """Free logits: gap^T F^+ gap equals lambda^-1 rhs^2 of `gap_conditional_fisher`, F = d_mu(s) (diag p - p p^T)."""
    problem = draw_problem("tabular", distance, 3, 3, 3, True, "normal")
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    blocks = [
        reach * (torch.diag(p) - torch.outer(p, p))
        for reach_n, logp_nV in zip(tree.reach(mu), pi, strict=True)
        for reach, p in zip(reach_n, logp_nV.exp(), strict=True)
    ]
    F, gap = torch.block_diag(*blocks), gradient.gap(problem)
    eigenvalue = gradient.fisher_eigenvalue(problem)
    assert float(eigenvalue) == pytest.approx(float(torch.linalg.eigvalsh(F).max()), rel=1e-9)
    natural = gap @ torch.linalg.pinv(F, hermitian=True) @ gap
    rhs = conditional.gap_conditional_fisher(problem).rhs
    assert float(rhs.square() / eigenvalue) == pytest.approx(float(natural), rel=1e-7)  # pinv of an F of condition 1e3


@heavy
@given(cases("normal"))
def test_the_fisher_eigenvalue_is_that_of_the_scores(case: Case) -> None:
    """lambda from Lanczos equals the dense one of sum over edges of d_mu(s) pi(a|s) g g^T."""
    problem = case.problem
    tree, policy = problem.target.tree, problem.target
    if tree.num_edges > 120:
        return
    F: Tensor | float = 0.0
    for t, (reach_n, logp_nV) in enumerate(zip(tree.reach(problem.logp_mu), policy.logp(), strict=True)):
        for n in range(len(reach_n)):
            for v in range(tree.num_tokens):
                edges = tree.zero_edges()
                edges[t][n, v] = 1.0
                score = policy.pullback(edges)
                F = F + reach_n[n] * logp_nV[n, v].exp() * torch.outer(score, score)
    assert isinstance(F, Tensor)
    expected = float(torch.linalg.eigvalsh(F).max())
    assert float(gradient.fisher_eigenvalue(problem)) == pytest.approx(expected, rel=1e-9, abs=1e-15)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*STEPS, *GAPS])
def test_mu_must_sample_what_pi_takes(function: Callable[[Problem], Bound]) -> None:
    """A token that pi takes and mu forbids has no weight: the error names its place."""
    problem = two_steps(0.1)
    bare = [torch.tensor([[0.0, -math.inf]]), problem.logp_mu[1]]
    with pytest.raises(ValueError, match="mu > 0 wherever pi > 0, got mu = 0 at depth 0, node 0, token 1"):
        function(Problem(problem.target, bare, problem.logp_old, problem.reward_Y))


@pytest.mark.parametrize("function", GAPS)
def test_the_gap_is_the_targets_own(function: Callable[[Problem], Bound]) -> None:
    """A policy trained beside the target is refused: the gap's gradients are the target's."""
    problem = two_steps(0.1)
    beside = Problem(problem.target, problem.logp_mu, problem.logp_old, problem.reward_Y, trained=problem.target)
    with pytest.raises(ValueError, match="without a `trained` policy"):
        function(beside)
