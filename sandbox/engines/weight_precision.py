"""Defect: weights stored in a low-precision format, as inference engines quantise them at hand-over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from lab.hf.families import UNQUANTISED
from lab.overflow import Fp16Overflow, overflowing
from sandbox.engines.defect import BREAKS_TRAINER, Defect, Link, rounding_words
from sandbox.engines.formats import (
    amax_of_blocks,
    amax_of_rows,
    round_bf16,
    round_fp16,
    round_scaled,
)
from sandbox.kernels.rounding import Format


def round_large(
    names: Sequence[str], stacked: Float[Tensor, "n ..."], change: Callable[[Tensor], Tensor]
) -> Float[Tensor, "n ..."]:
    """The weights with `change` applied to the stack of large matrices; the others keep their bits."""
    is_large = [_is_large(name) for name in names]
    if not any(is_large):
        return stacked
    if all(is_large):
        return change(stacked)
    # A clone, as the next line writes into it and `stacked` is the caller's.
    large, kept = torch.tensor(is_large).nonzero()[:, 0], stacked.clone()
    kept[large] = change(stacked[large])
    return kept


# Every hand-over asks of every tensor.
@cache
def _is_large(name: str) -> bool:
    return not any(part in name for part in UNQUANTISED)


class WeightPrecision(Defect):
    """Every attention, MLP and expert matrix rounded to `format`; with bf16 and fp16, every weight.

    Breaks only trainer == engine: all rows, in any batch and pass, use the same rounded weights.
    Blocks of 128 x 128 are DeepSeek-V3's (arXiv 2412.19437, sec. 3.3.2).
    """

    place: ClassVar[float] = 1
    kind: Literal["weight_precision"] = "weight_precision"
    format: Format | Literal["int4"] = Field(
        default="fp8_e4m3", description="storage of the weights: bf16, fp16, fp8_e4m3, int8 or int4"
    )
    scale: Literal["tensor", "channel", "block"] = Field(
        default="channel", description="FP8, INT8, INT4: one scale per matrix, output row or square block"
    )
    block_size: int = Field(default=128, ge=1, le=2**31, description="side of a block; those at the edges are smaller")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "weights fp16": cls(format="fp16"),
            "weights bf16": cls(format="bf16"),
            "weights int8, a scale per channel": cls(format="int8"),
            "weights fp8, a scale per channel": cls(),
            "weights fp8, a scale per block of 32 x 32": cls(scale="block", block_size=32),
            "weights fp8, a scale per tensor": cls(scale="tensor"),
        }

    @property
    def words(self) -> str:
        return rounding_words(self, "weights")

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_TRAINER

    def weights(self, names: Sequence[str], stacked: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        if self.format == "bf16":
            return round_bf16(stacked)
        if self.format == "fp16":
            try:
                return round_fp16(stacked)
            except Fp16Overflow:
                raise Fp16Overflow.of(overflowing(zip(names, stacked, strict=True))) from None
        form = self.format
        return round_large(names, stacked, lambda large: round_scaled(large, form, self._amax(large)))

    def _amax(self, stacked: Float[Tensor, "n ..."]) -> Tensor:
        if self.scale == "block":
            return amax_of_blocks(stacked, self.block_size, self.block_size)
        # A file's matrices are (out, in): each row is one output.
        if self.scale == "channel":
            return amax_of_rows(stacked)
        # One scale per matrix of the stack.
        return amax_of_rows(stacked.flatten(1)).reshape(-1, *[1] * (stacked.dim() - 1))
