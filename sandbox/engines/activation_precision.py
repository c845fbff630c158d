"""Defect: activations rounded to a low-precision format before a matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Generator

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_TRAINER, Defect, Link, rounding_words
from sandbox.engines.rounded import Rounded
from sandbox.kernels.numerics import Numerics
from sandbox.kernels.rounding import Format, Rounding, RoundingStep


class ActivationPrecision(Defect):
    """Inputs of the large matrix products rounded to `format`; bf16 and fp16 round all inputs, and the outputs too.

    Breaks only trainer == engine if each token is rounded by itself (bf16, fp16, a scale per token or per block of a
    token). One scale per tensor depends on the rest of the batch: it breaks batch invariance and prefill == decode too.
    Blocks are 1 x 128, as in DeepSeek-V3 (arXiv 2412.19437, sec. 3.3.2).
    """

    place: ClassVar[float] = 2
    kind: Literal["activation_precision"] = "activation_precision"
    format: Format = Field(default="fp8_e4m3", description="format of the activations: bf16, fp16, fp8_e4m3 or int8")
    scale: Literal["tensor", "token", "block"] = Field(
        default="token", description="FP8, INT8: one scale per tensor, per token, or per block of a token"
    )
    block_size: int = Field(default=128, ge=1, le=2**31, description="width of a block; the last one may be smaller")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "activations bf16": cls(format="bf16"),
            "activations int8, a scale per token": cls(format="int8"),
            "activations fp8, a scale per token": cls(),
            "activations fp8, a scale per block of 1 x 32": cls(scale="block", block_size=32),
            "activations fp8, a scale per tensor": cls(scale="tensor"),
        }

    @property
    def words(self) -> str:
        return rounding_words(self, "activations")

    @property
    def breaks(self) -> frozenset[Link]:
        # bf16 and fp16 have no scale, whatever the field says.
        is_shared = self.format in ("fp8_e4m3", "int8") and self.scale == "tensor"
        return BREAKS_ALL_NUMERICS if is_shared else BREAKS_TRAINER

    def numerics(self, generator: Generator) -> Numerics:
        if self.format in ("bf16", "fp16"):
            # Outputs of the large products only: such an engine keeps router and vocabulary logits in float32.
            steps = (RoundingStep(self.format),)
            return Rounded(Rounding(inputs=steps, other_inputs=steps, outputs=steps))
        block_size = self.block_size if self.scale == "block" else 0
        return Rounded(Rounding(inputs=(RoundingStep(self.format, self.scale, block_size),)))
