"""Routing bounds: lhs <= rhs on random and cornered routers, and the exact objects that they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.routers import ROUNDING, bernoulli, draw_kernels, router_pairs, seeds
from theory.bounds import BOUNDS, Bound
from theory.bounds.routing import (
    all_routes,
    k_slot_route,
    pinsker,
    product_tv,
    product_tv_coupling,
    replay_bias,
    replay_bias_mean,
    route_distribution,
    route_gradient,
    route_gradient_diameter,
    slots,
    soft_route,
    soft_route_averaged,
)
from theory.divergences import kl_of_terms, kl_p_q
from theory.streams import stream


def draw_bounds(p: Tensor, q: Tensor, seed: int, K: int) -> list[Bound]:
    """Every bound of theory/bounds/routing.py on these routers (T, L, E), with random kernels."""
    T, L, E = p.shape
    p_A, q_A = route_distribution(p), route_distribution(q)
    kernels = draw_kernels(seed, T, E**L, 3)
    differs = torch.rand(6, generator=stream(seed, "differs")) < 0.5
    a = draw_kernels(seed + 1, 6, 3)
    b = torch.where(differs[:, None], draw_kernels(seed + 2, 6, 3), a)
    probability = torch.rand(6, generator=stream(seed, "probability")).softmax(0)
    return [
        pinsker(p, q),
        product_tv(p, q),
        product_tv_coupling(p, q),
        route_gradient(p_A, q_A, kernels),
        route_gradient_diameter(p_A, q_A, kernels),
        soft_route(p, q, kernels),
        soft_route_averaged(p, q, kernels),
        k_slot_route(p, q, draw_kernels(seed, T, E ** (L * K), 2), K),
        replay_bias(a, b, probability, differs),
        replay_bias_mean(a, b, probability, differs),
    ]


@given(pair=router_pairs(), seed=seeds)
def test_a_token_is_bounded_by_its_own_kernels(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """Both sides of a token's bound are the same alone as beside other tokens, whose kernels may be larger."""
    p, q = pair
    T, L, E = p.shape
    p_A, q_A, kernels = route_distribution(p), route_distribution(q), draw_kernels(seed, T, E**L, 3)
    kernels = kernels * torch.arange(1.0, T + 1)[:, None, None]
    for bound in (route_gradient, route_gradient_diameter):
        together = bound(p_A, q_A, kernels)
        for t in range(T):
            alone = bound(p_A[t : t + 1], q_A[t : t + 1], kernels[t : t + 1])
            # The same sums over at most E^L routes: float64 rounding.
            torch.testing.assert_close(together.lhs[t], alone.lhs[0], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(together.rhs[t], alone.rhs[0], rtol=1e-12, atol=1e-14)


@given(pair=router_pairs(), seed=seeds, K=st.integers(1, 2))
def test_every_bound_holds(pair: tuple[Tensor, Tensor], seed: int, K: int) -> None:
    """lhs <= rhs for every kind of router, size and kernel; both sides are non-negative and never NaN."""
    for bound in draw_bounds(*pair, seed, K):
        assert bool(bound.holds(ROUNDING).all()), bound
        assert bool((bound.lhs >= -ROUNDING).all()), bound
        assert bool(((bound.ratio <= 1 + 1e-6) | (bound.rhs < 1e-6)).all()), bound  # ROUNDING / 1e-6, and to spare
        assert BOUNDS[bound.name].__name__ == bound.name


@given(pair=router_pairs(), seed=seeds)
def test_sharper_bounds_are_sharper(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """The coupling form is below the sum, the diameter below 2 M, and a loss that is averaged and rescaled the same."""
    p, q = pair
    assert bool((product_tv_coupling(p, q).rhs <= product_tv(p, q).rhs + ROUNDING).all())
    p_A, q_A = route_distribution(p), route_distribution(q)
    kernels = draw_kernels(seed, *p_A.shape, 3)
    wide, narrow = route_gradient(p_A, q_A, kernels), route_gradient_diameter(p_A, q_A, kernels)
    assert bool((narrow.rhs <= wide.rhs + ROUNDING).all())
    assert torch.equal(narrow.lhs, wide.lhs)
    summed, averaged = soft_route(p, q, kernels), soft_route_averaged(p, q, kernels)
    torch.testing.assert_close(averaged.rhs, summed.rhs, rtol=1e-12, atol=0)  # two orders of one sum
    assert torch.equal(averaged.lhs, summed.lhs)


@given(pair=router_pairs(tokens=(3, 3)), seed=seeds)
def test_proposition_b1_is_a_chain(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """Mean deviation <= mean of 2 M_t TV_t (Eq. 16) <= mean of M_t sqrt(2 KL_t) (Eq. 20) <= M sqrt(2 loss) (Eq. 18)."""
    p, q = pair
    p_A, q_A = route_distribution(p), route_distribution(q)
    kernels = draw_kernels(seed, *p_A.shape, 3)
    per_token, whole = route_gradient(p_A, q_A, kernels), soft_route(p, q, kernels)
    M = kernels.norm(dim=-1).amax(-1)
    pinskered = (M * (2 * kl_of_terms(p, q).sum(1)).sqrt()).mean()
    steps = [whole.lhs, per_token.lhs.mean(), per_token.rhs.mean(), pinskered, whole.rhs]
    assert all(float(a) <= float(b) + ROUNDING for a, b in pairwise(steps)), steps


# ---- the objects themselves ------------------------------------------------------------------------------------------


@given(pair=router_pairs(tokens=(1, 1)), K=st.integers(1, 2))
def test_routes_are_enumerated_in_one_order(pair: tuple[Tensor, Tensor], K: int) -> None:
    """P of each enumerated route is the product of its experts' probabilities, slots included, and sums to 1."""
    p = pair[0][0]
    L, E = p.shape
    joint = route_distribution(slots(p, K))
    assert all_routes(L * K, E).tolist() == [list(z) for z in product(range(E), repeat=L * K)]
    rho = p.softmax(-1).tolist()
    for z, probability in zip(product(range(E), repeat=L * K), joint.tolist(), strict=True):
        factors = [rho[i // K][expert] for i, expert in enumerate(z)]
        assert probability == pytest.approx(math.prod(factors), rel=1e-12, abs=1e-300)
    assert float(joint.sum()) == pytest.approx(1, rel=1e-12)


@given(pair=router_pairs(tokens=(1, 1)), K=st.integers(1, 2))
def test_kl_adds_over_layers_and_slots(pair: tuple[Tensor, Tensor], K: int) -> None:
    """KL of the enumerated product distributions is K times the sum of the layers' KLs (Pr2 Eq. 20)."""
    p, q = (x[0] for x in pair)
    joint = kl_of_terms(route_distribution(slots(p, K)).log(), route_distribution(slots(q, K)).log())
    # Logarithms of products of up to six probabilities, each rounded: 1e-15 in a log-ratio, squared or times it.
    assert float(joint) == pytest.approx(K * float(kl_of_terms(p, q).sum()), rel=1e-10, abs=1e-16)


@pytest.mark.parametrize("fn", [kl_of_terms, kl_p_q])
@pytest.mark.parametrize(("dtype", "low"), [(torch.float32, -120.0), (torch.float64, -800.0)])
def test_a_choice_whose_probability_underflows(fn: Callable[..., Tensor], dtype: torch.dtype, low: float) -> None:
    """p_j is 0 as a number, though its logit is finite: it adds q_j's part, or all of inf where q never takes j."""
    p, even, never = (torch.tensor([0.0, x], dtype=dtype) for x in (low, 0.0, -math.inf))
    assert fn(p, even).item() == pytest.approx(math.log(2), rel=1e-6)
    assert fn(never, even).item() == pytest.approx(math.log(2), rel=1e-6)
    assert fn(p, p).item() == 0 and fn(never, never).item() == 0 and fn(never, p).item() == 0
    assert fn(p, never).item() == math.inf and fn(even, never).item() == math.inf


@given(pair=router_pairs())
def test_kl_agrees_with_the_plain_sum(pair: tuple[Tensor, Tensor]) -> None:
    """The sum of p (r - 1 - log r) is KL(p || q): the plain sum up to that one's rounding, and never below 0."""
    torch.testing.assert_close(kl_of_terms(*pair), kl_p_q(*pair), rtol=1e-12, atol=1e-14)
    assert bool((kl_of_terms(*pair) >= 0).all())


def test_kl_keeps_its_digits_near_equality() -> None:
    """For a Bernoulli(1/2) against (1 + d) / 2 it is -log(1 - d^2) / 2, to nine digits even at d = 1e-7."""
    for d in (1e-1, 1e-4, 1e-7):
        value = float(kl_of_terms(bernoulli(0.5), bernoulli((1 + d) / 2))[0])
        assert value == pytest.approx(-math.log1p(-d * d) / 2, rel=1e-8)  # logits are rounded at 1e-16 / d


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_callers_mistakes_name_both_numbers() -> None:
    """Sizes, distributions and gradients that do not fit are errors."""
    p_A, kernels = torch.tensor([0.5, 0.5]), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"p_A: expected probabilities that sum to 1, got a sum off by 0.5"):
        route_gradient(p_A / 2, p_A, kernels)
    with pytest.raises(ValueError, match=r"q_A: expected probabilities .* least -0.5"):
        route_gradient(p_A, torch.tensor([1.5, -0.5]), kernels)
    with pytest.raises(ValueError, match=r"expected kernels for \(1, 4\) routes, got \(1, 2\)"):
        soft_route(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), kernels[None])
    with pytest.raises(ValueError, match="expected at least 1 slot, got 0"):
        slots(torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match="at least 1 layer and 1 expert, got 0 and 3"):
        all_routes(0, 3)
    with pytest.raises(ValueError, match=r"at most 10000000 routes, got 128\^48"):
        all_routes(48, 128)
    with pytest.raises(ValueError, match="response 1: expected equal gradients under equal routes, got a gap of 1"):
        replay_bias(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]), p_A, torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"probability_Y: expected probabilities that sum to 1, got a sum off by 1"):
        replay_bias(kernels, kernels, 2 * p_A, torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"pinsker: expected both sides to be of shape \(2,\) \(lhs\), got \(3,\)"):
        Bound("pinsker", torch.zeros(2), torch.zeros(3))


def test_a_bound_holds_within_its_tolerance_and_not_beyond() -> None:
    """holds is lhs <= rhs + tolerance; NaN holds nowhere, and inf on the right says nothing with ratio 0."""
    bound = Bound("name", torch.tensor([1.0, 1.5, math.nan, 2.0]), torch.tensor([1.0, 1.0, 1.0, math.inf]))
    assert bound.holds(0.0).tolist() == [True, False, False, True]
    assert bound.holds(0.5).tolist() == [True, True, False, True]
    assert bound.ratio[[0, 1, 3]].tolist() == [1.0, 1.5, 0.0]


def test_the_table_names_its_functions() -> None:
    """BOUNDS has the 50 functions, and no helper; every entry has a proof and says where it is tight."""
    assert len(BOUNDS) == 50
    for name, function in BOUNDS.items():
        assert "Proof" in (function.__doc__ or "") and "Tight" in (function.__doc__ or ""), name
