"""Simulated inference engines: the exact one plus named defects. A new defect is one file and one row in `Defects`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from lab.strict import Strict
from sandbox.engines.activation_precision import ActivationPrecision
from sandbox.engines.block_precision import BlockPrecision
from sandbox.engines.expert_layout import ExpertLayout
from sandbox.engines.kv_precision import KVPrecision
from sandbox.engines.logit_noise import LogitNoise
from sandbox.engines.partial_weights import PartialWeights
from sandbox.engines.reduction_order import ReductionOrder
from sandbox.engines.routed_scaling import RoutedScaling
from sandbox.engines.router_noise import RouterNoise
from sandbox.engines.sampling_mismatch import SamplingMismatch
from sandbox.engines.stale_weights import StaleWeights
from sandbox.engines.weight_precision import WeightPrecision

Defects = Annotated[
    WeightPrecision
    | ActivationPrecision
    | BlockPrecision
    | KVPrecision
    | ReductionOrder
    | RouterNoise
    | LogitNoise
    | StaleWeights
    | PartialWeights
    | ExpertLayout
    | RoutedScaling
    | SamplingMismatch,
    Field(discriminator="kind"),
]


class EngineConfig(Strict):
    """The inference engine: the training engine's own maths, plus these defects in order. None gives `exact`."""

    defects: tuple[Defects, ...] = Field(
        default=(), description="departures from the training engine; none: the exact engine"
    )
    prefix_cache: bool = Field(
        default=True, description="later turns of a response compute only what is new, and take the rest's routes along"
    )

    @property
    def words(self) -> str:
        """The engine as a report names it: its defects in order, or `exact`."""
        return "; ".join(defect.words for defect in self.defects) or "exact"

    @model_validator(mode="after")
    def _has_one_of_each(self) -> EngineConfig:
        for kind in ("stale_weights", "partial_weights", "sampling_mismatch"):
            num = sum(defect.kind == kind for defect in self.defects)
            if num > 1:
                raise ValueError(f"defects: expected at most 1 {kind}, got {num}")
        return self
