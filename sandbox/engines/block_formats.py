"""Formats whose scales have a low-precision format too: FP8 with powers of two, MXFP8 and NVFP4.

A block's scale is rounded to its own format; then the elements are divided by it, rounded, and multiplied back in
float32. x has at least two axes. Sources: OCP Microscaling Formats v1.0, sec. 6.3 (MXFP8); DeepGEMM's
`ceil_to_ue8m0` (UE8M0, as in DeepSeek-V3.1); NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sandbox.engines.formats import FP8_MAX, amax_of_blocks, round_fp8_saturating

MX_BLOCK, NVFP4_BLOCK = 32, 16
FP4_MAX = 6.0
E8M0_LEAST, E8M0_MOST = -127, 127
"""Smallest and largest exponent of E8M0, which has neither zero nor sign."""


def round_fp8_ue8m0(x: Tensor, amax: Tensor) -> Tensor:
    """x in FP8 e4m3, scaled by the smallest power of two that keeps `amax` within 448; relative error at most 2^-4.

    `amax` broadcasts against x. A float scale would use the whole range; this one wastes up to a factor of 2.
    """
    # amax = m 2^e with m in [0.5, 1), and 448 = 0.875 x 2^9: this rounds log2(amax / 448) up without a division.
    mantissa, exponent = torch.frexp(amax)
    scale = e8m0(exponent - 9 + (mantissa > 0.875))
    return round_fp8_saturating(x / scale) * scale


def round_mxfp8(x: Tensor) -> Tensor:
    """x in MXFP8: blocks of 32 along the last axis, elements FP8 e4m3, scale 2^(floor(log2 amax) - 8).

    Divided by that scale, amax lies in [256, 512): values above 448 saturate (relative error at most 1/8), all others
    have a relative error of at most 2^-4, or half of 2^-9 times the scale.
    """
    # frexp's mantissa is in [0.5, 1): floor(log2 amax) is its exponent less 1.
    amax = amax_of_blocks(x, 1, MX_BLOCK)
    scale = e8m0(torch.frexp(amax)[1] - 1 - 8)
    return round_fp8_saturating(x / scale) * scale


def round_nvfp4(x: Tensor, amax: Tensor) -> Tensor:
    """x in NVFP4: blocks of 16 along the last axis, elements FP4 e2m1, block scales FP8 e4m3, one scale in float32.

    The float32 scale is amax / (6 x 448), so that the block with the largest magnitude, `amax`, has the largest block
    scale, 448; `amax` broadcasts against x (a scalar for one scale per tensor). A block below amax / (448 x 2^10)
    becomes 0.
    """
    # A scale of 0 (an empty tensor or block) is replaced by 1 before dividing by it.
    whole = amax / (FP4_MAX * FP8_MAX)
    whole = torch.where(whole > 0, whole, 1.0)
    block = amax_of_blocks(x, 1, NVFP4_BLOCK)
    scale = round_fp8_saturating(block / FP4_MAX / whole) * whole
    return torch.where(scale > 0, round_fp4(x / torch.where(scale > 0, scale, 1.0)) * scale, 0.0)


def round_fp4(x: Tensor) -> Tensor:
    """x rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (E2M1), ties to the even mantissa."""
    # Clamped: a block scale that was rounded down leaves quotients above 6.
    magnitude = x.abs().clamp(max=FP4_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # `round` takes ties to the even multiple of the step, whose mantissa bit is 0 at every step size.
    return ((magnitude / step).round() * step).copysign(x)


def e8m0(exponent: Tensor) -> Tensor:
    """2^exponent in float32, with the exponent clamped to E8M0's range."""
    exponent = exponent.clamp(E8M0_LEAST, E8M0_MOST)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
