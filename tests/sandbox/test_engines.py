"""The defects do what their dials say, to the tensors and places they name and to no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.engines import ActivationPrecision, EngineConfig, RouterNoise, WeightPrecision
from sandbox.engines.formats import FP8_MAX, round_bf16, round_fp8_e4m3, round_to
from tests.contracts import worlds
from theory.contracts import Sampling
from theory.divergences import discrepancy_metrics
from theory.routing.passes import PassRouting
from theory.streams import stream

FLOATS = st.floats(-1e4, 1e4, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_fp8_error_is_bounded_by_its_format(values):
    """|round(x) - x| <= 2^-4 |x| + half the smallest subnormal step, scaled: e4m3 has 3 mantissa bits."""
    x = torch.tensor(values)
    amax = x.abs().amax()
    scale = (amax / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    error = (round_fp8_e4m3(x, amax) - x).abs()
    # Half of 2^-9, the step of e4m3's subnormals; 1e-6 |x| for the float32 products with the scale.
    assert (error <= x.abs() * (2**-4 + 1e-6) + scale * 2**-10).all()


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_rounding_is_idempotent_and_odd(values):
    """Rounding twice is rounding once, and round(-x) = -round(x), in both formats."""
    x = torch.tensor(values)
    assert torch.equal(round_bf16(round_bf16(x)), round_bf16(x))
    assert torch.equal(round_bf16(-x), -round_bf16(x))
    amax = x.abs().amax()
    assert torch.equal(round_fp8_e4m3(-x, amax), -round_fp8_e4m3(x, amax))


def test_a_row_scale_never_loses_to_a_tensor_scale():
    """One FP8 scale a row keeps small rows that one scale a tensor flushes to zero."""
    x = torch.tensor([[1000.0, 500.0], [1e-3, 2e-3]])
    assert torch.equal(round_to(x, "fp8_e4m3", per_row=False)[1], torch.zeros(2))
    assert torch.allclose(round_to(x, "fp8_e4m3", per_row=True)[1], x[1], rtol=2**-4)


def test_fp8_weights_leave_router_head_norms_and_embedding():
    """FP8 rounds the matrices of attention and experts alone; bf16 rounds every weight."""
    weights = worlds.training_engine(worlds.model()).named_tensors()
    for name, tensor in weights:
        is_large = "_proj" in name
        assert torch.equal(WeightPrecision().weight(name, tensor), tensor) == (not is_large), name
        is_ones = bool((tensor == 1).all())
        assert torch.equal(WeightPrecision(format="bf16").weight(name, tensor), tensor) == is_ones, name


def test_router_noise_has_the_dialled_size():
    """The noise on 10^5 logits has mean 0 and standard deviation `std`, within 4 standard errors."""
    n, std = 100_000, 0.25
    noise = RouterNoise(std=std).numerics(stream(0, "noise")).router_logits(0, torch.zeros(n // 10, 10))
    assert abs(noise.mean().item()) <= 4 * std / n**0.5
    assert abs(noise.std().item() - std) <= 4 * std / (2 * n) ** 0.5


def discrepancy(*defects) -> float:
    """k3 KL(mu || old) of an engine with these defects, on 24 responses of the contract model."""
    weights = worlds.model()
    engine = worlds.SandboxEngine(weights.config, defects, stop_token=worlds.STOP)
    engine.load_model(weights, version=0)
    rollouts = engine.generate(worlds.prompts(6), Sampling(max_tokens=24, num_responses=4, seed=9))
    scores = worlds.training_engine(weights).score(rollouts, PassRouting("natural"))
    batch = rollouts.padded()
    return discrepancy_metrics(scores.logp_BT, batch.logp_mu_BT, batch.is_response_BT)["rollout_corr/k3_kl"]


def test_dials_turn_the_discrepancy():
    """More noise and fewer bits stand further from the training engine; zero noise is the exact engine."""
    assert discrepancy(RouterNoise(std=0.0)) == 0 == discrepancy()
    noise = [discrepancy(RouterNoise(std=std)) for std in (0.01, 0.1, 1.0)]
    assert noise == sorted(noise)
    assert noise[0] > 0
    weights = [discrepancy(WeightPrecision(format=f)) for f in ("bf16", "fp8_e4m3")]
    assert 0 < weights[0] < weights[1]
    activations = [discrepancy(ActivationPrecision(format=f)) for f in ("bf16", "fp8_e4m3")]
    assert 0 < activations[0] < activations[1]


def test_a_tensor_scale_breaks_batch_invariance_and_a_token_scale_keeps_it():
    """With one activation scale a tensor a response depends on its batch; with one a token it does not."""
    weights = worlds.model()
    for scale, invariant in (("token", True), ("tensor", False)):
        engine = worlds.SandboxEngine(weights.config, (ActivationPrecision(scale=scale),), stop_token=worlds.STOP)
        engine.load_model(weights, version=0)
        sampling = Sampling(max_tokens=8, num_responses=2, seed=0)
        alone = engine.generate(worlds.prompts(1), sampling).responses[0]
        together = engine.generate(worlds.prompts(6), sampling).responses[0]
        assert torch.equal(alone.logp_mu[:1], together.logp_mu[:1]) == invariant


def test_engine_config_names_the_defect_it_does_not_know():
    """An unknown kind is refused."""
    with pytest.raises(ValueError, match="router_jitter"):
        EngineConfig.model_validate({"defects": [{"kind": "router_jitter"}]})
