"""Rounding to a storage format and back: the value that an engine computes with when it stores fewer bits.

The products themselves stay in float32, as low-precision matrix units accumulate in float32 (INT8 ones in int32, which
is exact here). bf16 and fp16 need no scale; FP8 and INT8 are scaled so that the largest magnitude of a tensor, a row or
a block becomes the format's largest value. Letters: r, c rows and columns of a block.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lab.overflow import Fp16Overflow

ScaledFormat = Literal["fp8_e4m3", "int8", "int4"]

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
INT_MAX = {"int8": 127.0, "int4": 7.0}  # symmetric: -128 and -8 are not used


def round_bf16(x: Tensor) -> Tensor:
    """x rounded to the nearest bfloat16 (relative error at most 2^-9), in x's own dtype; gradients are rounded too."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_fp16(x: Tensor) -> Tensor:
    """x rounded to the nearest float16 (relative error at most 2^-11, steps of 2^-24 below 2^-14), in x's own dtype.

    Raises Fp16Overflow if a magnitude rounds beyond 65504, the format's largest value.
    """
    rounded = x.to(torch.float16).to(x.dtype)
    # An infinity that x has already is no overflow of the cast.
    if bool((rounded.isinf() & ~x.isinf()).any()):
        raise Fp16Overflow(x.abs().max().item())
    return rounded


def round_fp8_e4m3(x: Tensor, amax: Tensor) -> Tensor:
    """x scaled so that `amax` becomes the format's largest value (448), rounded to FP8 e4m3 and scaled back.

    `amax` broadcasts against x: a scalar for one scale per tensor, (..., 1) for one per row. A zero amax keeps zeros.
    """
    # A quotient that rounding puts just above 448 becomes 448: the cast overflows to NaN only above 464.
    scale = _scale(amax, FP8_MAX)
    return _through_fp8(x / scale) * scale


def round_fp8_saturating(x: Tensor) -> Tensor:
    """x rounded to FP8 e4m3 with scale 1: magnitudes above 448 become 448, as in an engine's saturating cast.

    The smallest step is 2^-9: magnitudes of at most 2^-10 become 0.
    """
    # Clamped first: the cast alone makes NaN of magnitudes above 464.
    return _through_fp8(x.clamp(-FP8_MAX, FP8_MAX))


def round_scaled(x: Tensor, fmt: ScaledFormat, amax: Tensor) -> Tensor:
    """x rounded to a format that needs a scale; `amax` broadcasts against x.

    INT8 has 255 even steps from -amax to amax (error at most amax / 254), INT4 15 (at most amax / 14).
    """
    if fmt == "fp8_e4m3":
        return round_fp8_e4m3(x, amax)
    scale = _scale(amax, INT_MAX[fmt])
    # Without a clamp: `amax` bounds |x|, so the largest quotient is the format's largest value to within rounding.
    return (x / scale).round() * scale


def amax_of_tensor(x: Tensor) -> Float[Tensor, ""]:
    """The largest magnitude in x."""
    return x.abs().amax()


def amax_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude along the last axis, which stays with size 1."""
    return x.abs().amax(dim=-1, keepdim=True)


def amax_of_blocks(x: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """For every element, the largest magnitude in its block of num_rows x num_columns over the last two axes.

    Blocks start at the first row and column; those at the far edges may be smaller.
    """
    R, C = x.shape[-2:]
    # A block that is larger than x holds x, without the memory of a whole block.
    num_rows, num_columns = min(num_rows, max(R, 1)), min(num_columns, max(C, 1))
    # Zeros beyond the edge are never a block's largest magnitude.
    padded = F.pad(x.abs(), (0, -C % num_columns, 0, -R % num_rows))
    tiles = padded.unflatten(-1, (-1, num_columns)).unflatten(-3, (-1, num_rows))  # (..., R/r, r, C/c, c)
    amax = tiles.amax(dim=(-3, -1), keepdim=True).expand_as(tiles)
    return amax.flatten(-4, -3).flatten(-2, -1)[..., :R, :C]


def _through_fp8(x: Tensor) -> Tensor:
    """x cast to FP8 e4m3 and back, without a gradient."""
    codes = x.detach().to(torch.float8_e4m3fn).view(torch.uint8)
    # By a table of all 256 numbers: torch's cast back takes four times as long.
    return _FP8_VALUES.index_select(0, codes.flatten().int()).view(x.shape).to(x.dtype)


def _scale(amax: Tensor, largest: float) -> Tensor:
    # The quotient of zero or subnormal magnitudes is 0: a scale of 1 rounds them to 0.
    scale = amax / largest
    return torch.where(scale > 0, scale, 1.0)
