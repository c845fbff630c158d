"""Rounding to a storage format and back: what a value becomes when an engine keeps it in fewer bits.

The products themselves stay in float32, as an FP8 or bf16 matrix unit accumulates in float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Format = Literal["bf16", "fp8_e4m3"]
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def round_bf16(x: Tensor) -> Tensor:
    """x rounded to the nearest bfloat16 (relative error at most 2^-9), in x's own dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_fp8_e4m3(x: Tensor, amax: Tensor) -> Tensor:
    """x scaled so that `amax` meets the format's largest value (448), rounded to FP8 e4m3 and scaled back.

    `amax` broadcasts against x: a scalar for one scale a tensor, (..., 1) for one a row. A zero amax keeps the zeros.
    """
    scale = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_to(x: Tensor, fmt: Format, per_row: bool) -> Tensor:
    """x rounded to `fmt`; FP8 takes one scale a row (the last axis) or one for the whole tensor."""
    if fmt == "bf16":
        return round_bf16(x)
    amax = x.abs().amax(dim=-1, keepdim=True) if per_row else x.abs().amax()
    return round_fp8_e4m3(x, amax)
