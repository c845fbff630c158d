"""Defect: keys and values cached in a low-precision format; a training engine has no cache and never rounds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Generator

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_TRAINER, Defect, Link, rounding_words
from sandbox.engines.rounded import Rounded
from sandbox.kernels.numerics import Numerics
from sandbox.kernels.rounding import Rounding, RoundingStep


class KVPrecision(Defect):
    """Keys (rotated) and values rounded to `format` when they are written to the cache; all passes read the cache.

    A prefill reads the keys and values that it has just written, as in vLLM (attention reads the paged cache in both
    passes), so prefill == decode holds and only trainer == engine breaks: training has no cache.
    A scale per tensor spans all that one forward pass writes: it depends on the batch, and also breaks batch invariance
    and prefill == decode. `unit` is vLLM's default (k_scale = v_scale = 1): no scale, so magnitudes above 448 saturate
    and small ones become 0.
    """

    place: ClassVar[float] = 4
    kind: Literal["kv_precision"] = "kv_precision"
    format: Literal["bf16", "fp8_e4m3", "int8"] = Field(default="fp8_e4m3", description="format of the cache")
    scale: Literal["unit", "token", "tensor"] = Field(
        default="unit", description="unit: 1 (FP8 only); token: one per token and head; tensor: one per pass and layer"
    )

    @model_validator(mode="after")
    def _has_a_scale(self) -> KVPrecision:
        if self.format == "int8" and self.scale == "unit":
            raise ValueError("scale: expected token or tensor with int8 (steps of 1 are too coarse), got unit")
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
    def words(self) -> str:
        return rounding_words(self, "KV cache")

    @property
    def breaks(self) -> frozenset[Link]:
        is_shared = self.format != "bf16" and self.scale == "tensor"
        return BREAKS_ALL_NUMERICS if is_shared else BREAKS_TRAINER

    def numerics(self, generator: Generator) -> Numerics:
        step = RoundingStep("bf16") if self.format == "bf16" else RoundingStep(self.format, self.scale)
        return Rounded(Rounding(kv=(step,)))
