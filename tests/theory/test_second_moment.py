"""Laws of M2PO's bounds: the level meets the budget, and the objective is GRPO's with a whole mini-batch's bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import MODERATE, batches
from tests.theory.objective_batches import Batch, make_batch
from tests.theory.test_objectives import one_response, same
from theory.objectives import Objective, preset
from theory.objectives.second_moment import clip_level

M2PO = preset("grpo_dapo", m2_budget=0.04, eps_low=0.3, eps_high=0.5)


def settled(objective: Objective, batch: Batch) -> Objective:
    """The objective with the bounds of this whole mini-batch."""
    return objective.within_budget(batch.pi, batch.old, batch.mu, batch.advantages[:, None], batch.mask)


def test_the_level_of_three_tokens() -> None:
    """Squares 0.01, 0.04 and 1 of what moves away, budget 0.04 a token: 0.12 - 0.05 is left to the third."""
    log_ratio = torch.tensor([[0.1, 1.0, -5.0], [-0.2, 7.0, 3.0]])
    advantages, mask = torch.tensor([[1.0], [-2.0]]), torch.tensor([[True, True, True], [True, False, True]])
    assert clip_level(log_ratio, advantages, mask, 0.04) == pytest.approx(math.sqrt(0.07))
    assert clip_level(log_ratio, advantages, mask, 0.36) == math.inf
    assert clip_level(-log_ratio, torch.zeros(2, 1), mask, 0.04) == math.inf  # with A = 0 nothing moves away
    third = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])  # advantages per token
    assert clip_level(log_ratio, third, mask, 1e-9) == pytest.approx(math.sqrt(1e-9))


@pytest.mark.parametrize("far", [50.0, 1e9, math.inf])
def test_a_token_far_from_old_is_one_more_to_cap(far: float) -> None:
    """However far it is, at probability 0 too, the others keep their squares and it has what they leave."""
    near, mask = torch.full((1, 1000), 0.17, dtype=torch.float64), torch.ones(1, 1001, dtype=torch.bool)
    log_ratio = -torch.cat([near, torch.tensor([[far]], dtype=torch.float64)], dim=1)
    tau = clip_level(log_ratio, -torch.ones(1, 1), mask, 0.04)
    assert tau == pytest.approx(math.sqrt(0.04 * 1001 - 1000 * 0.17**2), rel=1e-9)
    # Of two such tokens each has half of what the other leaves.
    two = clip_level(torch.tensor([[-far, -far, 0.1]]), -torch.ones(1, 1), mask[:, :3], 0.04)
    assert two == pytest.approx(0.2, rel=1e-9)


def test_a_bound_beyond_the_type_is_none() -> None:
    """A level of 109 nats, or e^109 as a bound on r, is more than float32 holds: there nothing binds from above."""
    # One token is far away, and 300,000 on the same side of old leave it all of their budget.
    pi = torch.cat([torch.zeros(1, 1), torch.full((1, 300_000), -0.5)], 1)
    old = torch.cat([torch.full((1, 1), -200.0), torch.full((1, 300_000), -0.5 - 2**-20)], 1)
    batch = Batch(pi, old, old, torch.ones(1), torch.ones(1, 300_001, dtype=torch.bool))
    single = Batch(*(x.float() for x in (pi, old, old, batch.advantages)), batch.mask)
    bounds = [settled(M2PO, one).trust_region.eps_high for one in (batch, single)]
    assert bounds[0] == pytest.approx(math.expm1(math.sqrt(0.04 * 300_001)), rel=1e-6) and bounds[1] == math.inf
    assert single(settled(M2PO, single)).objective == math.inf  # as e^200 is in float32: an answer, which ends the run


def test_a_mean_above_the_budget_by_rounding_has_no_level() -> None:
    """A budget one unit below the mean, as a sum in another order gives it: tau is the largest |log r|, or none."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        log_ratio = 0.2 * torch.randn(1, 50, dtype=torch.float64, generator=generator)
        mask = torch.ones_like(log_ratio, dtype=torch.bool)
        mean = float(log_ratio.square().flatten().sort().values.sum()) / 50
        tau = clip_level(log_ratio, log_ratio.sign(), mask, math.nextafter(mean, 0))
        assert tau == math.inf or tau == pytest.approx(log_ratio.abs().max().item(), rel=1e-6)


@given(batch=batches(corners=MODERATE), budget=st.sampled_from([1e-4, 0.04, 0.3]))
def test_capping_at_the_level_meets_the_budget(batch: Batch, budget: float) -> None:
    """The mean of min((log r)^2, tau^2) over what moves away is the budget; without a level it is within it."""
    log_ratio, A = batch.pi - batch.old, batch.advantages[:, None]
    tau = clip_level(log_ratio, A, batch.mask, budget)
    away = log_ratio[batch.mask & (A * log_ratio > 0)].square()
    if tau == math.inf:
        assert len(away) == 0 or away.mean() <= budget * (1 + 1e-12)
    else:
        assert away.clamp(max=tau**2).mean().item() == pytest.approx(budget, rel=1e-9)


def test_weights_are_repetitions() -> None:
    """A response of weight 3 counts as three; one of weight 0 not at all, even where its ratio is infinite."""
    batch, weights = make_batch(0, B=6, T=4), torch.tensor([3, 1, 0, 2, 5, 1])
    log_ratio, A = (batch.pi - batch.old).double(), batch.advantages[:, None]
    log_ratio[2] = -A.new_tensor(math.inf)
    repeated = (x.repeat_interleave(weights, 0) for x in (log_ratio, A, batch.mask))
    found = clip_level(log_ratio, A, batch.mask, 1e-3, weights[:, None].double())
    assert found == pytest.approx(clip_level(*repeated, 1e-3), rel=1e-12) and found < 1


@given(batch=batches(corners=MODERATE))
def test_it_is_grpo_with_the_bounds_of_its_batch(batch: Batch) -> None:
    """Bounds are the level's ratios where those are wider than the least ones; else the least; the rest is GRPO's."""
    tau = clip_level(batch.pi - batch.old, batch.advantages[:, None], batch.mask, 0.04)
    wide = {"eps_low": max(0.3, 1 - math.exp(-tau)), "eps_high": max(0.5, math.exp(tau) - 1 if tau < 700 else math.inf)}
    same(batch.gradient(settled(M2PO, batch)), batch.gradient(preset("grpo_dapo", **wide)))


def test_bounds_are_those_of_the_whole_mini_batch() -> None:
    """With them micro-batches add up to the whole; bounds of each part's own would not."""
    batch = make_batch(2, B=40, T=10)
    objective = settled(preset("grpo_dapo", m2_budget=0.04, eps_low=0.0, eps_high=0.0), batch)
    totals = objective.totals(batch.old, batch.mu, batch.mask)
    whole, parts = batch.gradient(objective), [batch.rows(slice(0, 4)), batch.rows(slice(4, 40))]
    same(torch.cat([part.gradient(objective, totals=totals) for part in parts]), whole)
    alone = preset("grpo_dapo", m2_budget=0.04, eps_low=0.0, eps_high=0.0)
    each = torch.cat([part.gradient(settled(alone, part), totals=totals) for part in parts])
    assert ((each - whole).abs() > 1e-3 / 40).any()


def test_what_does_not_fit_is_refused() -> None:
    """A batch without settled bounds, and parts that have no ratio's bounds to widen, are one line each."""
    with pytest.raises(ValueError, match=r"grpo_dapo: m2_budget 0.04: expected bounds computed on a whole mini-batch"):
        one_response((0.6, 0.3, 0.3))(M2PO)
    with pytest.raises(ValueError, match=r"expected the trust region min_clip of the ratio token .* got weight_clip"):
        preset("cispo", m2_budget=0.04)
    with pytest.raises(ValueError, match=r"expected the trust region min_clip of the ratio token .* sequence_geometr"):
        preset("gspo", m2_budget=0.04)
    with pytest.raises(ValueError, match=r"m2_budget: expected neither a router shift nor centering .* got router_s"):
        preset("grpo", m2_budget=0.04, router_shift_floor=0.8)
    with pytest.raises(ValueError, match=r"grpo: expected m2_budget >= 0, got -1"):
        preset("grpo", m2_budget=-1)
