"""Defect: activations rounded to a low-precision format on their way into the matrix unit."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Generator, Tensor

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_TRAINER, Defect, Link
from sandbox.engines.formats import (
    Format,
    amax_of_blocks,
    amax_of_rows,
    amax_of_tensor,
    round_bf16,
    round_fp16,
    round_scaled,
)
from sandbox.numerics import LARGE_PRODUCTS, Numerics, Site

Scale = Literal["tensor", "token", "block"]


class _Wide(Numerics):
    """bf16 and fp16: what goes into a product and what comes out of it."""

    def __init__(self, fmt: Literal["bf16", "fp16"]):
        self.round = round_bf16 if fmt == "bf16" else round_fp16

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        return self.round(x)

    def output(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        # Such an engine keeps router and vocabulary logits in float32.
        return self.round(x) if site in LARGE_PRODUCTS else x


class _Scaled(Numerics):
    """FP8 and INT8: what goes into the large products."""

    def __init__(self, fmt: Literal["fp8_e4m3", "int8"], scale: Scale, block_size: int):
        self.fmt: Literal["fp8_e4m3", "int8"] = fmt
        self.scale: Scale = scale
        self.block_size = block_size

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        if site not in LARGE_PRODUCTS:
            return x
        if self.scale == "block":
            amax = amax_of_blocks(x, 1, self.block_size)
        else:
            amax = amax_of_rows(x) if self.scale == "token" else amax_of_tensor(x)
        return round_scaled(x, self.fmt, amax)


class ActivationPrecision(Defect):
    """Inputs of the large matrix products rounded to `format`; bf16 and fp16 round all inputs, and the outputs too.

    Breaks trainer == engine alone where a token's rounding is its own affair (bf16, fp16, a scale a token or a block of
    it). One scale a tensor depends on whatever else is in the batch: it breaks batch invariance and prefill == decode.
    Blocks are of 1 x 128, as in DeepSeek-V3 (arXiv 2412.19437, sec. 3.3.2).
    """

    kind: Literal["activation_precision"] = "activation_precision"
    format: Format = Field(default="fp8_e4m3", description="format of the activations: bf16, fp16, fp8_e4m3 or int8")
    scale: Scale = Field(default="token", description="FP8, INT8: one scale a tensor, a token, or a block of a token")
    block_size: int = Field(default=128, ge=1, description="width of a block; the last one may be smaller")

    @property
    def breaks(self) -> frozenset[Link]:
        is_shared = self.format in ("fp8_e4m3", "int8") and self.scale == "tensor"
        return BREAKS_ALL_NUMERICS if is_shared else BREAKS_TRAINER

    def numerics(self, generator: Generator) -> Numerics:
        if self.format == "bf16" or self.format == "fp16":
            return _Wide(self.format)
        return _Scaled(self.format, self.scale, self.block_size)
