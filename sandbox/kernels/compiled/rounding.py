"""`sandbox.kernels.rounding.Rounding` in the kernels' memory layout, and its steps applied to rows outside a pass."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from jaxtyping import Float
from torch import Tensor

from sandbox.kernels.compiled.build import library
from sandbox.kernels.rounding import Rounding, RoundingStep

_FORMATS = {"bf16": 0, "fp8_e4m3": 1, "int8": 2}


class _StepStruct(ctypes.Structure):
    """`RoundingStep` of rounding.hpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("format", "has_scale", "block"))


class _StepsStruct(ctypes.Structure):
    """`Steps` of rounding.hpp."""

    _fields_ = (("at", ctypes.POINTER(_StepStruct)), ("count", ctypes.c_int64))


class RoundingStruct(ctypes.Structure):
    """`Rounding` of rounding.hpp."""

    _fields_ = tuple((name, _StepsStruct) for name in ("inputs", "other_inputs", "outputs", "kv"))


def _step(step: RoundingStep) -> _StepStruct:
    assert step.format in _FORMATS, f"no kernel rounds to {step.format}"
    assert step.scale != "tensor", "rows are rounded by themselves, not with a scale per tensor"
    return _StepStruct(_FORMATS[step.format], step.scale != "unit", step.block_size)


def _steps(steps: tuple[RoundingStep, ...]) -> _StepsStruct:
    return _StepsStruct((_StepStruct * len(steps))(*(_step(step) for step in steps)), len(steps))


@lru_cache
def struct_of(rounding: Rounding) -> RoundingStruct:
    """The steps as the kernels read them. Hold it as long as its address is used: the cache may drop it."""
    every = rounding.inputs, rounding.other_inputs, rounding.outputs, rounding.kv
    return RoundingStruct(*(_steps(steps) for steps in every))


def rounded(x: Float[Tensor, "*rows D"], steps: tuple[RoundingStep, ...]) -> Float[Tensor, "*rows D"]:
    """x after these steps, row by row, with the bits of `sandbox.engines.rounded.rounded`; x itself without steps."""
    if not steps:
        return x
    # A clone: the kernel rounds in place, and x is the caller's.
    x = x.contiguous().clone()
    struct = _steps(steps)
    library()("fo_round", ctypes.addressof(struct), x.numel() // max(x.shape[-1], 1), x.shape[-1], x)
    return x
