"""Defect: Gaussian noise on the router logits; it changes only the routing."""

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

    def router_logits(self, layer_number: int, logits_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
        return logits_NE + self.std * torch.randn(logits_NE.shape, generator=self.generator, dtype=logits_NE.dtype)

    def router_noise(self, num_layers: int, num_rows: int, num_experts: int) -> Float[Tensor, "L N E"]:
        noise_LNE = torch.empty(num_layers, num_rows, num_experts)
        for noise_NE in noise_LNE:  # one draw of all layers would be other numbers
            torch.randn(num_rows, num_experts, generator=self.generator, out=noise_NE)
        return noise_LNE.mul_(self.std)


class RouterNoise(Defect):
    """Independent noise of standard deviation `std` on every router logit, drawn from the generate call's stream.

    Every forward pass draws new noise, in row order, so all three numerical links break.
    """

    place: ClassVar[float] = 6
    kind: Literal["router_noise"] = "router_noise"
    std: float = Field(default=0.1, ge=0, description="standard deviation of the noise, in router-logit units")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "router noise 0.01": cls(std=0.01),
            "router noise 0.1": cls(std=0.1),
            "router noise 0.3": cls(std=0.3),
        }

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_NONE if self.std == 0 else BREAKS_ALL_NUMERICS

    def numerics(self, generator: torch.Generator) -> Numerics:
        return _Noise(self.std, generator)
