"""Defect: Gaussian noise on the next-token logits; it changes the policy but not the routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_NONE, Defect, Link
from sandbox.kernels.numerics import Numerics


class _Noise(Numerics):
    def __init__(self, std: float, generator: torch.Generator):
        self.std = std
        self.generator = generator

    def logits(self, logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        return logits_NV + self.std * torch.randn(logits_NV.shape, generator=self.generator, dtype=logits_NV.dtype)


class LogitNoise(Defect):
    """Independent noise of standard deviation `std` on every next-token logit, before sampling and scoring.

    Tokens are drawn from the noisy distribution and scored under it. Every forward pass draws new noise, so all three
    numerical links break. Routes and hidden states keep the exact engine's bits. For small std the mean of
    KL(mu || old) is std^2 (1 - sum_v p_v^2) / 2 nats, to order std^3.
    """

    place: ClassVar[float] = 7
    kind: Literal["logit_noise"] = "logit_noise"
    std: float = Field(default=0.1, ge=0, description="standard deviation of the noise, in nats")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "logit noise 0.01": cls(std=0.01),
            "logit noise 0.1": cls(std=0.1),
            "logit noise 0.3": cls(std=0.3),
        }

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_NONE if self.std == 0 else BREAKS_ALL_NUMERICS

    def numerics(self, generator: torch.Generator) -> Numerics:
        return _Noise(self.std, generator)
