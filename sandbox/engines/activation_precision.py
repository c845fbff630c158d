"""Defect: activations rounded to a low-precision format on their way into the matrix unit."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Generator, Tensor

from sandbox.engines.defect import Defect
from sandbox.engines.formats import Format, round_bf16, round_to
from sandbox.numerics import Numerics, Site

# The products whose matrices an FP8 engine quantises; router, shared gate and head stay in the checkpoint's precision.
LARGE_PRODUCTS: tuple[Site, ...] = ("qkv", "o", "gate_up", "down")


class _Rounded(Numerics):
    def __init__(self, fmt: Format, per_token: bool):
        self.fmt: Format = fmt
        self.per_token = per_token

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        if self.fmt == "fp8_e4m3" and site not in LARGE_PRODUCTS:
            return x
        return round_to(x, self.fmt, self.per_token)

    def output(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        # A bf16 engine stores what a product returns in bf16 too, but keeps router and vocabulary logits in float32.
        return round_bf16(x) if self.fmt == "bf16" and site in LARGE_PRODUCTS else x


class ActivationPrecision(Defect):
    """Inputs of the large matrix products rounded to `format`; bf16 rounds their outputs as well.

    One FP8 scale a token keeps batch invariance; one a tensor breaks it, as the scale then depends on the whole batch.
    """

    kind: Literal["activation_precision"] = "activation_precision"
    format: Format = Field(default="fp8_e4m3", description="format of the activations: bf16 or fp8_e4m3")
    scale: Literal["tensor", "token"] = Field(default="token", description="FP8: one scale a tensor, or one a token")

    def numerics(self, generator: Generator) -> Numerics:
        return _Rounded(self.format, self.scale == "token")
