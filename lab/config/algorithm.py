"""The `algorithm:` block: the objective of a run and its optimisation, without an engine or a model.

This part of a config moves from the sandbox to a cluster unchanged; `build()` turns it into
`theory.algorithm.Algorithm`. Names, defaults, ranges and descriptions follow from the dataclasses of `theory`, so that
a new preset or correction, or a new parameter of one, needs no line here. Papers: MiniRL (arXiv 2512.01374), R3
(2510.11370), Pr2 (2606.00395).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from lab.config.derive import Derived, derived
from lab.strict import Strict
from theory.advantages import ADVANTAGES
from theory.algorithm import Algorithm, BatchSettings, OptimizerSettings, Oversampling, SamplingSettings
from theory.fields import about
from theory.objectives import (
    AGGREGATIONS,
    CORRECTIONS,
    NUMBERS,
    OVERRIDES,
    PRESETS,
    RATIOS,
    Correction,
    Objective,
    correction,
    preset,
)  # fmt: skip
from theory.routing.passes import Mode
from theory.routing.predictor import PredictorSettings


class CorrectionBlock(Strict):
    """A correction of the engine gap by name, with its own parameters (cap, lo, hi, ...) beside the name.

    Bounds are on old/mu. verl's k1 bounds are on mu/old: its "a_b" is lo = 1/b, hi = 1/a (docs/objectives.md).
    """

    # Extra keys are allowed because the correction knows its parameters: `build` refuses any other. A cap of infinity
    # is an untruncated weight.
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)
    __pydantic_extra__: dict[str, float]

    name: str = Field(
        description=f"one of {', '.join(CORRECTIONS)}; bounds are on old/mu (verl's k1 bounds: on mu/old, inverted)"
    )
    numerator: Literal["old", "pi"] = Field(default="old", description="the weight is built on old/mu, or on pi/mu")

    def build(self) -> Correction:
        """The correction; ValueError for an unknown name or parameter, or a value out of range."""
        return correction(self.name, numerator=self.numerator, **self.__pydantic_extra__)


class _Preset(Strict):
    preset: str = Field(description=f"a named composition: {', '.join(PRESETS)}")


def _number(name: str) -> Any:
    """The field of an optional number; where one preset alone has it, its description begins with that preset."""
    having = [p for p, o in PRESETS.items() if name in about(type(o.trust_region)) | about(type(o.correction))]
    words = f"{having[0]}: {NUMBERS[name].words}" if len(having) == 1 else NUMBERS[name].words
    bounds: dict[str, Any] = NUMBERS[name].bounds
    # Infinity is a bound that never binds.
    return (float | None, Field(default=None, description=words, allow_inf_nan=True, **bounds))


# A type checker cannot follow create_model, and takes the base without the numbers.
if TYPE_CHECKING:
    _Numbers = _Preset
else:
    _Numbers = create_model("_Numbers", __base__=_Preset, **{name: _number(name) for name in NUMBERS})


class ObjectiveBlock(_Numbers):
    """A preset with changes; null keeps the preset's own choice."""

    correction: CorrectionBlock | None = Field(default=None, description="another correction of the engine gap")
    rejection: CorrectionBlock | None = Field(
        default=None, description="a further correction that only rejects, beside the weight (Geo-RS-Token-TIS)"
    )
    normalise_weights: bool | None = derived(Objective, "normalise_weights", default=None)
    advantage: str | None = Field(default=None, description=f"another advantage: {', '.join(ADVANTAGES)}")
    ratio: str | None = Field(default=None, description=f"another ratio: {', '.join(RATIOS)}")
    aggregation: str | None = Field(default=None, description=f"another aggregation: {', '.join(AGGREGATIONS)}")
    kl_coefficient: float = derived(Objective, "kl_coefficient")
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k3_is"] = derived(Objective, "kl_estimator")
    centering: Literal["none", "full", "top_k"] | None = derived(Objective, "centering", default=None)
    centering_k: int | None = derived(Objective, "centering_k", default=None)
    m2_budget: float | None = derived(Objective, "m2_budget", default=None)
    router_shift_floor: float | None = derived(Objective, "router_shift_floor", default=None)

    def build(self) -> Objective:
        """The objective; ValueError for an unknown name, or for a change that has no effect on the preset."""
        given = {name: getattr(self, name) for name in OVERRIDES if getattr(self, name) is not None}
        changes: dict[str, Any] = {
            name: value.build() if isinstance(value, CorrectionBlock) else value for name, value in given.items()
        }
        return preset(self.preset, **changes)

    @model_validator(mode="after")
    def _composes(self) -> ObjectiveBlock:
        self.build()
        return self


class PredictorBlock(Strict):
    """The route predictor of Pr2 and Pr3; the other modes have none."""

    learning_rate_multiplier: float | None = derived(PredictorSettings, "learning_rate_multiplier", default=None)
    loss: Literal["kl", "delta"] = derived(PredictorSettings, "loss")
    num_positions: int = derived(PredictorSettings, "num_positions")


class ReplayBlock(Strict):
    """Routing of each pass."""

    mode: Mode = derived(Algorithm, "mode")
    old_gates: Literal["predicted", "live"] = derived(Algorithm, "old_gates")
    predictor: PredictorBlock = Field(default_factory=PredictorBlock, description="the route predictor of Pr2 and Pr3")


class BatchBlock(Derived, BatchSettings):  # pyright: ignore[reportGeneralTypeIssues]
    """One global step: its prompts, responses and mini-batches."""

    # Newer than some runs: left out of dumps at its default, so that their hashes stay.
    shuffle: Literal["groups", "responses"] = derived(
        BatchSettings, "shuffle", exclude_if=lambda value: value == "groups"
    )


WHOLE = {"top_p": 1, "top_k": 0, "min_p": 0}
"""The settings by which engines truncate the sampling distribution, at the values that keep it whole."""


def refuse_truncation(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that truncates: old and pi would need the mask of the kept tokens."""
    for name, whole in WHOLE.items():
        # True equals 1 in Python, but is no setting.
        if name in given and (given[name] != whole or isinstance(given[name], bool)):
            raise ValueError(
                f"{name}: expected {whole} (the trainer scores the whole vocabulary, and no record has the mask of the "
                f"tokens that were left to sample from), got {given[name]}"
            )


class SamplingBlock(Derived, SamplingSettings):  # pyright: ignore[reportGeneralTypeIssues]
    """Sampling of responses in the rollout."""

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:
        # Before the fields: as an unknown key, the setting would be refused without this reason.
        if not isinstance(given, Mapping):
            return given
        refuse_truncation(given)
        # Left out, as they change nothing: the config has one hash with and without them.
        return {name: value for name, value in given.items() if name not in WHOLE}


class DynamicSamplingBlock(Strict):
    """DAPO's dynamic sampling: groups that are all right or all wrong are drawn again."""

    enabled: bool = Field(default=False, description="whether to draw again until P groups are mixed")
    max_rounds: int = Field(default=4, ge=2, description="draws of prompts per global step, at most")


class OversamplingBlock(Derived, Oversampling):  # pyright: ignore[reportGeneralTypeIssues]
    """More prompts are in progress than a step needs, and its rollout ends once enough groups are complete."""


class OptimizerBlock(Derived, OptimizerSettings):  # pyright: ignore[reportGeneralTypeIssues]
    """AdamW with linear warm-up to a constant rate; defaults of R3 (arXiv 2510.11370), Table 12."""


class AlgorithmConfig(Strict):
    """The whole recipe."""

    objective: ObjectiveBlock = Field(description="what is maximised")
    replay: ReplayBlock = Field(default_factory=ReplayBlock, description="the routing of each pass")
    batch: BatchBlock = Field(default_factory=BatchBlock, description="one global step")
    sampling: SamplingBlock = Field(default_factory=SamplingBlock, description="how responses are drawn")
    dynamic_sampling: DynamicSamplingBlock = Field(
        default_factory=DynamicSamplingBlock, description="drawing again for groups whose rewards are all equal (DAPO)"
    )
    optimizer: OptimizerBlock = Field(default_factory=OptimizerBlock, description="AdamW")
    freeze_router: bool = derived(Algorithm, "freeze_router")
    # Newer than some runs, so null by default, which `config_hash` omits.
    # 0 is refused where null means the same: one run would have two hashes.
    label_noise: float | None = derived(Algorithm, "label_noise", default=None, gt=0, ge=None)
    overlong_buffer: int | None = derived(Algorithm, "overlong_buffer", default=None, gt=0, ge=None)
    overlong_factor: float | None = derived(Algorithm, "overlong_factor", default=None)
    oversampling: OversamplingBlock | None = derived(Algorithm, "oversampling", default=None)

    def build(self) -> Algorithm:
        """The algorithm as the loop takes it; ValueError where the parts do not fit together."""
        return Algorithm(
            objective=self.objective.build(),
            mode=self.replay.mode,
            old_gates=self.replay.old_gates,
            predictor=self._predictor(),
            **self.batch.model_dump(),
            **self.sampling.model_dump(),
            dynamic_sampling_rounds=self.dynamic_sampling.max_rounds if self.dynamic_sampling.enabled else 1,
            optimizer=OptimizerSettings(**self.optimizer.model_dump()),
            freeze_router=self.freeze_router,
            label_noise=self.label_noise or 0.0,
            overlong_buffer=self.overlong_buffer or 0,
            overlong_factor=1.0 if self.overlong_factor is None else self.overlong_factor,
            oversampling=None if self.oversampling is None else Oversampling(**self.oversampling.model_dump()),
        )

    def _predictor(self) -> PredictorSettings:
        settings, rate = self.replay.predictor.model_dump(), self.optimizer.learning_rate
        if settings["learning_rate_multiplier"] is None:
            # AdamW moves a weight by about its rate, so the product of multiplier and model rate is kept constant.
            change = OptimizerSettings().learning_rate / rate if rate > 0 else 1.0
            settings["learning_rate_multiplier"] = PredictorSettings().learning_rate_multiplier * change
        return PredictorSettings(**settings)

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        if self.overlong_factor is not None and self.overlong_buffer is None:
            raise ValueError(
                f"overlong_factor: expected an overlong_buffer beside it, got {self.overlong_factor} alone"
            )
        self.build()
        return self
