"""Cut weights: the production objective's bias against the mass that is cut off, and variances against chi-square."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import heavy
from tests.theory.bound_problems import Case, assert_holds, cases, draw_problem, one_step
from theory.bounds import BOUNDS, Bound, corrections, weights
from theory.bounds.steps import edge_norms
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem, true_gradient
from theory.exact.tree import PrefixTree
from theory.objectives import Objective, correction, preset

CAPPED = {
    "token_tis": (corrections.token_tis_bias, corrections.token_tis_bias_chi2, corrections.token_tis_variance),
    "prefix_tis": (corrections.prefix_tis_bias, corrections.prefix_tis_bias_chi2, corrections.prefix_tis_variance),
    "seq_tis": (corrections.seq_tis_bias, corrections.seq_tis_bias_chi2, corrections.seq_tis_variance),
}
BANDED = (corrections.icepop_bias, corrections.icepop_bias_chi2)
OF_WEIGHTS = (weights.weight_variance, weights.weight_variance_kl, weights.effective_sample_size)
ALONE = Group(num_responses=None, baseline="none")

caps = st.sampled_from([0.3, 0.9, 1.0, 1.05, 1.5, 2.0, 5.0, 1e6])
widths = st.sampled_from([0.0, 1e-3, 0.1, 0.2, 0.5])


def weighted_by(name: str, **numbers: float) -> Objective:
    """sum_t sg[weight_t] A log pi_t with that correction of pi/mu, as it trains."""
    return preset("reinforce", correction=correction(name, numerator="pi", **numbers))


def every_bound(problem: Problem, cap: float, low: float, high: float) -> list[Bound]:
    """All bounds of a cut and of the weights' moments, with these numbers."""
    capped = [f(problem, cap) for functions in CAPPED.values() for f in functions]
    banded = [f(problem, 0.95 - low, 1.05 + high) for f in BANDED]
    clipped = [
        corrections.min_clip_bias(problem, low, high),
        corrections.minirl_mask_bias(problem, low, high, cap),
    ]
    return [*capped, *banded, *clipped, *(f(problem) for f in OF_WEIGHTS)]


# ---- lhs <= rhs ------------------------------------------------------------------------------------------------------


@heavy
@given(cases("levels", "signed", "constant"), caps, widths, widths)
def test_every_bound_holds(case: Case, cap: float, low: float, high: float) -> None:
    """lhs <= rhs for every cap, band and clip, with all corners; a chi-square allows at least the tail there is."""
    bounds = {bound.name: bound for bound in every_bound(case.problem, cap, low, high)}
    assert set(bounds) == {n for n, f in BOUNDS.items() if f.__module__ in (corrections.__name__, weights.__name__)}
    for name, bound in bounds.items():
        assert_holds(bound)
        if f"{name}_chi2" in bounds:
            wide = bounds[f"{name}_chi2"]
            assert torch.equal(bound.lhs, wide.lhs)
            assert float(bound.rhs) <= float(wide.rhs) * (1 + 1e-9) + 1e-13, name


@pytest.mark.parametrize(("kind", "has_end"), [("tabular", False), ("bigram", True)])
def test_equal_policies_cut_nothing(kind: str, has_end: bool) -> None:
    """With mu = old = pi every weight is 1: no cap above it binds, and the variance of the weights is 0."""
    problem = draw_problem(kind, "equal", 0, 3, 3, has_end, "signed")
    logp = problem.target.logp()
    same = Problem(problem.target, logp, logp, problem.reward_Y)
    for bound in every_bound(same, 1.5, 0.1, 0.1):
        if "bias" in bound.name or bound.name == "weight_variance_kl":
            assert float(bound.lhs) < 1e-15
            assert float(bound.rhs) < 1e-13, bound
    assert float(weights.weight_variance(same).rhs) < 1e-13
    assert float(weights.effective_sample_size(same).ratio) == pytest.approx(1, rel=1e-12)


@given(cases("levels"), st.floats(0.0, 1.0), st.floats(0.01, 2.0))
def test_a_band_cuts_more_than_a_cap_at_its_top(case: Case, lo: float, above: float) -> None:
    """IcePop drops a whole weight where TIS drops its excess, and drops small ones besides."""
    problem, hi = case.problem, 1 + above
    band_T, excess_T = weights.outside(problem, lo, hi), weights.token_excess(problem, hi)
    assert bool((excess_T <= band_T * (1 + 1e-9) + 1e-14).all())


# ---- what a cut does to the estimator --------------------------------------------------------------------------------


@given(cases("levels", "signed"), caps)
def test_without_a_cut_the_sequence_weight_is_unbiased(case: Case, cap: float) -> None:
    """The left side of seq_tis_bias is the whole bias of Seq-TIS against grad J_seq (MiniRL Eq. 2)."""
    problem = case.problem
    found = estimate(problem, weighted_by("seq_tis", cap=cap), ALONE)
    bias = float((found.mean - true_gradient(problem)).norm())
    assert float(corrections.seq_tis_bias(problem, cap).lhs) == pytest.approx(bias, rel=1e-8, abs=1e-11)


@given(cases("levels"), st.floats(-2.0, 2.0), st.sampled_from([0.9, 1.2]))
def test_under_a_cut_a_baseline_is_not_free(case: Case, b: float, cap: float) -> None:
    """R - b moves the mean of min(w_t, C) by b E_mu[sum_t (w_t - C)^+ g_t], which is not 0; that of w_t not at all."""
    problem = case.problem
    tree, pi, mu = problem.target.tree, problem.target.logp(), problem.logp_mu
    shifted = Problem(problem.target, mu, problem.logp_old, problem.reward_Y - b)
    edges = tree.zero_edges()
    for _, paths in tree.chunks():
        mu_BT, w_BT = tree.gather(mu, paths), (tree.gather(pi, paths) - tree.gather(mu, paths)).exp()
        tree.scatter(edges, mu_BT.sum(1, keepdim=True).exp() * (w_BT - cap).clamp(min=0), paths)
    moved = b * problem.target.pullback(edges)
    for name, expected in (("token_is", torch.zeros_like(moved)), ("token_tis", moved)):
        objective = weighted_by(name) if name == "token_is" else weighted_by(name, cap=cap)
        before, after = (estimate(p, objective, ALONE).mean for p in (problem, shifted))
        torch.testing.assert_close(after - before, expected, rtol=0, atol=1e-11)
    if case.distance == "apart" and abs(b) > 0.1 and cap == 1.2 and case.V**case.T > 8:
        assert float(moved.norm()) > 1e-4


def test_a_clip_stops_only_updates_that_go_further() -> None:
    """R > 0 stops at r > 1 + eps_high, R < 0 at r < 1 - eps_low; either reward alone shows half of the mass."""
    pi, mu = [0.6, 0.4], [0.5, 0.5]
    for rewards, mass in (([1.0, 1.0], 0.6), ([-1.0, -1.0], 0.4), ([1.0, -1.0], 1.0), ([-1.0, 1.0], 0.0)):
        problem = one_step(pi, mu, rewards)
        assert float(weights.stopped(problem, 0.1, 0.1, None)) == pytest.approx(mass, rel=1e-12)
        assert float(weights.stopped(problem, 0.1, 0.1, 1.1)) == pytest.approx(mass if mass < 0.5 else mass - 0.05)
        assert float(weights.stopped(problem, 0.3, 0.3, None)) == 0
    # old decides, mu samples: with old = pi nothing stops, whatever mu is.
    assert float(weights.stopped(one_step(pi, mu, [1.0, -1.0], old=pi), 0.1, 0.1, 5.0)) == 0


# ---- tight, by number ------------------------------------------------------------------------------------------------


def test_the_bias_bounds_are_attained_by_one_token() -> None:
    """One token of two, even under pi, weights 0.8 and 4/3: one is cut, and each bias is exactly R_max G x its mass."""
    problem = one_step([0.5, 0.5], [0.625, 0.375], [1.0, -1.0])
    w = 0.5 / 0.375
    G = math.sqrt(0.5)
    for bound, mass in (
        (corrections.token_tis_bias(problem, 1.2), 0.375 * (w - 1.2)),
        (corrections.prefix_tis_bias(problem, 1.2), 0.375 * (w - 1.2)),
        (corrections.seq_tis_bias(problem, 1.2), 0.375 * (w - 1.2)),
        (corrections.icepop_bias(problem, 0.5, 1.2), 0.5),
        (corrections.icepop_bias(problem, 0.9, 1.5), 0.5),
        (corrections.min_clip_bias(problem, 0.1, 0.1), 0.0),
    ):
        assert float(bound.rhs) == pytest.approx(G * mass, rel=1e-12)
        assert float(bound.lhs) == pytest.approx(G * mass, rel=1e-12, abs=1e-15), bound
    clipped = one_step([0.5, 0.5], [0.625, 0.375], [1.0, 1.0])
    assert float(corrections.min_clip_bias(clipped, 0.1, 0.1).ratio) == pytest.approx(1, rel=1e-12)
    assert float(corrections.minirl_mask_bias(clipped, 0.1, 0.1, 5.0).ratio) == pytest.approx(1, rel=1e-12)
    # old decides what stops, mu what it weighs: min(0.5 / 0.625, 0.7) of the first token, whose ratio to old is 1.25.
    decoupled = one_step([0.5, 0.5], [0.625, 0.375], [1.0, 1.0], old=[0.4, 0.6])
    for cap, weight in ((0.7, 0.7), (5.0, 0.8)):
        bound = corrections.minirl_mask_bias(decoupled, 0.1, 0.1, cap)
        assert float(bound.rhs) == pytest.approx(G * 0.625 * weight, rel=1e-12)
        assert float(bound.ratio) == pytest.approx(1, rel=1e-12)
    # Two values, C -+ s about the cap: then the chi-square alone tells the tail.
    s, C = 0.5 / 0.375 - (0.5 / 0.375 + 0.8) / 2, (0.5 / 0.375 + 0.8) / 2
    assert (C - s, C + s) == pytest.approx((0.8, w))
    assert float(corrections.token_tis_bias_chi2(problem, C).ratio) == pytest.approx(1, rel=1e-12)


def test_a_chi_square_bound_on_a_band_is_attained_at_its_edge() -> None:
    """w = hi (1 + tiny) on one token, 1 on another, and all the rest of the chi-square in a vanishing corner."""
    hi, q = 1.5, 1e-4
    # Tokens: w = hi with mass q; the mass it takes is spread over a large token, whose w is nearly 1.
    problem = one_step([hi * (1 + 1e-9) * q, 1 - hi * (1 + 1e-9) * q], [q, 1 - q], [1.0, 0.0])
    _, wide = (f(problem, 0.1, hi) for f in BANDED)
    mass = float(weights.outside(problem, 0.1, hi)) * float(edge_norms(problem.target)[0].max())
    assert mass / float(wide.rhs) == pytest.approx(1, rel=1e-3)  # first order in q


def test_the_variance_bound_is_attained_by_one_token_of_constant_reward() -> None:
    """T = 1, |R| = 1, even pi: E||R w g||^2 = G^2 (1 + chi2), and the mean is 0 by symmetry of a constant reward."""
    problem = one_step([0.5, 0.5], [0.7, 0.3], [1.0, 1.0])
    chi2 = 0.04 / 0.7 + 0.04 / 0.3
    bound = corrections.token_tis_variance(problem, 1e6)
    assert float(bound.rhs) == pytest.approx(0.5 * (1 + chi2), rel=1e-12)
    assert float(bound.ratio) == pytest.approx(1, rel=1e-12)
    # A cap below 1 + chi2 bounds the second moment instead.
    assert float(corrections.token_tis_variance(problem, 1.1).rhs) == pytest.approx(0.5 * 1.1, rel=1e-12)


def test_the_variance_bounds_by_hand() -> None:
    """Three even steps, mu off by 0.2 at each: (R_max G)^2 T times the sum of 1 + chi2 of token, prefix or response."""
    tree = PrefixTree(2, 3)
    pi = TabularPolicy(tree, tuple(torch.zeros(n, 2) for n in tree.sizes))
    mu = [torch.tensor([[0.7, 0.3]]).log().expand(n, -1) for n in tree.sizes]
    problem = Problem(pi, mu, mu, torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]))
    m = 1 + 0.04 / 0.7 + 0.04 / 0.3
    for function, total, capped in (
        (corrections.token_tis_variance, 3 * m, 3 * m),
        (corrections.prefix_tis_variance, m + m**2 + m**3, m + 2 * 1.3),
        (corrections.seq_tis_variance, 3 * m**3, 3 * 1.3),
    ):
        # G^2 = 1/2, R_max = 2, T = 3; m is 1.19, below the first cap.
        assert float(function(problem, 1e6).rhs) == pytest.approx(0.5 * 4 * 3 * total, rel=1e-12)
        assert float(function(problem, 1.3).rhs) == pytest.approx(0.5 * 4 * 3 * capped, rel=1e-12)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [f for functions in CAPPED.values() for f in functions])
def test_weights_must_be_finite(function: Callable[[Problem, float], Bound]) -> None:
    """A policy that forbids a token, and a cap of no size, are refused by name and number."""
    problem = one_step([0.5, 0.5], [0.5, 0.5], [0.0, 1.0])
    bare = Problem(problem.target, [torch.tensor([[0.0, -math.inf]])], problem.logp_old, problem.reward_Y)
    with pytest.raises(ValueError, match="log mu: expected finite values, got -inf at depth 0"):
        function(bare, 2.0)
    with pytest.raises(ValueError, match=r"expected cap > 0, got 0"):
        function(problem, 0.0)


def test_the_band_may_begin_at_zero() -> None:
    """lo = 0 cuts off no small weight: the bound is then that of hi alone, hi / (hi - 1)^2 of the chi-square."""
    problem = one_step([0.5, 0.5], [0.2, 0.8], [1.0, 0.0])
    bound = corrections.icepop_bias_chi2(problem, 0.0, 2.0)
    assert_holds(bound)
    # chi2 = 0.25 / 0.2 + 0.25 / 0.8 - 1 = 0.5625; the longest score of a two-token softmax at 1/2 has norm sqrt(1/2).
    assert float(bound.rhs) == pytest.approx(2.0 * 0.5625 * math.sqrt(0.5), rel=1e-12)
    for lo, hi in ((-0.1, 2.0), (1.0, 2.0), (0.5, 1.0)):
        with pytest.raises(ValueError, match=rf"^expected 0 <= lo < 1 < hi, got lo = {lo}, hi = {hi}$"):
            corrections.icepop_bias_chi2(problem, lo, hi)
