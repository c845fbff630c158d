"""The `algorithm:` block: what a run optimises and how, in words that no engine and no model appears in.

It is the part of a configuration that moves from the sandbox to a cluster unchanged; `build()` turns it into
`theory.algorithm.Algorithm`, whose names and ranges it takes from `theory`, so that a new preset or correction needs no
line here. Papers: MiniRL (arXiv 2512.01374), R3 (2510.11370), Pr2 (2606.00395).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from lab.strict import Strict
from theory.advantages import ADVANTAGES
from theory.algorithm import Algorithm, OptimizerSettings
from theory.objectives import AGGREGATIONS, CORRECTIONS, PRESETS, RATIOS, Correction, Objective, correction, preset
from theory.objectives.presets import OVERRIDES
from theory.routing.passes import Mode
from theory.routing.predictor import PredictorSettings

_PREDICTOR = PredictorSettings()
_OPTIMIZER = OptimizerSettings()


class CorrectionBlock(Strict):
    """A correction of the engine gap by name, with its own parameters (cap, lo, hi, ...) beside the name.

    Bounds are on old/mu. verl's k1 bounds are on mu/old: its "a_b" is lo = 1/b, hi = 1/a (docs/objectives.md).
    """

    # The correction knows its parameters: `build` refuses any other, and any value out of range.
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]

    name: str = Field(
        description=f"one of {', '.join(CORRECTIONS)}; bounds are on old/mu (verl's k1 bounds: on mu/old, inverted)"
    )
    numerator: Literal["old", "pi"] = Field(default="old", description="the weight is built on old/mu, or on pi/mu")

    def build(self) -> Correction:
        """The correction; ValueError for an unknown name or parameter, or a value out of range."""
        return correction(self.name, numerator=self.numerator, **self.__pydantic_extra__)


class ObjectiveBlock(Strict):
    """A preset, and what is changed in it; null leaves the preset's own choice."""

    preset: str = Field(description=f"a named composition: {', '.join(PRESETS)}")
    eps_low: float | None = Field(default=None, gt=0, description="lower width of the trust region")
    eps_high: float | None = Field(default=None, gt=0, description="upper width of the trust region")
    delta_b: float | None = Field(
        default=None, ge=0, le=1, description="cppo: divergence a token that a prefix may spend"
    )
    w_min: float | None = Field(
        default=None, gt=0, le=1, description="cppo: weight of the last position, of 1 at the first"
    )
    cap: float | None = Field(default=None, gt=0, description="upper bound C of the preset's truncated correction")
    correction: CorrectionBlock | None = Field(default=None, description="another correction of the engine gap")
    advantage: str | None = Field(default=None, description=f"another advantage: {', '.join(ADVANTAGES)}")
    ratio: str | None = Field(default=None, description=f"another ratio: {', '.join(RATIOS)}")
    aggregation: str | None = Field(default=None, description=f"another aggregation: {', '.join(AGGREGATIONS)}")
    kl_coefficient: float = Field(default=0.0, ge=0, description="beta of the penalty KL(pi || ref)")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of that penalty")

    def build(self) -> Objective:
        """The objective; ValueError for an unknown name, and for a change that the preset has no use for."""
        names = [name for name in OVERRIDES if name != "correction" and getattr(self, name) is not None]
        changes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.correction is not None:
            changes["correction"] = self.correction.build()
        return preset(self.preset, **changes)

    @model_validator(mode="after")
    def _composes(self) -> ObjectiveBlock:
        self.build()
        return self


class PredictorBlock(Strict):
    """The route predictor of Pr2 and Pr3; the other modes have none."""

    learning_rate_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="its learning rate over the model's; null: 1e-3 over optimizer.learning_rate (Pr2 App. E.1: 5e1 to "
        "1e4 on 2.5e-7 to 2e-6)",
    )
    loss: Literal["kl", "delta"] = Field(
        default=_PREDICTOR.loss,
        description="kl: the predicted distribution (Pr2 Eq. 8); delta: the change of logits (App. G)",
    )
    num_positions: int = Field(
        default=_PREDICTOR.num_positions,
        ge=1,
        description="T_c: rows a response whose features are kept (Pr2 App. E.1)",
    )


class ReplayBlock(Strict):
    """Which pass routes how."""

    mode: Mode = Field(default="none", description="whose experts are replayed: none, R2 (old's), R3 (mu's), Pr2, Pr3")
    old_gates: Literal["predicted", "live"] = Field(
        default="predicted", description="gates of Pr2's old pass: the predicted ones (Pr2 Eq. 6), or the live ones"
    )
    predictor: PredictorBlock = Field(default_factory=PredictorBlock, description="the route predictor of Pr2 and Pr3")


class BatchBlock(Strict):
    """One global step is P prompts x G responses, split into N mini-batches; N is the degree of off-policiness."""

    num_prompts: int = Field(default=16, ge=1, description="P")
    num_responses: int = Field(default=8, ge=2, description="G, responses a prompt, whose rewards are compared")
    num_minibatches: int = Field(default=1, ge=1, description="N, updates a global step; 1 is on-policy. Must divide P")

    @model_validator(mode="after")
    def _splits_evenly(self) -> BatchBlock:
        if self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches: expected a divisor of num_prompts = {self.num_prompts}, got {self.num_minibatches}"
            )
        return self


class SamplingBlock(Strict):
    """How responses are drawn in the rollout."""

    max_tokens: int = Field(default=64, ge=1, description="longest response, in tokens, all its turns and observations")
    max_turns: int = Field(default=1, ge=1, description="turns of a response, where the task answers (calculator)")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="sampling temperature; log-probabilities and weights are those at 1: no metric sees another",
    )


class DynamicSamplingBlock(Strict):
    """DAPO's dynamic sampling: groups that are all right or all wrong are drawn again."""

    enabled: bool = Field(default=False, description="whether to draw again until P groups are mixed")
    max_rounds: int = Field(default=4, ge=2, description="draws of prompts a global step, at most")


class OptimizerBlock(Strict):
    """AdamW with linear warm-up to a constant rate; defaults of R3 (arXiv 2510.11370), Table 12."""

    learning_rate: float = Field(default=_OPTIMIZER.learning_rate, ge=0, description="rate after warm-up")
    betas: tuple[float, float] = Field(
        default=_OPTIMIZER.betas, description="decay rates of both moments, each in [0, 1)"
    )
    eps: float = Field(default=_OPTIMIZER.eps, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=_OPTIMIZER.weight_decay, ge=0, description="decoupled weight decay")
    warmup_steps: int = Field(default=_OPTIMIZER.warmup_steps, ge=0, description="updates of linear warm-up")
    max_grad_norm: float = Field(
        default=_OPTIMIZER.max_grad_norm, gt=0, description="global norm to which gradients are clipped"
    )

    @model_validator(mode="after")
    def _betas_decay(self) -> OptimizerBlock:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {list(self.betas)}")
        return self


class AlgorithmConfig(Strict):
    """The whole recipe."""

    objective: ObjectiveBlock = Field(description="what is maximised")
    replay: ReplayBlock = Field(default_factory=ReplayBlock, description="which pass routes how")
    batch: BatchBlock = Field(default_factory=BatchBlock, description="one global step")
    sampling: SamplingBlock = Field(default_factory=SamplingBlock, description="how responses are drawn")
    dynamic_sampling: DynamicSamplingBlock = Field(
        default_factory=DynamicSamplingBlock, description="drawing again where a group teaches nothing (DAPO)"
    )
    optimizer: OptimizerBlock = Field(default_factory=OptimizerBlock, description="AdamW")
    freeze_router: bool = Field(default=False, description="keep the router's weights as they are (R3 App. C)")
    label_noise: float | None = Field(
        default=None, gt=0, le=1, description="share of rewards R that the advantages see as 1 - R; metrics keep R"
    )

    def build(self) -> Algorithm:
        """The algorithm as the loop takes it; ValueError where the parts do not fit together."""
        return Algorithm(
            objective=self.objective.build(),
            mode=self.replay.mode,
            old_gates=self.replay.old_gates,
            predictor=self._predictor(),
            **self.batch.model_dump(),
            max_tokens=self.sampling.max_tokens,
            max_turns=self.sampling.max_turns,
            temperature=self.sampling.temperature,
            dynamic_sampling_rounds=self.dynamic_sampling.max_rounds if self.dynamic_sampling.enabled else 1,
            optimizer=OptimizerSettings(**self.optimizer.model_dump()),
            freeze_router=self.freeze_router,
            label_noise=self.label_noise or 0.0,
        )

    def _predictor(self) -> PredictorSettings:
        settings, rate = self.replay.predictor.model_dump(), self.optimizer.learning_rate
        if settings["learning_rate_multiplier"] is None:
            # AdamW moves each weight by about its rate: what is kept where the model's rate is another is the product.
            change = _OPTIMIZER.learning_rate / rate if rate > 0 else 1.0
            settings["learning_rate_multiplier"] = _PREDICTOR.learning_rate_multiplier * change
        return PredictorSettings(**settings)

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        self.build()
        return self
