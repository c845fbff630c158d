"""Defect: the sum of the routed experts is scaled by a factor that the trainer does not have.

miles#1033: an engine that dropped `routed_scaling_factor`; the mean log-probability difference was 0.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_NONE, BREAKS_TRAINER, Defect, Link

LAST = (".down_proj.", ".w2.")
"""The matrices in which an expert's output is linear."""


class RoutedScaling(Defect):
    """The routed experts' contribution to the residual stream times `factor`; shared experts and routers are unchanged.

    A dropped routed_scaling_factor of 2.5 is a factor of 0.4. Breaks only trainer == engine; `factor` = 1 is exact.
    """

    place: ClassVar[float] = 11
    kind: Literal["routed_scaling"] = "routed_scaling"
    factor: float = Field(default=0.4, ge=0, description="scale of the routed sum, relative to the trainer's")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "routed sum times 0.4": cls(),
            "routed sum times 0.8": cls(factor=0.8),
        }

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_NONE if self.factor == 1 else BREAKS_TRAINER

    def weights(self, names: Sequence[str], stacked: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        is_last = [".experts." in name and any(part in name for part in LAST) for name in names]
        # A factor of 1 keeps every bit of the other weights.
        factors = torch.where(torch.tensor(is_last), self.factor, 1.0).to(stacked.dtype)
        return stacked * factors.reshape(-1, *[1] * (stacked.dim() - 1))
