"""Defect: weights kept in a low-precision format, as inference engines quantise them at hand-over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_TRAINER, Defect, Link
from sandbox.engines.formats import (
    amax_of_blocks,
    amax_of_rows,
    amax_of_tensor,
    round_bf16,
    round_fp16,
    round_scaled,
)
from sandbox.rounding import Format

# FP8 and INT8 engines quantise the large matrices and leave these in the checkpoint's precision.
UNQUANTISED = (
    "embed_tokens",
    "lm_head",
    "norm",
    "mlp.gate.",
    "block_sparse_moe.gate.",
    "shared_expert_gate",
)


class WeightPrecision(Defect):
    """Every attention, MLP and expert matrix rounded to `format`; with bf16 and fp16, every weight.

    Breaks trainer == engine alone: whatever the batch and the pass, all rows meet the same rounded weights.
    Blocks of 128 x 128 are DeepSeek-V3's (arXiv 2412.19437, sec. 3.3.2).
    """

    kind: Literal["weight_precision"] = "weight_precision"
    format: Format = Field(default="fp8_e4m3", description="storage of the weights: bf16, fp16, fp8_e4m3 or int8")
    scale: Literal["tensor", "channel", "block"] = Field(
        default="channel", description="FP8, INT8: one scale a matrix, an output row, or a square block"
    )
    block_size: int = Field(default=128, ge=1, description="side of a block; those at the edges are smaller")

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_TRAINER

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        if self.format == "bf16":
            return round_bf16(tensor)
        if self.format == "fp16":
            return round_fp16(tensor)
        if any(part in name for part in UNQUANTISED):
            return tensor
        if self.scale == "block":
            amax = amax_of_blocks(tensor, self.block_size, self.block_size)
        else:
            amax = amax_of_rows(tensor) if self.scale == "channel" else amax_of_tensor(tensor)
        return round_scaled(tensor, self.format, amax)
