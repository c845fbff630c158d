"""Laws of the router-shift ratio: what a shift of the routers makes of a token's ratio, and who may have it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.strategies import MODERATE, batches
from tests.theory.objective_batches import Batch, make_batch
from tests.theory.test_objectives import one_response, same
from theory.objectives import preset
from theory.routing.features import RouterFeatures
from theory.routing.shift import router_shift
from theory.streams import stream

SCALED = (
    "ppo", "grpo", "grpo_dapo", "dr_grpo", "cispo", "gspo", "gmpo", "luspo", "sapo", "ppo_dual_clip", "grpo_dual_clip",
)  # fmt: skip


def shift_of(batch: Batch) -> torch.Tensor:
    """Shifts about the floor of 0.8, which is log 1.25 = 0.22 nats."""
    return 0.4 * torch.rand(batch.pi.shape, generator=stream(0, "router-shift"), dtype=torch.float64)


@pytest.mark.parametrize("name", SCALED)
@given(batch=batches(corners=MODERATE))
def test_gamma_multiplies_every_ratio_before_clips_and_means(name: str, batch: Batch) -> None:
    """Value and gradient are those without it where each old is divided by gamma = max(exp(-Delta), 0.8)."""
    shift = shift_of(batch)
    gamma = torch.tensor([[max(math.exp(-x), 0.8) for x in row] for row in shift.tolist()], dtype=torch.float64)
    parent = replace(batch, old=batch.old - gamma.log())
    objective, plain = preset(name, router_shift_floor=0.8), preset(name)
    same(batch(objective, router_shift_BT=shift).objective, parent(plain).objective)
    same(batch.gradient(objective, router_shift_BT=shift), parent.gradient(plain))


def test_rspo_on_two_tokens() -> None:
    """GMPO's geometric mean of 2 x 0.9 and 1.25 x 0.8, A = 2: the first is held at exp 0.4, the second at its floor."""
    batch = one_response((0.6, 0.3, 0.3), (0.5, 0.4, 0.4))
    shift = torch.tensor([[-math.log(0.9), 1.7]])
    s = math.exp((0.4 + math.log(1.25 * 0.8)) / 2)
    out = batch(preset("gmpo", router_shift_floor=0.8), router_shift_BT=shift)
    assert out.objective.item() == pytest.approx(2 * s)
    assert out.metrics["actor/router_shift_ratio"].item() == pytest.approx(0.85)
    assert out.metrics["actor/router_shift_clipfrac"].item() == pytest.approx(0.5)
    assert out.metrics["actor/pg_clipfrac_high"].item() == pytest.approx(0.5)  # 1.8 is above exp 0.4, 1.0 is not


def test_gamma_is_a_constant() -> None:
    """No gradient reaches the routers through it."""
    batch = make_batch(3)
    pi, shift = batch.pi.clone().requires_grad_(), shift_of(batch).requires_grad_()
    replace(batch, pi=pi)(preset("grpo", router_shift_floor=0.8), router_shift_BT=shift).objective.backward()
    assert pi.grad is not None and shift.grad is None


def test_without_a_shift_nothing_is_scaled() -> None:
    """A shift of 0 and a floor of 1 are the objective as it was, to the bit, whatever stands off the mask."""
    batch = make_batch(5)
    zero = torch.where(batch.mask, 0.0, torch.nan)
    for name in SCALED:
        expected = batch.gradient(preset(name))
        assert torch.equal(batch.gradient(preset(name, router_shift_floor=0.8), router_shift_BT=zero), expected)
        assert torch.equal(batch.gradient(preset(name, router_shift_floor=1.0)), expected)
    assert "actor/router_shift_ratio" not in batch(preset("grpo")).metrics


def test_a_shift_that_is_missing_is_named() -> None:
    """An objective that scales by it takes no batch without it."""
    batch, objective = make_batch(0), preset("grpo", router_shift_floor=0.8)
    with pytest.raises(ValueError, match=r"grpo: router_shift_floor 0.8: expected the shift .* got none"):
        batch(objective)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vespo", {}, "expected a trust region of none, .*, got the trust region gamma_kernel"),
        ("minirl", {}, "expected a correction with numerator 'old' .*, got token_tis with 'pi'"),
        ("ctpo", {}, "expected a ratio of token, .*, got the ratio prefix_product_token"),
        ("reinforce", {}, "expected a ratio of token, .*, got the ratio none"),
        ("ppo", {"centering": "full"}, "expected 1 beside centering full, got 0.8"),
        ("ppo", {"router_shift_floor": 0.0}, "expected 0 < router_shift_floor <= 1, got 0.0"),
    ],
)
def test_what_has_no_ratio_to_scale_is_refused(name: str, changes: dict, message: str) -> None:
    """Parts whose term is no function of the token's pi/old are refused by name."""
    with pytest.raises(ValueError, match=message):
        preset(name, **{"router_shift_floor": 0.8, **changes})


def test_shift_is_the_mean_distance_on_the_row_that_predicts_the_token() -> None:
    """Two responses of 3 and 2 rows, two layers, two experts: |log p_pi - log p_old| averaged, at row P + t - 1."""
    old = torch.zeros(5, 2, 2)
    pi = torch.tensor([[9.0] * 4, [1, -1, 2, -2], [0.4, 0, 0, 0], [9.0] * 4, [-3, 0, 0, 1]]).view(5, 2, 2)
    rows = torch.tensor([[1, 2], [1, 1]])  # prompts of two tokens; the second response has one token alone
    exists = torch.tensor([[True, True], [True, False]])
    found = router_shift(scores_of(old), scores_of(pi), rows, exists)
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.1], [1.0, 0.0]]))
    with pytest.raises(ValueError, match=r"expected at least 1 layer with a router, got 0"):
        router_shift(scores_of(old[:, :0]), scores_of(pi[:, :0]), rows, exists)


def scores_of(logp_RLK: torch.Tensor) -> RouterFeatures:
    """Log-scores on every row of two responses of 3 and 2 rows."""
    layers = tuple(range(logp_RLK.shape[1]))
    return RouterFeatures(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 3, 5]), None, logp_RLK, layers)
