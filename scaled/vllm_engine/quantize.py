"""Conversion of weights to the rollout engine's precision, tensor by tensor, in the process that sends them.

Linear weights become e4m3 in blocks of 128 x 128, or int8 with a scale per channel; gates, embeddings, norms, the head
and the low-rank compressions of latent attention stay in the compute type, because they decide routes and softmaxes.
Values and scales are sent; an engine without kernels for them multiplies them (`rounded`), in the compute type.

Extra letters: O, I output and input width of a weight; o, i their numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from lab.hf import ModelShape, Shape
from lab.overflow import Fp16Overflow, Overflow, overflowing
from scaled.config import PrecisionBlock, RolloutBlock

BLOCK = 128
STRIP = 2**18
"""Elements quantised at a time: 1 MiB of fp32, which stays in a core's cache from pass to pass."""

FP8_MAX = 448.0  # the largest finite e4m3fn value
INT8_MAX = 127.0
CPU_MULTIPLE = 32  # of the grouped matmul of vLLM's CPU backend
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

Kernels = Literal["native", "rounded"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SCALES = {"fp8_block": "_scale_inv", "int8": "_scale"}
"""The end of the name of a weight's scales, as in checkpoints of the format."""

# DeepSeek's compressions to a low rank: vLLM fuses them into one matrix whose width is no multiple of a block.
UNQUANTISED = ("kv_a_proj_with_mqa", "q_a_proj")


def is_quantised(name: str) -> bool:
    """Whether the weight of this Hugging Face name is stored in fewer bits where `precision.weights` asks for it."""
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return name.endswith("_proj.weight") and module not in UNQUANTISED


def quantised(named_tensors: Iterable[tuple[str, Tensor]], precision: PrecisionBlock) -> Iterator[tuple[str, Tensor]]:
    """The tensors sent to an engine of this precision, one weight at a time; the input is whole weights, never shards.

    fp8_block: `weight` e4m3 and `weight_scale_inv` fp32; int8: `weight` and `weight_scale` fp32; all that is not
    quantised: the compute type. A router's selection bias stays as it is: it is added in fp32. Raises Fp16Overflow,
    with all weights that fp16 cannot hold, after the last tensor: ranks send theirs together.
    """
    cast = _Cast(precision)
    for name, tensor in named_tensors:
        if precision.weights == "same" or not is_quantised(name):
            yield name, tensor if name.endswith("e_score_correction_bias") else cast(name, tensor)
            continue
        weight_OI, scale = block_fp8(tensor) if precision.weights == "fp8_block" else channel_int8(tensor)
        yield name, weight_OI
        yield name + SCALES[precision.weights], scale
    cast.check()


class _Cast:
    """Tensors in the compute type, and those that it cannot hold: of fp16 alone, as bf16 has the exponents of fp32."""

    def __init__(self, precision: PrecisionBlock):
        self._dtype = DTYPES[precision.compute]
        self._overflowing: dict[str, Overflow] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        cast = tensor.to(self._dtype)
        if self._dtype == torch.float16 and bool(cast.isinf().any()):
            self._overflowing |= overflowing([(name, tensor)])
        return cast

    def check(self) -> None:
        """Raises Fp16Overflow with all weights that were cast and overflow."""
        if self._overflowing:
            raise Fp16Overflow.of(self._overflowing)


@dataclass(frozen=True)
class Sent:
    """Shape and dtype of a tensor that is sent; a dtype of None accepts any floating-point type."""

    shape: Shape
    dtype: torch.dtype | None = None


def sent(weights: Mapping[str, Shape], kind: str) -> dict[str, Sent]:
    """The tensors that `quantised` gives for weights of these names and shapes, in its order.

    `kind` is `precision.weights`.
    """
    table: dict[str, Sent] = {}
    for name, shape in weights.items():
        if kind == "same" or not is_quantised(name):
            table[name] = Sent(shape)
            continue
        num_out, num_in = shape
        is_fp8 = kind == "fp8_block"
        table[name] = Sent(shape, torch.float8_e4m3fn if is_fp8 else torch.int8)
        scales = (num_out // BLOCK, num_in // BLOCK) if is_fp8 else (num_out, 1)
        table[name + SCALES[kind]] = Sent(scales, torch.float32)
    return table


def rounded(named_tensors: Iterable[tuple[str, Tensor]], precision: PrecisionBlock) -> Iterator[tuple[str, Tensor]]:
    """The weights that `quantised` tensors stand for, in the compute type; each weight's scale must follow it.

    Raises Fp16Overflow as `quantised`: kernels that multiply by the scale in fp32 would hold these weights.
    """
    cast = _Cast(precision)
    tensors = iter(named_tensors)
    for name, tensor in tensors:
        if precision.weights == "same" or not is_quantised(name):
            yield name, tensor
            continue
        _, scale = next(tensors)
        yield name, cast(name, dequantised(tensor, scale))
    cast.check()


def block_fp8(weight_OI: Float[Tensor, "O I"]) -> tuple[Tensor, Float[Tensor, "o i"]]:
    """e4m3 values q and fp32 scales s with weight ~ q s in each block of 128 x 128; s = max |block| / 448.

    |w - q s| <= 2^-4 |w| where |q| >= 2^-6, else 2^-10 s: half a unit of e4m3's 3 fraction bits. A block of zeros has
    scale 1. Raises ValueError where a width is no multiple of 128.
    """
    num_out, num_in = weight_OI.shape
    if num_out % BLOCK or num_in % BLOCK:
        raise ValueError(f"fp8_block: expected widths in multiples of {BLOCK}, got {num_out} x {num_in}")
    weight_q_OI = torch.empty_like(weight_OI, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scale_oi = weight_OI.new_empty(num_out // BLOCK, num_in // BLOCK, dtype=torch.float32)
    rows = max(1, STRIP // (num_in * BLOCK)) * BLOCK
    for start in range(0, num_out, rows):
        strip_OI = weight_OI[start : start + rows]
        # (block row, row in it, block column, column in it)
        blocks_oBiB = strip_OI.float().view(-1, BLOCK, num_in // BLOCK, BLOCK)
        # No clamp: beside a normal scale the quotient exceeds the largest code by rounding alone.
        strip_oi = _scale(blocks_oBiB.abs().amax((1, 3)), FP8_MAX)
        weight_q_OI[start : start + rows] = (blocks_oBiB / strip_oi[:, None, :, None]).view_as(strip_OI)
        scale_oi[start // BLOCK : (start + rows) // BLOCK] = strip_oi
    return weight_q_OI, scale_oi


def channel_int8(weight_OI: Float[Tensor, "O I"]) -> tuple[Int8[Tensor, "O I"], Float[Tensor, "O 1"]]:
    """int8 values q and fp32 scales s with weight ~ q s in each row; s = max |row| / 127, so |w - q s| <= s / 2.

    A row of zeros has scale 1.
    """
    num_out, num_in = weight_OI.shape
    weight_q_OI = torch.empty_like(weight_OI, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale_O1 = weight_OI.new_empty(num_out, 1, dtype=torch.float32)
    rows = max(1, STRIP // num_in)
    for start in range(0, num_out, rows):
        strip_OI = weight_OI[start : start + rows].float()
        # No clamp: the quotient exceeds the largest code by less than `round` takes off again.
        strip_O1 = _scale(strip_OI.abs().amax(1, keepdim=True), INT8_MAX)
        weight_q_OI[start : start + rows] = (strip_OI / strip_O1).round()
        scale_O1[start : start + rows] = strip_O1
    return weight_q_OI, scale_O1


def _scale(largest: Tensor, largest_code: float) -> Tensor:
    # Divide by a tensor: for a number, torch on a GPU multiplies by the reciprocal; the bits differ from a CPU's.
    scale = largest / largest.new_tensor(largest_code)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def dequantised(weight_OI: Tensor, scale: Tensor) -> Float[Tensor, "O I"]:
    """The weights that the engine computes with: q s in fp32, from either format."""
    if weight_OI.dtype == torch.int8:
        return weight_OI.float() * scale
    return weight_OI.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def choose_kernels(precision: PrecisionBlock, is_cpu: bool) -> Kernels:
    """Whether weights in fewer bits go into vLLM's own kernels (native) or are rounded to their grid.

    vLLM's CPU kernels of fp8_block and int8, and its fp8 KV cache, need instructions that some CPUs lack: ValueError
    names them where `native` or an fp8 cache was asked for. Its batch-invariant kernels exist only for GPUs.
    """
    if is_cpu and precision.batch_invariant:
        raise ValueError("rollout.precision.batch_invariant: true needs a GPU; vLLM has no such kernels for CPUs")
    has_amx, has_avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    if is_cpu and precision.kv_cache == "fp8" and not (has_amx or has_avx512):
        raise ValueError("rollout.precision.kv_cache: fp8 needs a GPU, or a CPU with AVX-512; use same")
    if precision.weights == "same":
        return "native"
    if precision.kernels == "rounded":
        return "rounded"
    if is_cpu and not has_amx:
        if precision.kernels == "native":
            raise ValueError(
                f"rollout.precision.kernels: native {precision.weights} needs a GPU, or a CPU with AMX; use rounded"
            )
        return "rounded"
    return "native"


def quantization_config(shape: ModelShape, precision: PrecisionBlock, kernels: Kernels) -> dict[str, Any] | None:
    """config.json's quantization_config for this precision; None where weights are in the compute type."""
    if kernels == "rounded":
        return None
    gates = [shape.router(n)["router"].name.removesuffix(".weight") for n in shape.moe_layers]
    latent = (
        []
        if shape.latent_attention is None
        else [
            f"model.layers.{n}.self_attn.{name}"
            for n in range(shape.num_layers)
            for name in (*UNQUANTISED, "fused_qkv_a_proj")  # the last is vLLM's name of both together
        ]
    )
    kept = ["lm_head", *gates, *latent]
    if precision.weights == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    if precision.weights == "int8":
        numbers = {"num_bits": 8, "type": "int", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": kept,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**numbers, "strategy": "channel", "dynamic": False},
                    "input_activations": {**numbers, "strategy": "token", "dynamic": True},
                }
            },
        }
    return None


def check_precision(shape: ModelShape, rollout: RolloutBlock, kernels: Kernels, is_cpu: bool) -> None:
    """Raises ValueError, naming what to change, where vLLM's kernels cannot hold this model in this precision."""
    precision, tp = rollout.precision, rollout.tensor_parallel
    if precision.weights == "fp8_block" and kernels == "native" and precision.compute == "fp32":
        raise ValueError("rollout.precision.compute: expected bf16 or fp16 with native fp8_block weights, got fp32")
    if shape.num_heads % tp:
        raise ValueError(f"rollout.tensor_parallel: expected a divisor of the {shape.num_heads} heads, got {tp}")
    widths = _widths(shape, tp)
    if precision.weights == "fp8_block":
        for label, width in widths.items():
            if width % BLOCK:
                raise ValueError(
                    f"rollout.precision.weights: fp8_block needs widths in multiples of {BLOCK}, got {label} = {width} "
                    f"at rollout.tensor_parallel = {tp}; use int8 or same, or fewer GPUs per engine"
                )
    if not is_cpu:
        return
    for label in ("hidden_size", "expert_size / tensor_parallel"):
        if widths[label] % CPU_MULTIPLE:
            raise ValueError(
                f"config.json: vLLM on a CPU needs {label} in multiples of {CPU_MULTIPLE}, got {widths[label]}"
            )
    if shape.latent_attention is None and shape.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(f"config.json: vLLM on a CPU needs head_dim in {CPU_HEAD_SIZES}, got {shape.head_dim}")


def _widths(shape: ModelShape, tp: int) -> dict[str, int]:
    """Widths of the quantised weights as one GPU holds them."""
    widths = {"hidden_size": shape.hidden_size, "expert_size / tensor_parallel": shape.expert_size // tp}
    latent = shape.latent_attention
    if latent is None:
        widths["num_heads x head_dim / tensor_parallel"] = shape.num_heads * shape.head_dim // tp
        # vLLM copies key-value heads where there are more ranks than heads.
        widths["num_kv_heads x head_dim / tensor_parallel"] = max(1, shape.num_kv_heads // tp) * shape.head_dim
    else:
        heads = shape.num_heads // tp
        query_dim = latent.no_position_dim + latent.position_dim
        widths["num_heads x query head_dim / tensor_parallel"] = heads * query_dim
        widths["num_heads x (key + value) head_dim / tensor_parallel"] = heads * (
            latent.no_position_dim + latent.value_dim
        )
        widths["num_heads x v_head_dim / tensor_parallel"] = heads * latent.value_dim
        widths["kv_lora_rank"] = latent.key_value_rank
        if latent.query_rank is not None:
            widths["q_lora_rank"] = latent.query_rank
    if shape.dense_layers:
        widths["dense_size / tensor_parallel"] = shape.dense_size // tp
    return widths
