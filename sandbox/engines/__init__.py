"""Simulated inference engines: the exact one plus named defects. A new defect is a new file in this folder.

Its class states everything about it: its dials and words, the links that it breaks, its rows of the defect table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field, model_validator

from lab.strict import Strict, kinds_in
from sandbox.engines.activation_precision import ActivationPrecision
from sandbox.engines.block_precision import BlockPrecision
from sandbox.engines.defect import Defect
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

KINDS: tuple[type[Defect], ...] = tuple(
    sorted(kinds_in(__name__, Defect), key=lambda kind: (kind.place, kind.__name__))
)
"""Every kind of defect, in the order of the config's schema and of the defect table."""

if TYPE_CHECKING:
    AnyDefect = Defect
else:
    # pydantic picks the member by its `kind`; type checkers cannot follow a union that is made at run time.
    AnyDefect = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007


class EngineConfig(Strict):
    """The inference engine: the training engine's own maths plus these defects, in order; `exact` without defects."""

    defects: tuple[AnyDefect, ...] = Field(
        default=(), description="departures from the training engine; none: the exact engine"
    )
    prefix_cache: bool = Field(
        default=True, description="a response's later turns reuse the KV cache and the routes of its earlier ones"
    )

    @property
    def words(self) -> str:
        """The engine's name in reports: its defects in order, or `exact`."""
        return "; ".join(defect.words for defect in self.defects) or "exact"

    @model_validator(mode="after")
    def _has_one_of_each(self) -> EngineConfig:
        for kind in KINDS:
            num = sum(isinstance(defect, kind) for defect in self.defects)
            if kind.at_most_one and num > 1:
                raise ValueError(f"defects: expected at most 1 {kind.model_fields['kind'].default}, got {num}")
        return self


__all__ = [
    "KINDS", "ActivationPrecision", "BlockPrecision", "EngineConfig", "ExpertLayout", "KVPrecision", "LogitNoise",
    "PartialWeights", "ReductionOrder", "RoutedScaling", "RouterNoise", "SamplingMismatch", "StaleWeights",
    "WeightPrecision",
]  # fmt: skip
