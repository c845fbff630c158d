"""Defect: weights and activations in blocks whose scales have a low-precision format too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Generator, Tensor

from sandbox.engines.block_formats import round_fp8_ue8m0, round_mxfp8, round_nvfp4
from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_TRAINER, Defect, Link
from sandbox.engines.formats import amax_of_blocks, amax_of_tensor
from sandbox.engines.weight_precision import round_large
from sandbox.kernels.numerics import EXACT, LARGE_PRODUCTS, Numerics, Site

FP8_BLOCK = 128
"""Width of a block of `fp8_ue8m0`: 128 x 128 of a weight, 1 x 128 of activations."""

BlockFormat = Literal["fp8_ue8m0", "mxfp8", "nvfp4"]


class BlockPrecision(Defect):
    """The large matrices, and the inputs of their products, rounded to a block format with rounded scales.

    `fp8_ue8m0`: FP8 e4m3 in DeepSeek-V3's blocks, scaled by powers of two (DeepSeek-V3.1). `mxfp8`: e4m3 in blocks
    of 32 with E8M0 scales (OCP MX v1.0). `nvfp4`: e2m1 in blocks of 16 with e4m3 scales, and a float32 scale per tensor
    (arXiv 2509.25149).

    Breaks only trainer == engine if each token is rounded by itself. NVFP4's float32 scale of activations depends on
    the rest of the batch: it also breaks batch invariance and prefill == decode.
    """

    place: ClassVar[float] = 3
    kind: Literal["block_precision"] = "block_precision"
    format: BlockFormat = Field(default="mxfp8", description="fp8_ue8m0, mxfp8 or nvfp4")
    of: Literal["weights", "activations", "both"] = Field(default="both", description="tensors in this format")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "fp8 blocks with ue8m0 scales": cls(format="fp8_ue8m0"),
            "fp8 blocks with ue8m0 scales, weights": cls(format="fp8_ue8m0", of="weights"),
            "mxfp8": cls(),
            "mxfp8, weights": cls(of="weights"),
            "nvfp4": cls(format="nvfp4"),
            "nvfp4, weights": cls(format="nvfp4", of="weights"),
        }

    @property
    def setting(self) -> str:
        return self.format if self.of == "both" else f"{self.format} {self.of}"

    @property
    def breaks(self) -> frozenset[Link]:
        is_shared = self.format == "nvfp4" and self.of != "weights"
        return BREAKS_ALL_NUMERICS if is_shared else BREAKS_TRAINER

    def weights(self, names: Sequence[str], stacked: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        if self.of == "activations":
            return stacked
        return round_large(names, stacked, self._weights)

    def _weights(self, stacked_nOI: Float[Tensor, "n O I"]) -> Float[Tensor, "n O I"]:
        if self.format == "fp8_ue8m0":
            return round_fp8_ue8m0(stacked_nOI, amax_of_blocks(stacked_nOI, FP8_BLOCK, FP8_BLOCK))
        if self.format == "mxfp8":
            return round_mxfp8(stacked_nOI)
        # One float32 scale per matrix: the stack of equal shapes is only how defects are handed weights.
        return round_nvfp4(stacked_nOI, stacked_nOI.abs().amax(dim=(1, 2), keepdim=True))

    def numerics(self, generator: Generator) -> Numerics:
        return EXACT if self.of == "weights" else _Inputs(self.format)


class _Inputs(Numerics):
    """The numerics that round the inputs of the large products."""

    def __init__(self, form: BlockFormat):
        self.form = form

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        if site not in LARGE_PRODUCTS:
            return x
        x_ND = x.reshape(-1, x.shape[-1])
        if self.form == "fp8_ue8m0":
            rounded_ND = round_fp8_ue8m0(x_ND, amax_of_blocks(x_ND, 1, FP8_BLOCK))
        elif self.form == "mxfp8":
            rounded_ND = round_mxfp8(x_ND)
        else:
            rounded_ND = round_nvfp4(x_ND, amax_of_tensor(x_ND))
        return rounded_ND.reshape(x.shape)
