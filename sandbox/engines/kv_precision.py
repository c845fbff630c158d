"""Defect: keys and values cached in a low-precision format, which a training engine, having no cache, never meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Generator

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_TRAINER, Defect, Link, rounding
from sandbox.engines.rounded import Rounded
from sandbox.kernels.numerics import Numerics
from sandbox.kernels.rounding import Rounding, Step


class KVPrecision(Defect):
    """Keys (rotated) and values rounded to `format` when they are written to the cache; everyone reads the cache.

    A prefill attends to what it has just written, as vLLM's attention does (it takes keys and values from the paged
    cache in both passes), so prefill == decode holds and only trainer == engine breaks: training has no cache.
    A scale per tensor spans what one forward pass writes: it depends on the batch, and breaks batch invariance and
    prefill == decode as well. `unit` is vLLM's default (k_scale = v_scale = 1): no scale, magnitudes above 448 saturate
    and small ones fall to 0.
    """

    place: ClassVar[float] = 4
    kind: Literal["kv_precision"] = "kv_precision"
    format: Literal["bf16", "fp8_e4m3", "int8"] = Field(default="fp8_e4m3", description="format of the cache")
    scale: Literal["unit", "token", "tensor"] = Field(
        default="unit", description="FP8: 1, or as INT8 one scale per token and head, or one per forward pass and layer"
    )

    @model_validator(mode="after")
    def _has_a_scale(self) -> KVPrecision:
        if self.format == "int8" and self.scale == "unit":
            raise ValueError("scale: expected token or tensor with int8 (a step of 1 keeps nothing), got unit")
        return self

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "cache bf16": cls(format="bf16"),
            "cache int8, a scale per token": cls(format="int8", scale="token"),
            "cache fp8, a scale per token": cls(scale="token"),
            "cache fp8, scale 1": cls(),
        }

    @property
    def setting(self) -> str:
        return rounding(self)

    @property
    def breaks(self) -> frozenset[Link]:
        is_shared = self.format != "bf16" and self.scale == "tensor"
        return BREAKS_ALL_NUMERICS if is_shared else BREAKS_TRAINER

    def numerics(self, generator: Generator) -> Numerics:
        step = Step("bf16") if self.format == "bf16" else Step(self.format, self.scale)
        return Rounded(Rounding(kv=(step,)))
