"""Formats whose scales are numbers of a format of their own: FP8 with powers of two, MXFP8 and NVFP4.

A block's scale is rounded to its own format; then the elements are divided by it, rounded, and multiplied back in
float32. x has two axes at least. Sources: OCP Microscaling Formats v1.0, sec. 6.3 (MXFP8); DeepGEMM's
`ceil_to_ue8m0` (UE8M0, as DeepSeek-V3.1 has it); NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sandbox.engines.formats import FP8_MAX, amax_of_blocks, round_fp8_saturating

MX_BLOCK, NVFP4_BLOCK = 32, 16
FP4_MAX = 6.0
E8M0_LEAST, E8M0_MOST = -127, 127
"""Exponents of E8M0: it holds 2^-127 to 2^127, no zero and no sign."""


def round_fp8_ue8m0(x: Tensor, amax: Tensor) -> Tensor:
    """x in FP8 e4m3 with the least power of two as scale that keeps `amax` within 448; relative error at most 2^-4.

    `amax` broadcasts against x. A float scale would fill the format; this one leaves up to a factor of 2 of it empty.
    """
    # amax = m 2^e with m in [0.5, 1), and 448 = 0.875 x 2^9: so the quotient's exponent, without dividing.
    mantissa, exponent = torch.frexp(amax)
    scale = e8m0(exponent - 9 + (mantissa > 0.875))
    return round_fp8_saturating(x / scale) * scale


def round_mxfp8(x: Tensor) -> Tensor:
    """x in MXFP8: blocks of 32 along the last axis, elements FP8 e4m3, scale 2^(floor(log2 amax) - 8).

    With that scale amax lies in [256, 512): what exceeds 448 saturates (relative error at most 1/8), everything else
    has a relative error of at most 2^-4, or half of 2^-9 times the scale.
    """
    amax = amax_of_blocks(x, 1, MX_BLOCK)
    scale = e8m0(torch.frexp(amax)[1] - 1 - 8)
    return round_fp8_saturating(x / scale) * scale


def round_nvfp4(x: Tensor, amax: Tensor) -> Tensor:
    """x in NVFP4: blocks of 16 along the last axis, elements FP4 e2m1, a block's scale FP8 e4m3, and one in float32.

    The float32 scale is amax / (6 x 448), so that the block with the largest magnitude, `amax` (it broadcasts against
    x: a scalar, for one scale per tensor), has the largest scale, 448. A block below amax / (448 x 2^10) becomes 0.
    """
    whole = amax / (FP4_MAX * FP8_MAX)
    whole = torch.where(whole > 0, whole, 1.0)
    block = amax_of_blocks(x, 1, NVFP4_BLOCK)
    scale = round_fp8_saturating(block / FP4_MAX / whole) * whole
    return torch.where(scale > 0, round_fp4(x / torch.where(scale > 0, scale, 1.0)) * scale, 0.0)


def round_fp4(x: Tensor) -> Tensor:
    """x to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives (E2M1), ties to the even mantissa."""
    magnitude = x.abs().clamp(max=FP4_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round() * step).copysign(x)


def e8m0(exponent: Tensor) -> Tensor:
    """2^exponent in float32, the exponent held within what E8M0 has."""
    exponent = exponent.clamp(E8M0_LEAST, E8M0_MOST)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
