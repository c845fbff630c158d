"""The plants of docs/doctor.md: engines with defects, historic bugs in code, damaged traces, each with its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lab.traces import Trace
from sandbox.engines import (
    ActivationPrecision,
    BlockPrecision,
    ExpertLayout,
    KVPrecision,
    LogitNoise,
    PartialWeights,
    ReductionOrder,
    RoutedScaling,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from tests.mutants.catalogue_capture import CAPTURE
from tests.pages import damage

MUTANTS = {mutant.name: mutant for mutant in CAPTURE}


@dataclass(frozen=True)
class Plant:
    """A planted fault: the cause that must be named, and how to plant it."""

    cause: str
    defect: Defect | None = None
    products: Literal["fp8_e4m3"] | None = None
    """The format of the trainer's products, if the engine does not share it."""
    mutant: str = ""
    then: tuple[Defect, ...] = ()
    """Further defects of the engine, after the first."""
    damage: Callable[[Trace], Trace] = field(default=lambda trace: trace)

    @property
    def defects(self) -> tuple[Defect, ...]:
        """All defects of the engine, in order."""
        return self.then if self.defect is None else (self.defect, *self.then)

    @property
    def is_format(self) -> bool:
        """Whether it is a format of blocks or of the trainer's products, which is counted separately."""
        return self.products is not None or isinstance(self.defect, BlockPrecision)


# The models that set the thresholds found that one step cannot show three: nvfp4, routers never arrive, and routed sum
# times 0.8.
PLANTS: dict[str, Plant] = {
    "exact engine": Plant("nothing"),
    "weights bf16": Plant("precision", WeightPrecision(format="bf16")),
    "weights int8": Plant("precision", WeightPrecision(format="int8")),
    "weights fp8": Plant("precision", WeightPrecision()),
    "weights fp8, blocks": Plant("precision", WeightPrecision(scale="block", block_size=32)),
    "activations bf16": Plant("precision", ActivationPrecision(format="bf16")),
    "activations fp8": Plant("precision", ActivationPrecision()),
    "fp8 blocks, ue8m0 scales": Plant("precision", BlockPrecision(format="fp8_ue8m0")),
    "mxfp8": Plant("precision", BlockPrecision()),
    "nvfp4": Plant("precision", BlockPrecision(format="nvfp4")),
    "trainer fp8": Plant("precision", products="fp8_e4m3"),
    "both fp8, the engine's from a bf16 export": Plant(
        "precision", WeightPrecision(format="bf16"), "fp8_e4m3", then=(WeightPrecision(), ActivationPrecision())
    ),
    "cache bf16": Plant("precision", KVPrecision(format="bf16")),
    "cache fp8": Plant("precision", KVPrecision()),
    "8 units, partial sums in bf16": Plant("precision", ReductionOrder(units=8, partials="bf16")),
    "logit noise 0.1": Plant("precision", LogitNoise(std=0.1)),
    "router noise 0.03": Plant("routing", RouterNoise(std=0.03)),
    "router noise 0.1": Plant("routing", RouterNoise(std=0.1)),
    "router noise 0.3": Plant("routing", RouterNoise(std=0.3)),
    "1 version behind": Plant("stale", StaleWeights(versions=1)),
    "2 versions behind": Plant("stale", StaleWeights(versions=2)),
    "4 versions behind": Plant("stale", StaleWeights(versions=4)),
    "4 behind, half new, cache recomputed": Plant(
        "switched", StaleWeights(versions=4, switch_at=0.5, cache="recomputed")
    ),
    "4 behind, half new, cache kept": Plant("switched", StaleWeights(versions=4, switch_at=0.5)),
    "nothing arrives": Plant("stale", PartialWeights()),
    "experts never arrive": Plant("stale", PartialWeights(missing="experts")),
    "attention never arrives": Plant("stale", PartialWeights(missing="attention")),
    "routers never arrive": Plant("stale", PartialWeights(missing="routers")),
    "experts one place on": Plant("wrong_weights", ExpertLayout()),
    "gate and up swapped": Plant("wrong_weights", ExpertLayout(moved="halves")),
    "routed sum times 0.4": Plant("wrong_weights", RoutedScaling()),
    "routed sum times 0.8": Plant("wrong_weights", RoutedScaling(factor=0.8)),
    "top-p 0.9, scored": Plant("mask", SamplingMismatch(top_p=0.9, score="processed")),
    "top-k 2, scored": Plant("mask", SamplingMismatch(top_k=2, score="processed")),
    "temperature 0.7, scored": Plant("temperature", SamplingMismatch(temperature=0.7, score="processed")),
    "temperature 1.3, scored": Plant("temperature", SamplingMismatch(temperature=1.3, score="processed")),
    "top-p 0.9": Plant("sampler_mask", SamplingMismatch(top_p=0.9)),
    "min-p 0.1": Plant("sampler_mask", SamplingMismatch(min_p=0.1)),
    "temperature 0.7": Plant("sampler_temperature", SamplingMismatch(temperature=0.7)),
    "log mu a token late": Plant("shifted", damage=damage.shifted_mu),
    "log old a token early, fp8": Plant("shifted", WeightPrecision(), damage=damage.shifted_old),
    "end token's log mu is 0": Plant("last_token", damage=damage.last_is_zero),
    "end token's log mu is 0, bf16": Plant("last_token", WeightPrecision(format="bf16"), damage=damage.last_is_zero),
    "half of log mu is 0, fp8": Plant("zero_padded", WeightPrecision(), damage=damage.zeros_after_a_half),
    "a tenth of log old is 0": Plant("zero_padded", damage=damage.zeros_here_and_there),
    "end tokens cut off": Plant("end_token", damage=damage.without_end),
    "log mu of other responses": Plant("unrelated", damage=damage.unrelated),
} | {
    name: Plant("route_record", mutant=name)
    for name in ("record_is_a_row_late", "decoding_repeats_the_prompts_route", "last_stage_overwrites_the_first")
}  # fmt: skip
