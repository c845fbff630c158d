"""The frozen description of what a run optimises and how: the part of a config that moves between worlds unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from theory.objectives import Objective
from theory.routing.passes import MODES, PASSES, Mode, Passes
from theory.routing.predictor import PredictorSettings


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, linear warm-up to a constant rate, clipping by global norm; defaults of R3 (arXiv 2510.11370) Tab. 12."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    max_grad_norm: float = 1.0

    def rate_at(self, num_updates: int) -> float:
        """The learning rate of the update after `num_updates` updates: linear from rate / warmup_steps to the rate."""
        if self.warmup_steps == 0:
            return self.learning_rate
        return self.learning_rate * min(1.0, (num_updates + 1) / self.warmup_steps)


@dataclass(frozen=True)
class Algorithm:
    """One RL recipe: P prompts x G responses a global step, N mini-batches, an objective and a routing-replay mode.

    `dynamic_sampling_rounds` is how many times prompts may be drawn to fill P groups with mixed rewards; 1 keeps every
    group (no dynamic sampling). `max_tokens` bounds all that follows a prompt, `max_turns` how often mu speaks in it
    (a task without turns: once). `old_gates` chooses Pr2's old-pass gates: Eq. 6's predicted ones, or the live ones.
    `label_noise` is the share of rewards in [0, 1] that the advantages see as 1 - R; metrics and records keep R.
    """

    objective: Objective
    mode: str = "none"
    old_gates: Literal["predicted", "live"] = "predicted"
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    num_prompts: int = 16
    num_responses: int = 8
    num_minibatches: int = 1
    max_tokens: int = 64
    max_turns: int = 1
    temperature: float = 1.0
    dynamic_sampling_rounds: int = 1
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    freeze_router: bool = False
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns: expected at least 1, got {self.max_turns}")
        if self.num_responses < 2:
            raise ValueError(f"num_responses: expected at least 2, whose rewards compare, got {self.num_responses}")
        if self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches must divide num_prompts, got {self.num_minibatches} and {self.num_prompts}"
            )
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise: expected a share in [0, 1], got {self.label_noise}")
        if self.label_noise and self.dynamic_sampling_rounds > 1:
            raise ValueError("label_noise: expected 0 beside dynamic sampling, which looks at true rewards")
        if self.freeze_router and self.passes.trains_predictor:
            raise ValueError(f"freeze_router leaves {self.mode}'s predictor nothing to predict")

    @property
    def passes(self) -> Passes:
        """Which pass routes how under this mode."""
        return PASSES[cast("Mode", self.mode)]
