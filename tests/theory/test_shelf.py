"""Laws of the presets of 2025 and 2026 against their parents, and values written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.strategies import MODERATE, batches
from tests.theory.objective_batches import Batch, make_batch
from tests.theory.test_objectives import one_response, same
from theory.objectives import correction, preset

WIDE = {"eps_low": 1.0, "eps_high": math.inf}
OPEN = {"eps_low": math.inf, "eps_high": math.inf}


@given(batch=batches(corners=MODERATE))
def test_luspo_is_gspo_times_the_length(batch: Batch) -> None:
    """Each response's gradient is that of GSPO times its length."""
    length = batch.mask.sum(1, keepdim=True)
    same(batch.gradient(preset("luspo")), length * batch.gradient(preset("gspo")))


@given(batch=batches(corners=MODERATE))
def test_sapo_on_policy_is_grpo(batch: Batch) -> None:
    """At pi = old the gate has the slope 1, whatever its temperature."""
    batch = replace(batch, pi=batch.old)
    same(batch.gradient(preset("sapo", tau_pos=0.3, tau_neg=7.0)), batch.gradient(preset("grpo")))


def test_sapo_on_one_token() -> None:
    """r = 2, A = 2: 4 sigmoid(1) 2 in value; its slope falls to 4 sigmoid(1) sigmoid(-1) of r A. A < 0 has tau 1.05."""
    good, sigmoid = one_response((0.6, 0.3, 0.4)), 1 / (1 + math.exp(-1.0))
    assert good(preset("sapo")).objective.item() == pytest.approx(8 * sigmoid)
    assert good.gradient(preset("sapo")).item() == pytest.approx(4 * sigmoid * (1 - sigmoid) * 2 * 2)
    bad = replace(good, advantages=-good.advantages)
    assert bad(preset("sapo")).objective.item() == pytest.approx(-8 / 1.05 / (1 + math.exp(-1.05)))


@given(batch=batches(corners=MODERATE))
def test_gmpo_without_bounds_is_gspo_without_bounds(batch: Batch) -> None:
    """The mean of unclipped log-ratios is GSPO's ratio."""
    same(batch.gradient(preset("gmpo", **OPEN)), batch.gradient(preset("gspo", **WIDE)))


def test_gmpo_with_a_width_beyond_float64_is_without_a_bound() -> None:
    """exp(1000) is infinite: no ratio reaches it."""
    batch = one_response((0.6, 0.3, 0.3), (0.5, 0.4, 0.4))
    same(batch.gradient(preset("gmpo", eps_high=1000.0)), batch.gradient(preset("gmpo", eps_high=700.0)))


def test_gmpo_clips_one_token_and_keeps_the_others() -> None:
    """Ratios 2 and 1.25, A = 2: l = 0.4 and log 1.25; the second token alone moves the mean."""
    batch = one_response((0.6, 0.3, 0.3), (0.5, 0.4, 0.4))
    s = math.exp((0.4 + math.log(1.25)) / 2)
    assert batch(preset("gmpo")).objective.item() == pytest.approx(2 * s)
    same(batch.gradient(preset("gmpo")), torch.tensor([[0.0, 2 * s / 2]]))
    # For A < 0 a large ratio is not held, a small one is.
    same(replace(batch, advantages=-batch.advantages).gradient(preset("gmpo")), -torch.ones(1, 2) * math.sqrt(2.5))


def test_a_product_over_a_long_response_has_a_finite_mean() -> None:
    """CTPO's product of 1,000 ratios of e^0.2 overflows float32; every token is clipped, the metric is e^75."""
    long = torch.full((1, 1000), 0.2, dtype=torch.float32)
    out = preset("ctpo")(long, 0 * long, 0 * long, torch.ones(1, dtype=torch.float32), long > 0)
    assert out.metrics["actor/ratio_mean"].item() > 1e30 and math.isfinite(out.metrics["actor/ratio_mean"])
    assert math.isfinite(out.objective)


def test_vespo_on_two_tokens() -> None:
    """W = 1.5 x 0.5 = 0.75: phi = W^2 exp(3 (1 - W)) where A > 0, W^3 exp(2 (1 - W)) where A < 0; old plays no part."""
    batch = one_response((0.6, 0.1, 0.4), (0.2, 0.9, 0.4))
    up, down = 0.75**2 * math.exp(0.75), 0.75**3 * math.exp(0.5)
    same(batch.gradient(preset("vespo")), torch.ones(1, 2) * 2 * up / 2)
    same(replace(batch, advantages=-batch.advantages).gradient(preset("vespo")), -torch.ones(1, 2) * 2 * down / 2)


@given(batch=batches(corners=MODERATE))
def test_vespo_at_mu_is_the_score_and_fades_on_both_sides(batch: Batch) -> None:
    """phi(1) = 1; a response that pi has left, or rushed to, by e^30 adds almost nothing."""
    at = replace(batch, pi=batch.mu)
    same(at.gradient(preset("vespo")), at.gradient(preset("reinforce", aggregation="token_mean")))
    for step in (-30.0, 30.0):
        far = replace(batch, pi=batch.mu + step)
        limit = 1e-20 * batch.advantages.abs().max()
        assert (far.gradient(preset("vespo")).abs() <= limit).all()


@given(batch=batches(corners=MODERATE))
def test_ctpo_without_bounds_is_the_prefix_weight(batch: Batch) -> None:
    """With mu = old the product of ratios is the prefix weight on pi/mu, as a score."""
    batch = replace(batch, mu=batch.old)
    prefix = correction("prefix_tis", numerator="pi", cap=math.inf)
    score = preset("reinforce", correction=prefix, aggregation="token_mean")
    same(batch.gradient(preset("ctpo", **OPEN, eps_c=math.inf)), batch.gradient(score))


def test_ctpo_widens_with_the_root_of_the_position() -> None:
    """At A > 0 four ratios of e^0.024: log c = 0.024 t against 0.05 sqrt t; the bound would bind from t = 5 on."""
    pi = torch.full((1, 9), -1.0)
    batch = Batch(pi, pi - 0.024, pi - 0.024, torch.ones(1), torch.ones(1, 9, dtype=torch.bool))
    moves = [0.024 * t <= 0.05 * math.sqrt(t) for t in range(1, 10)]
    assert moves == [True] * 4 + [False] * 5
    t = torch.arange(1, 10)
    expected = torch.where(torch.tensor(moves), (0.024 * t).exp(), 0.0)[None] / 9
    same(batch.gradient(preset("ctpo")), expected)
    # Observations between the tokens take no position.
    holed = torch.nn.functional.pad(pi, (3, 0))
    mask = torch.arange(12) >= 3
    wide = Batch(holed, holed - 0.024, holed - 0.024, torch.ones(1), mask[None])
    same(wide.gradient(preset("ctpo"))[:, 3:], expected)


def test_a_masked_response_adds_nothing_and_stays_in_the_denominator() -> None:
    """Mean log(mu/pi) of 0.6 and 0.4 at delta 0.5: the first is masked where A < 0, and counts as a response."""
    mu = torch.full((2, 2), -1.0)
    pi = mu - torch.tensor([[1.1, 0.1], [0.7, 0.1]])
    batch = Batch(pi, pi, mu, torch.tensor([-1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool))
    same(batch.gradient(preset("deepseek_v32")), torch.tensor([[0.0, 0.0], [-0.25, -0.25]]))
    assert batch(preset("deepseek_v32")).objective.item() == pytest.approx(-0.5)
    good = replace(batch, advantages=-batch.advantages)
    same(good.gradient(preset("deepseek_v32")), torch.full((2, 2), 0.25))


def test_without_a_mask_it_is_grpo_without_its_deviation() -> None:
    """delta = inf leaves GRPO's term."""
    for seed in range(4):
        batch: Batch = make_batch(seed)
        expected: Tensor = batch.gradient(preset("grpo", advantage="group_mean"))
        assert torch.equal(batch.gradient(preset("deepseek_v32", delta=math.inf)), expected)


@pytest.mark.parametrize("name", ["sapo", "vespo", "gmpo", "ctpo", "deepseek_v32"])
def test_numbers_keep_their_digits_whatever_the_default_type(name: str) -> None:
    """float64 in gives float64 out to its last digits, where torch's default type is float32: no 1.05 is rounded."""
    batch, objective = make_batch(1, staleness=0.5), preset(name)
    wanted, default = batch.gradient(objective), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        assert torch.equal(batch.gradient(objective), wanted)
    finally:
        torch.set_default_dtype(default)
