"""Simulated inference engines: the exact one plus named defects. A new defect is one file and one row in `Defects`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lab.config.strict import Strict
from sandbox.engines.activation_precision import ActivationPrecision
from sandbox.engines.router_noise import RouterNoise
from sandbox.engines.weight_precision import WeightPrecision

Defects = Annotated[WeightPrecision | ActivationPrecision | RouterNoise, Field(discriminator="kind")]


class EngineConfig(Strict):
    """The inference engine: the training engine's own maths, plus these defects in order. None gives `exact`."""

    defects: tuple[Defects, ...] = Field(
        default=(), description="departures from the training engine; none: the exact engine"
    )
