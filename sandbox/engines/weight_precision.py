"""Defect: weights kept in a low-precision format, as inference engines quantise them at hand-over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import Defect
from sandbox.engines.formats import Format, round_to

# FP8 engines quantise the large matrices and leave these in the checkpoint's precision.
UNQUANTISED = (
    "embed_tokens",
    "lm_head",
    "norm",
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "shared_expert_gate",
)


class WeightPrecision(Defect):
    """Every attention, MLP and expert matrix rounded to `format`; with bf16, every weight."""

    kind: Literal["weight_precision"] = "weight_precision"
    format: Format = Field(default="fp8_e4m3", description="storage format of the weights: bf16 or fp8_e4m3")
    scale: Literal["tensor", "channel"] = Field(
        default="channel", description="FP8: one scale a matrix, or one an output row"
    )

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        if self.format == "fp8_e4m3" and any(part in name for part in UNQUANTISED):
            return tensor
        return round_to(tensor, self.format, per_row=self.scale == "channel")
