"""vLLM in bf16, fp16, fp8 and int8: each precision has its own distance from the trainer, before and after a push."""

from __future__ import annotations

import math

import pytest
import torch

from lab.strict import validate
from sandbox.model.checkpoint import load_hf, to_hf
from scaled.config import PrecisionBlock, RolloutBlock
from scaled.vllm_engine.quantize import block_fp8, channel_int8, dequantised, is_quantised, quantised
from tests.scaled import vllm_world as world
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


@pytest.mark.parametrize("name", LEVELS)
def test_the_distance_stays_at_its_level_over_pushes(name, tmp_path):
    """mean |logp_mu - logp_old| after each of three pushes is at the precision's level, and never 0."""
    precision, level = LEVELS[name]
    engine = world.engine(world.model(), tmp_path, precision)
    means = []
    for version, seed in enumerate((0, 1, 0)):
        engine.load_weights(quantised(to_hf(world.model(seed)), precision), version)
        rollouts = engine.generate(world.prompts(), SAMPLING)
        means.append(float(world.abs_diff(world.model(seed), rollouts).mean()))
    engine.close()
    assert engine.kernels == ("rounded" if name.endswith("rounded") else "native")
    assert all(0 < mean < level for mean in means), means
    # The same weights pushed again are the same engine.
    assert math.isclose(means[0], means[2], rel_tol=1e-6)


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
