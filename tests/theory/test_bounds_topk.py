"""Top-k bounds: regret and margins hold on every router, are reached by named ones, and the paper's by which factor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.routers import ROUNDING, bernoulli, draw_logits, router_pairs, seeds
from theory.bounds import BOUNDS
from theory.bounds.topk import (
    in_top,
    margin,
    route_flips,
    swap_cost,
    topk_margin_exact,
    topk_margin_kl,
    topk_margin_max_norm,
    topk_margin_tv,
    topk_regret,
    topk_regret_exchanged,
)
from theory.divergences import kl_of_terms

BY_ROW = (
    topk_regret, topk_regret_exchanged, topk_margin_max_norm, topk_margin_tv, topk_margin_kl, topk_margin_exact,
)  # fmt: skip
rows = router_pairs(tokens=(1, 4), layers=(1, 1), most_experts=7)


def slots_of(E: int, seed: int) -> int:
    """A number of slots from 1 to E."""
    return 1 + seed % E


def swapped(p_E: Tensor, i: int, j: int, past: float = 1e-9) -> Tensor:
    """Logits of p with the mass of experts i and j halved between them, and j just ahead of i."""
    q_E, half = p_E.clone(), (p_E[i] + p_E[j]) / 2
    q_E[i], q_E[j] = half - past, half + past
    return q_E.log()


@given(pair=rows, seed=seeds)
def test_every_bound_holds(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """lhs <= rhs for every router, E = K, K = 1, ties and -inf logits included."""
    p, q = pair
    K = slots_of(p.shape[-1], seed)
    for function in BY_ROW:
        bound = function(p, q, K)
        assert bound.name == function.__name__
        assert bool(bound.holds(ROUNDING).all()), bound
        assert bool((bound.lhs >= -ROUNDING).all()), bound
    for threshold in (1e-3, 0.05, 1.0):
        flips = route_flips(p, q, K, threshold)
        assert bool(flips.holds(ROUNDING)), flips
    assert {f.__name__ for f in (*BY_ROW, route_flips)} <= set(BOUNDS)


@given(pair=rows, seed=seeds)
def test_sharper_bounds_are_sharper(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """Certificates in order: margin^2 / 2 <= margin^2 / 2s <= swap cost; sqrt(2 s KL) <= sqrt(2 KL); max <= TV."""
    p, q = pair
    K = slots_of(p.shape[-1], seed)
    plain, exact = topk_margin_kl(p, q, K), topk_margin_exact(p, q, K)
    assert bool((plain.lhs <= exact.lhs + ROUNDING).all())
    if p.shape[-1] > K:
        top = p.softmax(-1).sort(descending=True).values
        s, gap = top[..., K - 1] + top[..., K], margin(p, K)
        refined = torch.where(s > 0, gap.square() / (2 * s), 0.0)
        assert bool((gap.square() / 2 <= refined + ROUNDING).all())
        assert bool((refined <= swap_cost(p, K) + ROUNDING).all())
    assert bool((topk_regret_exchanged(p, q, K).rhs <= topk_regret(p, q, K).rhs + ROUNDING).all())
    assert bool((topk_margin_max_norm(p, q, K).rhs <= topk_margin_tv(p, q, K).rhs + ROUNDING).all())


@given(pair=rows, seed=seeds)
def test_regret_is_the_mass_lost(pair: tuple[Tensor, Tensor], seed: int) -> None:
    """lhs is p(S_p) - p(S_q) by set arithmetic, and 0 where the sets are the same."""
    p, q = (x[0, 0] for x in pair)
    K = slots_of(len(p), seed)
    best, chosen = set(p.topk(K).indices.tolist()), set(q.topk(K).indices.tolist())
    mass = p.softmax(0)
    lost = sum(float(mass[j]) for j in best - chosen) - sum(float(mass[j]) for j in chosen - best)
    for function in (topk_regret, topk_regret_exchanged):
        assert float(function(p, q, K).lhs) == pytest.approx(lost, abs=ROUNDING)
    assert set(in_top(p, K).nonzero()[:, 0].tolist()) == best


def certificates(p: Tensor, q: Tensor, K: int) -> dict[str, Tensor]:
    """True where each condition promises equal top-k sets."""
    gap = p.softmax(-1) - q.softmax(-1)
    return {
        "exact": kl_of_terms(p, q) < swap_cost(p, K),
        "paper": kl_of_terms(p, q) < margin(p, K).square() / 2,
        "tv": gap.abs().sum(-1) / 2 < margin(p, K) / 2,
        "max_norm": gap.abs().amax(-1) < margin(p, K) / 2,
    }


def test_how_much_each_certificate_covers() -> None:
    """500 routers of 128 experts, top 8, logits moved by 1%: 93% keep their experts, and all that are promised to.

    The max-norm shows it of 41%, the exact KL of 25%, total variation of 0.6%, and the paper's KL of none.
    """
    p = torch.stack([draw_logits(seed, 128) for seed in range(500)])
    q = p + 0.01 * torch.stack([draw_logits(seed, 128) for seed in range(500, 1000)])
    promised, is_same = certificates(p, q, 8), (in_top(p, 8) == in_top(q, 8)).all(-1)
    assert all(bool((is_same | ~x).all()) for x in promised.values())
    covered = {name: float(x.double().mean()) for name, x in promised.items()}
    # The stream is fixed; another rounding of softmax may move a router or two of the 500.
    assert covered == pytest.approx({"exact": 0.254, "paper": 0.0, "tv": 0.006, "max_norm": 0.412}, abs=0.005)
    assert float(is_same.double().mean()) == pytest.approx(0.93, abs=0.005)


@pytest.mark.parametrize("d", [0.1, 0.01])
def test_the_papers_regret_constant_is_best_for_two_experts(d: float) -> None:
    """p = (1 +- d) / 2 against a tie: ratio 1 - d^2 / 12, so no constant below 2 is true; the exchanged mass is 1."""
    p, q = bernoulli((1 + d) / 2)[0], bernoulli(0.5 - 1e-12)[0]
    for bound in (topk_regret(p, q, 1), topk_regret_exchanged(p, q, 1)):
        # The next term is -0.023 d^4; the tie is missed by 1e-12 / d.
        assert float(bound.ratio) == pytest.approx(1 - d * d / 12, abs=0.1 * d**4 + 1e-9)


def test_the_papers_regret_bound_at_its_loosest() -> None:
    """All of the mass lost costs KL = log 2, where sqrt(2 KL) = 1.177 claims more than there is."""
    p, q = bernoulli(1.0)[0], bernoulli(0.5 - 1e-12)[0]
    bound = topk_regret(p, q, 1)
    assert (float(bound.lhs), float(bound.rhs)) == pytest.approx((1.0, math.sqrt(2 * math.log(2))), abs=1e-9)


def flat_router(E: int, K: int, a: float, b: float) -> Tensor:
    """K experts of probability a, K of probability b, and the rest of the mass spread evenly over the others."""
    rest = (1 - K * (a + b)) / (E - 2 * K)
    assert rest < b
    return torch.tensor([a] * K + [b] * K + [rest] * (E - 2 * K))


def test_among_many_experts_the_papers_margin_is_loose_by_the_mass_at_the_boundary() -> None:
    """128 experts, top 8, boundary 0.012 against 0.008: the least KL that flips is 50.3 times margin^2 / 2."""
    p_E = flat_router(128, 8, 0.012, 0.008)
    p, q = p_E.log(), swapped(p_E, 7, 8)
    paper, exact = topk_margin_kl(p, q, 8), topk_margin_exact(p, q, 8)
    assert float(exact.ratio) == pytest.approx(1, rel=1e-6)  # q passes the tie by 1e-9 of 0.004
    assert float(paper.lhs) == pytest.approx(0.004**2 / 2, rel=1e-9)
    assert float(exact.lhs / paper.lhs) == pytest.approx(50.339, abs=1e-3)  # 1 / s = 50, and phi(0.2) above 0.2^2 / 2
    regret, refined = topk_regret(p, q, 8), topk_regret_exchanged(p, q, 8)
    assert float(regret.ratio) == pytest.approx(0.14094, abs=1e-5)  # sqrt(s) = 0.1414, times 0.9966
    assert float(refined.ratio) == pytest.approx(0.99663, abs=1e-5)


@given(seed=seeds, E=st.integers(2, 7))
def test_the_certificates_are_reached(seed: int, E: int) -> None:
    """The q that halves the boundary's mass flips the choice at KL = swap cost, and at half the margin in max-norm and
    in total variation: none of the three certificates can be larger."""
    p = draw_logits(seed, E)
    K = 1 + seed % (E - 1)
    order = p.argsort(descending=True)
    q = swapped(p.softmax(0), int(order[K - 1]), int(order[K]), past=1e-12)
    bound = topk_margin_exact(p, q, K)
    # Passing the tie by 1e-12 costs 1e-12 times the slope, at most the log-ratio of the two.
    assert float(bound.lhs) == pytest.approx(float(bound.rhs), rel=1e-5, abs=1e-11)
    assert float(bound.lhs) == float(swap_cost(p, K))
    for bound in (topk_margin_max_norm(p, q, K), topk_margin_tv(p, q, K)):
        assert float(bound.lhs) == pytest.approx(float(bound.rhs), abs=1e-11)  # the tie is passed by 1e-12
        assert float(bound.lhs) == pytest.approx(float(margin(p, K)) / 2, rel=1e-12)


def test_with_every_expert_chosen_nothing_can_flip() -> None:
    """E = K: margin and swap cost are inf, every left side is 0; with a tie at the boundary both are 0."""
    p, q = draw_logits(0, 5), draw_logits(1, 5)
    assert (float(margin(p, 5)), float(swap_cost(p, 5))) == (math.inf, math.inf)
    assert [float(function(p, q, 5).lhs) for function in BY_ROW] == [0.0] * 6
    tie = torch.tensor([1.0, 0.0, 0.0, -math.inf])
    assert (float(margin(tie, 2)), float(swap_cost(tie, 2))) == (0, 0)
    # Two experts that p forbids: a tie at 0. One: the cost is a log 2, as b = 0.
    assert float(swap_cost(torch.tensor([0.0, -math.inf, -math.inf]), 2)) == 0
    assert float(swap_cost(torch.tensor([0.0, -math.inf]), 1)) == pytest.approx(math.log(2), rel=1e-12)


def test_slots_out_of_range_are_errors() -> None:
    """Fewer than one slot, or more than there are experts, is an error that says what came."""
    for function in (in_top, margin, swap_cost):
        for K in (0, 4):
            with pytest.raises(ValueError, match=rf"expected from 1 to 3 slots \(experts\), got {K}"):
                function(torch.zeros(3), K)


def test_flips_are_bounded_by_loss_and_margin() -> None:
    """One token of four crosses a tie at KL c: P(flip) = 1/4 is the whole right side at threshold c, half at c/2."""
    p = bernoulli(*[0.6] * 4).view(4, 1, 2)
    q = p.clone()
    q[0] = bernoulli(0.5 - 1e-9)
    cost = float(kl_of_terms(p[0], q[0]))
    for threshold, ratio in ((cost * (1 - 1e-7), 1.0), (cost / 2, 0.5), (cost * (1 + 1e-6), 0.2)):
        bound = route_flips(p, q, 1, threshold)
        assert float(bound.lhs) == 0.25
        assert float(bound.ratio) == pytest.approx(ratio, rel=1e-5)


def test_flips_count_tokens_not_layers() -> None:
    """A token flips, or is near a tie, if any of its layers is; the KLs of its layers add."""
    p = bernoulli(0.6, 0.9, 0.6, 0.9).view(2, 2, 2)
    q = p.clone()
    q[0] = bernoulli(0.4, 0.8)
    cost = float(swap_cost(p[0, 0], 1))
    loss = float(kl_of_terms(p[0], q[0]).sum()) / 2
    for threshold, near in ((cost / 2, 0.0), (2 * cost, 1.0)):
        bound = route_flips(p, q, 1, threshold)
        assert float(bound.lhs) == 0.5
        assert float(bound.rhs) == pytest.approx(near + loss / threshold, rel=1e-12)
    with pytest.raises(ValueError, match="threshold above 0, got 0"):
        route_flips(p, q, 1, 0.0)
