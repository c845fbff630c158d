"""Routing bounds where they are tight and where they are loose: each ratio by its closed form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.theory.routers import bernoulli, draw_kernels, opposite, router_pairs
from theory.bounds.routing import (
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
from theory.divergences import tv_p_q


@pytest.mark.parametrize("d", [1e-1, 1e-2, 1e-3])
def test_pinsker_is_tight_at_one_half(d: float) -> None:
    """From (1 + d) / 2 to 1/2 the ratio is 1 - d^2 / 12 + O(d^4)."""
    ratio = float(pinsker(bernoulli((1 + d) / 2), bernoulli(0.5)).ratio[0])
    # The next term of the series is -0.023 d^4; rounding of a total variation of d / 2 is 1e-16 / d.
    assert ratio == pytest.approx(1 - d * d / 12, abs=0.1 * d**4 + 1e-12)


def test_pinsker_is_loose_for_rare_outcomes() -> None:
    """A certain p against a q with eps elsewhere: ratio sqrt(2 eps) up to its first correction, and 0.014 at 1e-4."""
    for eps in (1e-2, 1e-4):
        ratio = float(pinsker(bernoulli(1.0), bernoulli(1 - eps)).ratio[0])
        assert ratio == pytest.approx(math.sqrt(2 * eps), rel=eps)
    assert ratio == pytest.approx(0.01414, abs=1e-5)


def walk(steps: int) -> float:
    """E|S_n| of a simple random walk, by its closed binomial sum."""
    return sum(math.comb(steps, i) * abs(2 * i - steps) for i in range(steps + 1)) / 2**steps


@pytest.mark.parametrize("L", [1, 2, 4, 6])
def test_product_tv_cancels_for_balanced_changes(L: int) -> None:
    """L layers each off by d at 1/2: TV of the product over the sum is E|S_L| / L as d -> 0, and 1 for one layer."""
    p, q = bernoulli(*[0.5 + 1e-6] * L), bernoulli(*[0.5] * L)
    for bound in (product_tv(p, q), product_tv_coupling(p, q)):
        # Second order in d = 1e-6, and rounding of 1e-16 / d.
        assert float(bound.ratio) == pytest.approx(walk(L) / L, rel=1e-5)
    one = product_tv(bernoulli(0.7, *[0.3] * L), bernoulli(0.2, *[0.3] * L))
    assert float(one.ratio) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("eps", [0.5, 1e-3])
def test_rare_events_add_up(eps: float) -> None:
    """p certain, q off by eps in each of 4 layers: TV is 1 - (1 - eps)^4, the coupling form exactly, the sum 4 eps."""
    p, q = bernoulli(*[1.0] * 4), bernoulli(*[1 - eps] * 4)
    exact = 1 - (1 - eps) ** 4
    assert float(product_tv(p, q).lhs) == pytest.approx(exact, rel=1e-12)
    assert float(product_tv_coupling(p, q).ratio) == pytest.approx(1, rel=1e-12)
    assert float(product_tv(p, q).ratio) == pytest.approx(exact / (4 * eps), rel=1e-12)


@given(pair=router_pairs())
def test_equation_16_is_an_equality_for_opposite_kernels(pair: tuple[Tensor, Tensor]) -> None:
    """Kernels of +M on the routes that P prefers and -M elsewhere give exactly 2 M TV, for any P and Q."""
    p_A, q_A = (route_distribution(x) for x in pair)
    bound = route_gradient(p_A, q_A, 2.5 * opposite(p_A, q_A))
    torch.testing.assert_close(bound.lhs, bound.rhs, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(bound.rhs, 5 * (p_A - q_A).abs().sum(1) / 2, rtol=1e-12, atol=1e-15)


def test_a_shared_mean_loosens_equation_16_and_not_its_diameter() -> None:
    """Kernels c +- 1: 2 M TV grows with c, while the deviation and the diameter do not see it."""
    p_A, q_A = torch.tensor([0.8, 0.2]), torch.tensor([0.3, 0.7])
    for c in (0.0, 9.0):
        kernels = c + opposite(p_A, q_A)
        assert float(route_gradient(p_A, q_A, kernels).ratio) == pytest.approx(1 / (1 + c), rel=1e-12)
        assert float(route_gradient_diameter(p_A, q_A, kernels).ratio) == pytest.approx(1, rel=1e-12)


def balanced(T: int, L: int, d: float) -> tuple[Tensor, Tensor]:
    """Routers of two experts at (1 + d) / 2 and at 1/2, alike at every token and layer."""
    return bernoulli(*[(1 + d) / 2] * (T * L)).view(T, L, 2), bernoulli(*[0.5] * (T * L)).view(T, L, 2)


@pytest.mark.parametrize("L", [1, 2, 4])
def test_proposition_b1_is_tight_for_one_layer(L: int) -> None:
    """Small balanced steps and opposite kernels: the ratio is E|S_L| / sqrt(L), so 1 for one layer, 3/4 for four."""
    p, q = balanced(3, L, 1e-4)
    kernels = 2.0 * opposite(route_distribution(p), route_distribution(q))
    expected = walk(L) / math.sqrt(L)
    assert expected == pytest.approx({1: 1.0, 2: 0.7071067811865476, 4: 0.75}[L])
    for bound in (soft_route(p, q, kernels), soft_route_averaged(p, q, kernels)):
        assert float(bound.ratio) == pytest.approx(expected, rel=1e-4)  # first order in d = 1e-4
    # The right side in full: M sqrt(2 L KL), M = 2, KL = -log(1 - d^2) / 2 in the other direction to this order.
    assert float(soft_route(p, q, kernels).rhs) == pytest.approx(2 * math.sqrt(L) * 1e-4, rel=1e-7)


def test_the_layer_averaged_loss_needs_its_factor() -> None:
    """Without L under the root the averaged form is false: four small balanced layers exceed it by half."""
    p, q = balanced(1, 4, 1e-4)
    bound = soft_route_averaged(p, q, opposite(route_distribution(p), route_distribution(q)))
    without = float(bound.rhs) / math.sqrt(4)
    assert float(bound.lhs) / without == pytest.approx(1.5, rel=1e-4)  # first order in d = 1e-4


def test_jensen_is_loose_for_unequal_tokens() -> None:
    """One token of four carries all of the KL: the mean of roots is half the root of the mean."""
    p, q = balanced(4, 1, 1e-4)
    p[1:] = q[1:]
    bound = soft_route(p, q, opposite(route_distribution(p), route_distribution(q)))
    assert float(bound.ratio) == pytest.approx(0.5, rel=1e-7)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_k_slots_scale_the_bound_by_the_root_of_k(K: int) -> None:
    """rhs is sqrt(K) times one slot's, and for small balanced steps the ratio is E|S_K| / sqrt(K)."""
    p, q = balanced(2, 1, 1e-4)
    joint = (route_distribution(slots(x, K)) for x in (p, q))
    bound = k_slot_route(p, q, opposite(*joint), K)
    one = soft_route(p, q, opposite(route_distribution(p), route_distribution(q)))
    assert float(bound.rhs) == pytest.approx(math.sqrt(K) * float(one.rhs), rel=1e-12)
    assert float(bound.ratio) == pytest.approx(walk(K) / math.sqrt(K), rel=1e-4)  # first order in d = 1e-4


def test_the_factor_of_k_slots_on_the_total_variation_is_k() -> None:
    """sqrt(K) bounds no total variation: four slots against a rare expert have almost four times one slot's."""
    p, q = bernoulli(1.0), bernoulli(1 - 1e-4)
    one = float(tv_p_q(p, q)[0])
    four = float(product_tv(slots(p, 4), slots(q, 4)).lhs)
    assert four / one == pytest.approx(4, rel=1e-3)
    assert four > math.sqrt(4) * one


def test_replay_bias_is_an_equality_for_opposite_gradients() -> None:
    """Gradients that turn round wherever the route differs: lhs = 2 M P(differs); a change of a tenth gives a 20th."""
    probability, differs = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([True, False, True])
    a = torch.tensor([[3.0, 4.0]]).expand(3, 2)
    turned, nudged = (torch.where(differs[:, None], factor * a, a) for factor in (-1.0, 0.9))
    bound = replay_bias(a, turned, probability, differs)
    assert float(bound.rhs) == pytest.approx(2 * 5 * 0.7, rel=1e-12)
    assert float(bound.ratio) == pytest.approx(1, rel=1e-12)
    assert float(replay_bias(nudged, a, probability, differs).ratio) == pytest.approx(0.05, rel=1e-12)
    # The longest gradient may stand on either side, and where no route differs.
    for x, y in ((a, 0.5 * a), (0.5 * a, a)):
        half = replay_bias(x, y, probability, torch.ones(3, dtype=torch.bool))
        assert float(half.rhs) == pytest.approx(2 * 5, rel=1e-12)
        assert float(half.lhs) == pytest.approx(2.5, rel=1e-12)
    shortened = torch.where(differs[:, None], 0.5 * a, a)
    assert float(replay_bias(shortened, shortened, probability, differs).rhs) == pytest.approx(7, rel=1e-12)


def test_replay_bias_sees_that_responses_cancel() -> None:
    """The left side is the norm of the mean change, not the mean of norms: opposite changes of two responses cancel."""
    a, b = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    for function in (replay_bias, replay_bias_mean):
        bound = function(a, b, torch.tensor([0.5, 0.5]), torch.tensor([True, True]))
        assert float(bound.lhs) == 0
    assert float(replay_bias_mean(a, b, torch.tensor([0.5, 0.5]), torch.tensor([True, True])).rhs) == 1


def test_a_rare_long_gradient_decides_one_replay_bound_and_not_the_other() -> None:
    """Opposite gradients of lengths 1 and, at 1%, 100: the mean form is an equality, 2 M P is 50 times that."""
    probability, lengths = torch.tensor([0.99, 0.01]), torch.tensor([[1.0], [100.0]])
    differs = torch.tensor([True, True])
    assert float(replay_bias_mean(lengths, -lengths, probability, differs).ratio) == pytest.approx(1, rel=1e-12)
    assert float(replay_bias(lengths, -lengths, probability, differs).ratio) == pytest.approx(0.0199, rel=1e-12)


def test_replay_bias_is_zero_where_no_route_differs() -> None:
    """Equal routes, equal gradients: both sides are 0, and the ratio is no data."""
    a = draw_kernels(0, 4, 3)
    for function in (replay_bias, replay_bias_mean):
        bound = function(a, a, torch.full((4,), 0.25), torch.zeros(4, dtype=torch.bool))
        assert (float(bound.lhs), float(bound.rhs)) == (0, 0)
        assert bool(bound.ratio.isnan())
