"""vLLM in bf16, fp16, fp8 and int8: each precision has its own distance from the trainer, before and after a push, and
the memory that a plan counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lab.strict import validate
from sandbox.model.checkpoint import load_hf, save, to_hf
from scaled.config import PrecisionBlock, RolloutBlock
from scaled.model_shape import load_shape
from scaled.plan.engine_memory import rollout_memory
from scaled.vllm_engine.arguments import CPU_BLOCK
from scaled.vllm_engine.engine import VllmEngine
from scaled.vllm_engine.quantize import block_fp8, channel_int8, dequantised, is_quantised, quantised
from tests.scaled import vllm_world as world
from tests.scaled.plan_world import loaded
from theory.contracts import Sampling

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]

SAMPLING = Sampling(max_tokens=24, num_responses=8, seed=5)
HAS_AMX = torch.cpu._is_amx_tile_supported()
HAS_FP8_CACHE = HAS_AMX or torch.cpu._is_avx512_supported()

# Largest mean |logp_mu - logp_old| in nats: three times the larger of two models' over 1,000 tokens (0.0047, 0.0093,
# 0.018, 0.050). Experts scrambled by a reload gave 0.57 to 0.58 in each of the four.
LEVELS = {
    "fp16": (PrecisionBlock(compute="fp16"), 0.015),
    "bf16": (PrecisionBlock(compute="bf16"), 0.03),
    "int8 rounded": (PrecisionBlock(weights="int8", kernels="rounded"), 0.055),
    "fp8_block rounded": (PrecisionBlock(weights="fp8_block", kernels="rounded"), 0.15),
    **({"int8": (PrecisionBlock(weights="int8", kernels="native"), 0.1)} if HAS_AMX else {}),
    **({"fp8_block": (PrecisionBlock(weights="fp8_block", kernels="native"), 0.2)} if HAS_AMX else {}),
    **({"fp8 cache": (PrecisionBlock(kv_cache="fp8"), 0.3)} if HAS_FP8_CACHE else {}),
}


@dataclass(frozen=True)
class Measured:
    """An engine of one precision: its distances over three pushes, and bytes of its model and of a cached token."""

    name: str
    kernels: str
    means: list[float]
    sizes: dict[str, int]
    kv_bytes: float


@pytest.fixture(scope="module", params=LEVELS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One engine of each precision, which has ended."""
    precision, _ = LEVELS[request.param]
    with world.loading() as sizes:
        engine = world.engine(world.model(), tmp_path_factory.mktemp("vllm"), precision)
    means = []
    for version, seed in enumerate((0, 1, 0)):
        engine.load_weights(quantised(to_hf(world.model(seed)), precision), version)
        rollouts = engine.generate(world.prompts(), SAMPLING)
        means.append(float(world.abs_diff(world.model(seed), rollouts).mean()))
    kv_bytes = cached_bytes(engine)
    engine.close()
    return Measured(request.param, engine.kernels, means, sizes, kv_bytes)


def cached_bytes(engine: VllmEngine) -> float:
    """Bytes of one token in the cache that vLLM has made; its layers may share a storage."""
    runner = engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    return sum(storages.values()) / (runner.kv_cache_config.num_blocks * CPU_BLOCK)


def planned(precision: PrecisionBlock, folder: Path) -> dict[str, int]:
    """The parts of the plan for a GPU of such an engine."""
    save(world.model(), folder)
    rollout = RolloutBlock(**world.SMALL | {"precision": precision})
    config = loaded("minirl/n8_r3").model_copy(update={"rollout": rollout})
    return rollout_memory(config, load_shape(folder)).parts


def test_the_distance_stays_at_its_level_over_pushes(measured):
    """mean |logp_mu - logp_old| after each of three pushes is at the precision's level, and never 0."""
    _, level = LEVELS[measured.name]
    assert measured.kernels == ("rounded" if measured.name.endswith("rounded") else "native")
    assert all(0 < mean < level for mean in measured.means), measured.means
    # The same weights pushed again are the same engine.
    assert math.isclose(measured.means[0], measured.means[2], rel_tol=1e-6)


def test_a_models_and_a_tokens_bytes_are_as_planned(measured, tmp_path):
    """vLLM's parameters and buffers are the plan's weights and rotary table to 1%, and a token in its cache has exactly
    the plan's bytes. Rounded weights take what those of the compute type do."""
    precision, _ = LEVELS[measured.name]
    if measured.kernels == "rounded":
        precision = PrecisionBlock(compute=precision.compute)
    plan = planned(precision, tmp_path)
    assert sum(measured.sizes.values()) == pytest.approx(plan["weights"] + plan["rotary table"], rel=0.01)
    num, full = world.SMALL["max_num_seqs"], world.SMALL["max_model_len"]
    assert measured.kv_bytes == plan[f"KV of {num} x {full} tokens"] / (num * full)


@pytest.mark.parametrize("weights", ["fp8_block", "int8"])
def test_quantised_models_are_as_large_as_planned(weights, tmp_path, monkeypatch):
    """The same of the parameters that vLLM makes for its quantised kernels; where a CPU lacks them, it stops there."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    precision = PrecisionBlock(weights=weights, kernels="native")
    with world.loading(is_stopped=True) as sizes, pytest.raises(RuntimeError, match="stopped"):
        world.engine(world.model(), tmp_path / "engine", precision)
    plan = planned(precision, tmp_path)
    assert sum(sizes.values()) == pytest.approx(plan["weights"] + plan["rotary table"], rel=0.01)
    assert plan["weights"] < 0.6 * planned(PrecisionBlock(), tmp_path)["weights"]


@pytest.mark.parametrize("weights", ["fp8_block", "int8"])
def test_rounded_weights_are_the_dequantised_ones(weights, tmp_path):
    """In fp32 an engine with rounded weights is the trainer over q s, in log-probs to 1e-5 and in routes exactly."""
    quantise = block_fp8 if weights == "fp8_block" else channel_int8
    held = world.model()
    load_hf(held, ((n, dequantised(*quantise(t)) if is_quantised(n) else t) for n, t in to_hf(world.model())))
    precision = PrecisionBlock(compute="fp32", weights=weights, kernels="rounded")
    engine = world.engine(world.model(), tmp_path, precision)
    rollouts = engine.generate(world.prompts(), SAMPLING)
    engine.close()
    assert (world.abs_diff(held, rollouts) <= 1e-5).all()
    assert torch.equal(world.trainer_scores(held, rollouts).natural.experts, rollouts.experts.experts)


@pytest.mark.parametrize(("field", "value", "whole"), [("top_p", 0.9, "1"), ("top_k", 3, "0")])
def test_truncated_sampling_is_refused(field, value, whole):
    """No record has the mask that top-p or top-k leaves, so the config says no in one line, and takes what is whole."""
    with pytest.raises(ValueError, match=rf"{field}: expected {whole} \(the trainer scores the whole.*, got {value}$"):
        validate(RolloutBlock, {field: value}, "here")
    validate(RolloutBlock, {"top_p": 1.0, "top_k": 0}, "here")
