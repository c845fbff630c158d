"""The frozen description of what a run optimises and how: the part of a config that moves between worlds unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

from theory.fields import About, require_ranges
from theory.objectives import Objective
from theory.routing.passes import IN_WORDS, MODES, PASSES, Mode, ModePlan
from theory.routing.predictor import PredictorSettings

COMPARED_ROWS = 2**16
"""Rows of a batch whose router logits are kept for metrics alone, where no predictor learns from them. A row of
Qwen3-30B takes 24 KiB: 2,048 rows of each of 1,024 responses would be 52 GB a pass."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, linear warm-up to a constant rate, clipping by global norm; defaults of R3 (arXiv 2510.11370) Tab. 12."""

    learning_rate: Annotated[float, About("rate after warm-up", ge=0)] = 1e-6
    betas: Annotated[tuple[float, float], About("decay rates of both moments, each in [0, 1)")] = (0.9, 0.999)
    eps: Annotated[float, About("added to the root of the second moment", gt=0)] = 1e-8
    weight_decay: Annotated[float, About("decoupled weight decay", ge=0)] = 0.1
    warmup_steps: Annotated[int, About("updates of linear warm-up", ge=0)] = 0
    max_grad_norm: Annotated[float, About("global norm to which gradients are clipped", gt=0)] = 1.0

    def __post_init__(self) -> None:
        require_ranges(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {list(self.betas)}")

    def rate_at(self, num_updates: int) -> float:
        """The learning rate of the update after `num_updates` updates: linear from rate / warmup_steps to the rate."""
        if self.warmup_steps == 0:
            return self.learning_rate
        # + 1: the first update already moves the weights.
        return self.learning_rate * min(1.0, (num_updates + 1) / self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """One global step is P prompts x G responses, split into N mini-batches; N is the degree of off-policiness."""

    num_prompts: Annotated[int, About("P", ge=1)] = 16
    num_responses: Annotated[int, About("G, responses per prompt, whose rewards are compared", ge=2)] = 8
    num_minibatches: Annotated[int, About("N, updates per global step; 1 is on-policy. Must divide P", ge=1)] = 1
    shuffle: Annotated[
        Literal["groups", "responses"],
        About("cut a rollout into mini-batches after shuffling whole groups, or single responses (as TRL does)"),
    ] = "groups"

    def __post_init__(self) -> None:
        require_ranges(self)
        # theory/loop.py::split cuts P // N groups at a time: a remainder would be sampled and never trained on.
        if self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches: expected a divisor of num_prompts = {self.num_prompts}, got {self.num_minibatches}"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling of responses in the rollout."""

    max_tokens: Annotated[int, About("longest response in tokens, with all its turns and observations", ge=1)] = 64
    max_turns: Annotated[int, About("most turns of a response, for a task that answers (calculator)", ge=1)] = 1
    temperature: Annotated[
        float, About("T; tokens are drawn from the policy of logits / T, which all passes score", gt=0)
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class Oversampling:
    """More prompts than P are in progress, and a step's rollout ends once P groups have all their responses.

    The others are given up (DAPO's over-sampling), or kept: the next step's weights continue them (partial rollouts, as
    in Kimi k1.5, arXiv 2501.12599, sec. 2.6.2).
    """

    extra_prompts: Annotated[int, About("prompts in progress beyond num_prompts", ge=1)]
    unfinished: Annotated[
        Literal["drop", "keep"],
        About(
            "responses that are not complete when the step's batch is: drop them (the batch then has too few long "
            "ones), or keep them, and continue with the next weights; a step's own rounds of dynamic sampling continue "
            "them in either case"
        ),
    ] = "keep"
    max_staleness: Annotated[
        int, About("weight versions that a kept response's oldest token may lag when trained on; beyond: dropped", ge=1)
    ] = 1

    def __post_init__(self) -> None:
        require_ranges(self)


@dataclass(frozen=True)
class Algorithm(SamplingSettings, BatchSettings):
    """One RL recipe: P prompts x G responses per global step, N mini-batches, an objective and a routing-replay mode.

    `dynamic_sampling_rounds` bounds how often prompts are drawn to fill P groups with mixed rewards; 1 keeps every
    group (no dynamic sampling). `max_tokens` bounds everything after a prompt, `max_turns` the turns that mu takes in
    it (1 for a task without turns). `old_gates` chooses Pr2's old-pass gates: Eq. 6's predicted ones, or the live ones.
    `label_noise` is the share of rewards in [0, 1] that the advantages see as 1 - R; `overlong_buffer` and
    `overlong_factor` set the length penalty that they see (DAPO Eq. 13). Metrics and records keep R.
    """

    objective: Objective
    mode: Annotated[str, About(f"whose experts are replayed: {IN_WORDS}")] = "none"
    old_gates: Annotated[
        Literal["predicted", "live"], About("gates of Pr2's old pass: the predicted ones (Pr2 Eq. 6), or the live ones")
    ] = "predicted"
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    dynamic_sampling_rounds: int = 1
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    freeze_router: Annotated[bool, About("keep the router's weights as they are (R3 App. C)")] = False
    label_noise: Annotated[
        float, About("share of rewards R that the advantages see as 1 - R; metrics keep R", ge=0, le=1)
    ] = 0.0

    overlong_buffer: Annotated[
        int,
        About("tokens before max_tokens over which the advantages' length penalty grows (DAPO); 0: none", ge=0),
    ] = 0
    overlong_factor: Annotated[float, About("length penalty at max_tokens, in units of reward", gt=0)] = 1.0
    oversampling: Annotated[
        Oversampling | None,
        About(
            "more prompts than a step needs, and an early end of its rollout: extra_prompts, unfinished (keep or "
            "drop), max_staleness; null: none"
        ),
    ] = None

    def __post_init__(self) -> None:
        # BatchSettings', whose `require_ranges` checks the fields of this class as well.
        super().__post_init__()
        if self.overlong_buffer > self.max_tokens:
            raise ValueError(
                f"overlong_buffer: expected at most max_tokens = {self.max_tokens}, got {self.overlong_buffer}"
            )
        # Before the checks that read `passes`, which looks the mode up.
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        if self.dynamic_sampling_rounds < 1:
            raise ValueError(f"dynamic_sampling_rounds: expected at least 1, got {self.dynamic_sampling_rounds}")
        if self.label_noise and self.dynamic_sampling_rounds > 1:
            raise ValueError("label_noise: expected 0 beside dynamic sampling, which compares true rewards")
        if self.freeze_router and self.passes.trains_predictor:
            raise ValueError(f"freeze_router leaves {self.mode}'s predictor nothing to predict")
        self._check_oversampling()

    def _check_oversampling(self) -> None:
        if self.oversampling is None:
            return
        if self.max_turns > 1:
            raise ValueError(
                f"oversampling: expected none where max_turns is above 1 (an engine cannot tell whether a turn is the "
                f"last), got {self.oversampling.extra_prompts} extra prompts and max_turns = {self.max_turns}"
            )
        if self.oversampling.unfinished == "keep" and self.passes.rollout == "predicted":
            raise ValueError(
                f"oversampling.unfinished: expected drop under {self.mode} (mu's router logits hold the predictor of "
                f"one version), got keep"
            )

    @property
    def passes(self) -> ModePlan:
        """The routing of each pass under this mode."""
        return PASSES[cast("Mode", self.mode)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Settings of this recipe without effect: for the start of a run, a line each that names the field."""
        if not self.passes.trains_predictor or self.num_minibatches > 1:
            return ()
        plain = self.mode.replace("Pr", "R")
        return (
            f"batch.num_minibatches: with 1 {self.mode} is {plain}: its predictor learns from a rollout's second "
            f"mini-batch on, and stays zero",
        )

    def num_feature_rows(self, num_responses: int) -> int:
        """Rows of each response whose router logits are kept: the predictor's T_c, or in modes without one at most T_c
        and `COMPARED_ROWS` of a batch of `num_responses` (one of each, if there are more responses)."""
        T_c = self.predictor.num_positions
        return T_c if self.passes.trains_predictor else min(T_c, max(1, COMPARED_ROWS // num_responses))
