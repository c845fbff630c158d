"""Every trust region is its formula: what it stops, and its slope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.strategies import MODERATE, batches
from tests.theory.laws_objectives import REGION_ROWS
from tests.theory.objective_batches import Batch, Response, approx, make_batch, ratios, tokens_of
from theory.objectives.factors import Factor
from theory.objectives.trust_regions import BinaryTV, Tokens


def seen(batch: Batch) -> tuple[Tokens, Tensor, Tensor]:
    """A region's inputs: the tokens with 0 off the mask, the token ratio, and the advantages."""
    pi, old, mu = (torch.where(batch.mask, x, 0.0) for x in (batch.pi, batch.old, batch.mu))
    return Tokens(pi, old, mu, batch.mask), (pi - old).exp(), batch.advantages[:, None]


def region_rows(batch: Batch) -> Iterator[tuple[int, Response]]:
    for b in range(len(batch.pi)):
        pi, old, mu = tokens_of(batch, b)
        if pi:
            w, whole = ratios(old, mu), ratios(pi, mu)
            yield b, Response(pi, old, mu, batch.advantages[b].item(), w, whole)


def region_slope(region, batch: Batch) -> Tensor:
    tokens, _, A = seen(batch)
    pi = tokens.logp_pi_BT.clone().requires_grad_()
    log_ratio, log_gap = pi - tokens.logp_old_BT, tokens.logp_old_BT - tokens.logp_mu_BT
    weight = Factor.exp(log_gap + log_ratio if region.weight_ratio == "pi/mu" else log_gap)
    term = region.term(replace(tokens, logp_pi_BT=pi), log_ratio, weight, A)
    (slope,) = torch.autograd.grad(torch.where(batch.mask, term, 0.0).sum(), pi)
    return slope


@pytest.mark.parametrize("name", REGION_ROWS)
@given(batch=batches(corners=MODERATE))
def test_regions_bind_and_weigh_as_their_formulas(name: str, batch: Batch) -> None:
    """The bound that binds on each token, and d term / d log pi, are the formulas on its response."""
    require_formula(name, batch)


@pytest.mark.parametrize("name", REGION_ROWS)
def test_regions_on_many_tokens(name: str) -> None:
    """The same on 400 random tokens whose divergences fill the range about the bounds: small errors show there.

    The first response of each batch has no advantage: no bound binds on it.
    """
    for seed in range(20):
        batch = make_batch(seed, gap=0.1, staleness=0.2)
        batch.advantages[0] = 0.0
        require_formula(name, batch)


def require_formula(name: str, batch: Batch) -> None:
    row = REGION_ROWS[name]
    tokens, ratio, A = seen(batch)
    clipped, slope = row.tight.clipped(tokens, ratio, A), region_slope(row.tight, batch)
    assert (clipped is None) == (not row.bounded)
    for b, response in region_rows(batch):
        at = batch.mask[b]
        if clipped is not None:
            high, low = (flag[b, at].tolist() for flag in clipped)
            assert list(zip(high, low, strict=True)) == row.stops(response)
        assert slope[b, at].tolist() == approx(row.slope(response))


@pytest.mark.parametrize("name", [n for n in REGION_ROWS if not REGION_ROWS[n].whole])
@given(batch=batches(corners=MODERATE))
def test_regions_without_bounds_are_the_score(name: str, batch: Batch) -> None:
    """With infinite bounds nothing binds, and d term / d log pi is pi/mu A: all regions are one first-order rule."""
    row = REGION_ROWS[name]
    clipped = row.free.clipped(*seen(batch))
    assert clipped is None or not (clipped[0] | clipped[1])[batch.mask].any()
    expected = torch.where(batch.mask, (batch.pi - batch.mu).exp() * batch.advantages[:, None], 0.0)
    torch.testing.assert_close(region_slope(row.free, batch), expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", [n for n, row in REGION_ROWS.items() if row.signed and row.bounded])
@given(batch=batches(corners=MODERATE))
def test_what_brings_pi_back_is_never_stopped(name: str, batch: Batch) -> None:
    """No token is stopped whose A moves pi towards what the region compares it with, and a zero A stops nothing."""
    row = REGION_ROWS[name]
    high, low = row.tight.clipped(*seen(batch))
    away = batch.pi - (batch.mu if row.divergence else batch.old)
    back = batch.advantages.sign()[:, None] * away.sign() <= 0
    assert not ((high | low) & back)[batch.mask].any()


@pytest.mark.parametrize("name", [n for n in REGION_ROWS if REGION_ROWS[n].bounded])
def test_the_table_binds(name: str) -> None:
    """On moderate batches each bound of the table binds for some tokens and not for all: or it would show little.

    A bound that a region lacks binds nowhere.
    """
    made = [make_batch(seed) for seed in range(8)]
    row = REGION_ROWS[name]
    sides = zip(*(row.tight.clipped(*seen(batch)) for batch in made), strict=True)
    for flags, can_bind in zip(sides, row.binds, strict=True):
        bound = torch.cat([flag[batch.mask] for flag, batch in zip(flags, made, strict=True)])
        assert bool(bound.any()) == can_bind and not bound.all()


def test_a_width_is_not_rounded_to_the_default_type() -> None:
    """float32's 0.1 is 0.1 + 1.5e-9: in float64 a total variation between the two is too far, also beside float32."""
    torch.set_default_dtype(torch.float32)
    pi, mu = (torch.tensor([[p]], dtype=torch.float64).log() for p in (0.6 + 5e-10, 0.5))
    tokens, one = Tokens(pi, mu, mu, torch.ones(1, 1, dtype=torch.bool)), torch.ones(1, 1, dtype=torch.float64)
    high, _ = BinaryTV(0.1, 0.1).clipped(tokens, one, one)
    assert high.all()
