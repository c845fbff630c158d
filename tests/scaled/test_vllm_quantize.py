"""Quantisation keeps its error bounds, and the table of weights is that of the checkpoints themselves."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.hf import ModelShape, config_fields, parse_shape
from lab.overflow import Fp16Overflow
from sandbox.model import MoE
from sandbox.model.checkpoint import to_hf
from scaled.config import PrecisionBlock, RolloutBlock
from scaled.model_shape import load_shape
from scaled.vllm_engine import environment, quantize
from scaled.vllm_engine.quantize import block_fp8, channel_int8, dequantised, is_quantised
from tests.scaled import vllm_world as world
from theory.routing.gates import GATES
from theory.streams import stream


def matrix(seed: int, spread: float, num_out: int = 256, num_in: int = 384) -> torch.Tensor:
    """Normal weights times 2^(spread x normal): magnitudes over many binades."""
    draws = stream(seed, "quantise")
    return torch.randn(num_out, num_in, generator=draws) * 2 ** (spread * torch.randn(num_out, num_in, generator=draws))


@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 6.0]))
def test_fp8_blocks_keep_the_half_unit_bound(seed, spread):
    """|w - q s| <= max(2^-4 |w|, 2^-10 s) for every weight: half a unit of e4m3 in its binade, or of a subnormal."""
    weight = matrix(seed, spread)
    q, scale = block_fp8(weight)
    per_weight = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    bound = torch.maximum(weight.abs() / 16, per_weight / 1024)
    # The division by the scale rounds once in fp32.
    assert ((weight - dequantised(q, scale)).abs() <= bound * (1 + 1e-6)).all()
    assert q.float().abs().amax() == 448 and q.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(1280, 384), (384, 4096), (128, 128)])
def test_fp8_strips_change_no_bit(size, dtype):
    """Quantised strip by strip, a last short one included, values and scales are those of all blocks at once."""
    num_out, num_in = size
    weight = matrix(3, 2.0, num_out, num_in).to(dtype)
    q, scale = block_fp8(weight)
    blocks = weight.float().view(num_out // 128, 128, num_in // 128, 128)
    whole = blocks.abs().amax((1, 3)) / 448
    values = (blocks / whole[:, None, :, None]).view(num_out, num_in).to(torch.float8_e4m3fn)
    assert torch.equal(scale, whole) and torch.equal(q.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(1283, 385), (3, 2**18 + 1), (7, 5), (130, 3), (1, 1)])
def test_int8_strips_change_no_bit(size, dtype):
    """Quantised strip by strip, a last short one included, values and scales are those of all rows at once; of any
    width, of a view with strides, and with a row of zeros, whose scale is 1."""
    weight = matrix(4, 2.0, *size[::-1]).to(dtype).T
    weight[0] = 0
    q, scale = channel_int8(weight)
    whole = weight.float().abs().amax(1, keepdim=True) / 127
    whole[0] = 1
    values = (weight.float() / whole).round().to(torch.int8)
    assert torch.equal(scale, whole) and torch.equal(q, values) and q.dtype == torch.int8


@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 6.0]))
def test_int8_channels_keep_the_half_step_bound(seed, spread):
    """|w - q s| <= s / 2, with s = max |row| / 127."""
    weight = matrix(seed, spread)
    q, scale = channel_int8(weight)
    assert torch.equal(scale, weight.abs().amax(1, keepdim=True) / 127)
    assert ((weight - dequantised(q, scale)).abs() <= scale / 2 * (1 + 1e-5)).all()
    assert q.abs().amax() == 127 and q.dtype == torch.int8


def test_what_a_format_holds_comes_back_exactly():
    """Values on the grid of a power-of-two scale, and zeros, survive the round trip bit for bit."""
    draws = stream(0, "grid")
    codes = torch.randint(0, 0x7F, (256, 256), generator=draws, dtype=torch.uint8)
    codes[::128, ::128] = 0x7E  # 448 in every block
    grid = codes.view(torch.float8_e4m3fn).float() / 1024
    grid[:128, :128] = 0
    assert torch.equal(dequantised(*block_fp8(grid)), grid)
    steps = torch.randint(-127, 128, (64, 96), generator=draws).float()
    steps[:, 0] = 127
    steps[3] = 0
    assert torch.equal(dequantised(*channel_int8(steps / 64)), steps / 64)


def test_routers_and_what_decides_stay_as_they_are():
    """Gates, embeddings, norms and the head are not quantised; attention, MLP and expert matrices are."""
    kept = {name for name in tiny().weights() if not is_quantised(name)}
    assert kept == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{n}.{m}.weight" for n in range(3) for m in
          ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")),
        "model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight",
    }  # fmt: skip


@pytest.mark.parametrize("changes", [
    {}, {"tied_head": True}, {"dense_layers": (), "num_kv_heads": 2},
    {"qk_norm": "projection", "dense_layers": (), "gate": GATES["olmoe"]},
])  # fmt: skip
def test_names_are_those_of_the_checkpoint(changes):
    """The table from config.json is name for name and shape for shape what a checkpoint of the model holds."""
    config = replace(world.model_config(), **changes)
    held = {name: tuple(t.shape) for name, t in to_hf(MoE(config, stream(0, "names")))}
    assert parse_shape(config_fields(config.shape())).weights() == held == config.shape().weights()


def tiny() -> ModelShape:
    return world.model_config().shape()


@pytest.mark.parametrize(
    ("changes", "weights", "rollout", "message"),
    [
        ({"expert_size": 96}, "fp8_block", {}, r"multiples of 128, got expert_size / tensor_parallel = 96 at .* = 1"),
        ({"num_kv_heads": 2}, "fp8_block", {}, "num_kv_heads x head_dim / tensor_parallel = 64"),
        ({}, "fp8_block", {"tensor_parallel": 2}, "expert_size / tensor_parallel = 64 at rollout.tensor_parallel = 2"),
        ({"hidden_size": 144}, "same", {}, "hidden_size in multiples of 32, got 144"),
        ({"expert_size": 100}, "int8", {}, "expert_size / tensor_parallel in multiples of 32, got 100"),
        ({"head_dim": 24}, "same", {}, r"needs head_dim in \(32, .*\), got 24"),
        ({}, "same", {"tensor_parallel": 3}, "rollout.tensor_parallel: expected a divisor of the 4 heads, got 3"),
    ],
)  # fmt: skip
def test_sizes_that_no_kernel_takes_are_refused_by_name(changes, weights, rollout, message):
    """ValueError at construction says which width, what it should be, and what to change."""
    block = RolloutBlock(precision=PrecisionBlock(weights=weights), **rollout)
    with pytest.raises(ValueError, match=message):
        quantize.check_precision(replace(tiny(), **changes), block, "native", is_cpu=True)


def test_fp8_kernels_compute_in_16_bits():
    """Native fp8 blocks in an fp32 engine are refused; rounded ones are not."""
    block = RolloutBlock(precision=PrecisionBlock(weights="fp8_block", compute="fp32"))
    with pytest.raises(ValueError, match="expected bf16 or fp16 with native fp8_block weights, got fp32"):
        quantize.check_precision(tiny(), block, "native", is_cpu=True)
    quantize.check_precision(tiny(), block, "rounded", is_cpu=True)


def test_qwen3_30b_fits_fp8_blocks_on_one_gpu_and_two():
    """Qwen3-30B-A3B (expert width 768 = 6 x 128) can be split over 2 GPUs in fp8 blocks, and not over 4."""
    shape = load_shape("nowhere", "qwen3-30b-a3b")
    for tensor_parallel, fits in ((1, True), (2, True), (4, False)):
        block = RolloutBlock(precision=PrecisionBlock(weights="fp8_block"), tensor_parallel=tensor_parallel)
        if fits:
            quantize.check_precision(shape, block, "native", is_cpu=False)
        else:
            with pytest.raises(ValueError, match="expert_size / tensor_parallel = 192"):
                quantize.check_precision(shape, block, "native", is_cpu=False)


@pytest.mark.parametrize(
    ("has_amx", "has_avx512", "is_cpu", "precision", "expected"),
    [
        (False, False, True, {"weights": "int8"}, "rounded"),
        (True, True, True, {"weights": "int8"}, "native"),
        (True, True, True, {"weights": "int8", "kernels": "rounded"}, "rounded"),
        (False, False, False, {"weights": "fp8_block", "kv_cache": "fp8"}, "native"),
        (False, True, True, {"kv_cache": "fp8"}, "native"),
        (False, False, True, {"kv_cache": "fp8"}, "kv_cache: fp8 needs a GPU, or a CPU with AVX-512"),
        (False, True, True, {"weights": "int8", "kernels": "native"}, "native int8 needs a GPU, or a CPU with AMX"),
        (False, False, False, {"batch_invariant": True}, "native"),
        (True, True, True, {"batch_invariant": False}, "native"),
        (True, True, True, {"batch_invariant": True}, "batch_invariant: true needs a GPU"),
    ],
)  # fmt: skip
def test_kernels_are_chosen_by_the_machine(monkeypatch, has_amx, has_avx512, is_cpu, precision, expected):
    """Native kernels where the machine has the instructions, else rounded weights, or an error if native was asked."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    block = PrecisionBlock(**precision)
    if expected in ("native", "rounded"):
        assert quantize.choose_kernels(block, is_cpu) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            quantize.choose_kernels(block, is_cpu)


@pytest.mark.parametrize(("asked", "expected"), [(None, "set by hand"), (True, "1"), (False, "0")])
def test_batch_invariance_is_vllms_own_switch(monkeypatch, asked, expected):
    """True and false are VLLM_BATCH_INVARIANT of the engine's process, which vLLM reads; null leaves it as it is."""
    from vllm import envs

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "set by hand")
    environment.prepare(RolloutBlock(precision=PrecisionBlock(batch_invariant=asked)))
    assert os.environ["VLLM_BATCH_INVARIANT"] == expected
    if asked is not None:
        assert envs.VLLM_BATCH_INVARIANT is asked


@pytest.mark.parametrize("weights", ["same", "fp8_block"])
def test_weights_that_fp16_cannot_hold_are_named(weights):
    """All tensors are sent, and then one error names those that overflow, with their values before the cast and the
    places; a weight in fewer bits only where the engine multiplies its scale in. No other format overflows."""
    named = {name: torch.ones(128, 128) for name in ("a.mlp.gate.weight", "a.q_proj.weight", "model.norm.weight")}
    named["a.mlp.gate.weight"][2, 3], named["model.norm.weight"][0, 0] = -7e4, 65504.0
    named["a.mlp.gate.weight"][4, 5], named["a.q_proj.weight"][7, 1] = float("inf"), 1e6
    kept: list[tuple[str, torch.Tensor]] = []

    def caught(tensors) -> Fp16Overflow:
        kept.clear()
        with pytest.raises(Fp16Overflow) as raised:
            kept.extend(tensors)
        return raised.value

    precision = PrecisionBlock(compute="fp16", weights=weights)
    found = caught(quantize.quantised(named.items(), precision))
    assert [name for name, _ in kept] == list(quantize.sent(dict.fromkeys(named, (128, 128)), precision.weights))
    names = ["a.mlp.gate.weight", "a.q_proj.weight"] if weights == "same" else ["a.mlp.gate.weight"]
    assert list(found.weights) == names
    gate = found.weights["a.mlp.gate.weight"]
    assert (gate.num, gate.places.tolist(), gate.values.tolist()) == (1, [[2, 3]], [-7e4])
    assert "got 70000 (1 value of a.mlp.gate.weight)" in str(found) or weights == "same"
    if weights == "fp8_block":
        found = caught(quantize.rounded(list(kept), precision))
        # The largest of a block is on its grid: 448 scales of 1e6 / 448.
        assert list(found.weights) == ["a.q_proj.weight"] and found.weights["a.q_proj.weight"].num == 1
        assert [name for name, _ in kept] == list(named)
    for compute in ("bf16", "fp32"):
        list(quantize.quantised(named.items(), PrecisionBlock(compute=compute, weights=weights)))
