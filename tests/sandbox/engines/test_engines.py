"""The defects do what their dials say, to the tensors and places they name and to no others."""

from __future__ import annotations

import pytest
import torch

from sandbox.engines import (
    ActivationPrecision,
    EngineConfig,
    KVPrecision,
    LogitNoise,
    ReductionOrder,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from tests.contracts import worlds
from tests.sandbox.engines.defect_world import discrepancy
from theory.contracts import Sampling
from theory.streams import stream

LADDERS: dict[str, list[Defect]] = {
    "router noise": [RouterNoise(std=std) for std in (0.01, 0.1, 1.0)],
    "logit noise": [LogitNoise(std=std) for std in (0.01, 0.1, 1.0)],
    "weights": [WeightPrecision(format=f) for f in ("fp16", "bf16", "fp8_e4m3")],
    "weights, block": [WeightPrecision(scale="block", format=f) for f in ("int8", "fp8_e4m3")],
    "activations": [ActivationPrecision(format=f) for f in ("fp16", "bf16", "fp8_e4m3")],
    "cache": [KVPrecision(format="bf16"), KVPrecision(scale="token"), KVPrecision(scale="unit")],
    "reduction": [ReductionOrder(partials="fp32"), ReductionOrder(partials="bf16")],
    "processed temperature": [SamplingMismatch(temperature=t, score="processed") for t in (0.9, 0.7, 0.4)],
    "processed top-p": [SamplingMismatch(top_p=p, score="processed") for p in (0.99, 0.9, 0.5)],
    "processed top-k": [SamplingMismatch(top_k=k, score="processed") for k in (12, 6, 2)],
    "processed min-p": [SamplingMismatch(min_p=p, score="processed") for p in (0.02, 0.1, 0.5)],
}


@pytest.mark.parametrize("name", LADDERS)
def test_dials_turn_the_discrepancy(name):
    """More noise, fewer bits and more truncation stand further from the training engine."""
    values = [discrepancy(defect) for defect in LADDERS[name]]
    assert values == sorted(values)
    assert 0 < values[0] < values[-1]


def test_router_noise_has_the_dialled_size():
    """The noise on 10^5 logits has mean 0 and standard deviation `std`, within 4 standard errors."""
    n, std = 100_000, 0.25
    noise = RouterNoise(std=std).numerics(stream(0, "noise")).router_logits(0, torch.zeros(n // 10, 10))
    assert abs(noise.mean().item()) <= 4 * std / n**0.5
    assert abs(noise.std().item() - std) <= 4 * std / (2 * n) ** 0.5


def test_logit_noise_costs_what_its_docstring_says():
    """The mean of KL(mu || old) under noise of size std is std^2 (1 - sum p^2) / 2, to order std^3 and within 4 s.e."""
    logits_V = torch.randn(13, generator=stream(0, "logits"), dtype=torch.float64)
    std, n = 0.05, 20_000
    noisy_nV = LogitNoise(std=std).numerics(stream(0, "noise")).logits(logits_V.expand(n, -1))
    kl_n = (noisy_nV.softmax(-1) * (noisy_nV.log_softmax(-1) - logits_V.log_softmax(-1))).sum(-1)
    expected = std**2 * (1 - (logits_V.softmax(-1) ** 2).sum()) / 2
    assert abs(kl_n.mean() - expected) <= 4 * kl_n.std() / n**0.5 + std**3


def test_logit_noise_leaves_routes_alone():
    """Experts of the tokens that both engines were given, the prompts, are the exact engine's."""
    weights, sampling = worlds.model(), Sampling(max_tokens=1, num_responses=1)
    noisy, exact = (worlds.SandboxEngine(weights.config, d) for d in ((LogitNoise(std=1.0),), ()))
    for engine in (noisy, exact):
        engine.load_model(weights, version=0)
    a, b = (engine.generate(worlds.prompts(), sampling) for engine in (noisy, exact))
    assert torch.equal(a.experts.experts, b.experts.experts)


def test_a_defects_draws_are_its_own():
    """Adding a defect leaves the noise of the others what it was: each draws from a stream of its own."""
    weights, logits = worlds.model(), torch.zeros(5, 8)
    engines = [(RouterNoise(),), (LogitNoise(), RouterNoise()), (RouterNoise(), RouterNoise())]
    alone, beside, twice = (worlds.SandboxEngine(weights.config, d).numerics(3) for d in engines)
    beside.logits(torch.zeros(4, 13))
    first = alone.router_logits(0, logits)
    assert torch.equal(beside.router_logits(0, logits), first)
    second = twice.router_logits(0, logits)
    assert not torch.equal(second, first) and not torch.equal(second, 2 * first)


def test_engine_config_names_the_defect_it_does_not_know():
    """An unknown kind is refused."""
    with pytest.raises(ValueError, match="router_jitter"):
        EngineConfig.model_validate({"defects": [{"kind": "router_jitter"}]})


def test_engine_config_takes_one_history_and_one_sampler():
    """Two stale_weights or two samplers have no meaning together."""
    for defect in (StaleWeights(), SamplingMismatch()):
        with pytest.raises(ValueError, match=f"expected at most 1 {defect.kind}, got 2"):
            EngineConfig(defects=(defect, defect))


def test_an_int8_cache_needs_a_scale():
    """Integers without a scale would keep no fraction of a key."""
    with pytest.raises(ValueError, match="expected token or tensor with int8"):
        KVPrecision(format="int8")
