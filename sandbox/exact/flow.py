"""The sandbox's MoE in `firstorder flow`: its problems, its engines as errors, and a replay mode per objective.

A context is a prompt of two tokens: the prompt's number, and the opening that the environment drew.
Papers: MiniRL (arXiv 2512.01374) Table 1; R3 (2510.11370); Pr2 (2606.00395).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, field_validator, model_validator

from lab.flow.config import ErrorBlock, FlowConfig, FlowObjective, ProblemsBlock, TrainingBlock
from lab.flow.run import World, task_of
from lab.strict import Strict
from sandbox.engines import EngineConfig
from sandbox.exact.cases import MoeModel
from sandbox.exact.routed_policy import check_one_policy
from sandbox.exact.routed_training import PREDICTOR_RATE, MoeEngine, MoePolicy
from theory.contracts import Prompt
from theory.exact.engines import MovablePolicy
from theory.exact.trajectory import ExactTask
from theory.routing.passes import MODES, Mode
from theory.streams import derive_seed, stream


class MoeBlock(Strict):
    """A first policy: an MoE with random weights, in float64."""

    kind: Literal["moe"] = Field(default="moe", description="a decoder with experts in every layer")
    model: MoeModel = Field(default_factory=MoeModel, description="sizes of the model")
    init_scale: float = Field(
        default=1.0, gt=0, description="factor on the output matrix, which sets the logits' scale"
    )


class MoeProblems(ProblemsBlock):
    """Random problems whose first policies are MoE models."""

    policy: MoeBlock = Field(default_factory=MoeBlock, description="the first policy")  # pyright: ignore

    @model_validator(mode="after")
    def _tokens_name_contexts(self) -> MoeProblems:
        for name in ("prompts", "openings"):
            if getattr(self, name) > self.num_tokens:
                raise ValueError(
                    f"{name}: expected at most num_tokens ({self.num_tokens}), as a token names each, got "
                    f"{getattr(self, name)}"
                )
        return self


class EngineError(ErrorBlock):
    """An engine with defects, with a name and a number for tables."""

    engine: EngineConfig = Field(default_factory=EngineConfig, description="as in a run's config; none: exact")
    kind: str = Field(description="name of the error; `exact` for an engine without defects")

    @field_validator("engine")
    @classmethod
    def _is_one_policy(cls, engine: EngineConfig) -> EngineConfig:
        check_one_policy(engine, "training.lag")
        return engine

    @model_validator(mode="after")
    def _has_one_dial(self) -> EngineError:
        """Checks that an engine has the dials of its defects only; `scale` is the one that tables show."""
        if self.token_kl is not None:
            raise ValueError(
                f"{self.kind}: expected the engine's defects, got token_kl: an engine is not set by its KL"
            )
        if (self.kind == "exact") != (not self.engine.defects):
            raise ValueError(f"{self.kind}: expected the name exact if and only if there are no defects")
        if (self.kind == "exact") != (self.scale is None):
            wanted = "no scale" if self.kind == "exact" else "scale, the number that tables show"
            raise ValueError(f"{self.kind}: expected {wanted}, got {self.scale}")
        return self


class MoeObjective(FlowObjective):
    """An objective under a replay mode."""

    mode: Mode = Field(default="none", description=f"routing replay, one of {', '.join(MODES)}")


class MoeTraining(TrainingBlock):
    """The training of every run; the variance, which takes one gradient per response, is optional."""

    variance: bool = Field(default=False, description="whether rows have the variance (slow)")
    num_draws: int = Field(default=2, ge=1, description="fixed draws of an engine's noise; each gives its own mu")
    predictor_rate: float = Field(
        default=PREDICTOR_RATE, gt=0, description="learning rate of Pr2's and Pr3's predictor"
    )


class SandboxFlow(FlowConfig):
    """A flow of MoE policies."""

    backend: Literal["sandbox"] = "sandbox"
    problems: MoeProblems = Field(default_factory=MoeProblems, description="the problems to train on")
    errors: tuple[EngineError, ...] = Field(min_length=1, description="the engines that sample")
    objectives: tuple[MoeObjective, ...] = Field(min_length=1, description="the remedies to compare")
    training: MoeTraining = Field(default_factory=MoeTraining, description="optimizer, updates, groups, draws")

    @model_validator(mode="after")
    def _draws_are_scored(self) -> SandboxFlow:
        for number, error in enumerate(self.errors):
            try:
                check_one_policy(error.engine, "training.lag", self.training.temperature)
            except ValueError as wrong:
                raise ValueError(
                    f"errors.{number}.engine.{wrong} at training.temperature {self.training.temperature:g}"
                ) from wrong
        return self


def moe_problem_of(config: FlowConfig, number: int) -> tuple[ExactTask, MovablePolicy]:
    """The contexts and rewards of one problem, and its first policy."""
    assert isinstance(config, SandboxFlow), f"a flow of the sandbox, got {type(config).__name__}"
    block, generator = config.problems, stream(config.seed, "flow", "problem", number)
    # One generator, in this order: rewards before weights. Another order would give every seed other problems.
    task = task_of(config, generator)
    # Positions: the second token of the prompt, and `length` for the responses.
    model = block.policy.model.build(block.num_tokens, block.length + 1, generator)
    assert model.head is not None, "an output matrix of its own"
    with torch.no_grad():
        model.head.mul_(block.policy.init_scale)
    prompts = [
        Prompt(f"{prompt}, {opening}", (prompt, opening), answer="")
        for prompt in range(block.prompts)
        for opening in range(block.openings)
    ]
    return task, MoePolicy.of(task.forest, model, prompts, config.training.temperature)


def moe_engine_of(
    config: FlowConfig, number: int, error: ErrorBlock, objective: FlowObjective, first: MovablePolicy
) -> MoeEngine:
    """The engine of one run; its draws are the same for every objective and scale."""
    assert isinstance(config, SandboxFlow) and isinstance(error, EngineError) and isinstance(objective, MoeObjective)
    seed = derive_seed(config.seed, "flow", "engine", number, error.kind)
    # An engine without defects draws nothing: one mu is enough.
    num_draws = config.training.num_draws if error.engine.defects else 1
    return MoeEngine(error.engine, objective.mode, num_draws, seed, config.training.predictor_rate)


MOE = World(moe_problem_of, moe_engine_of)
"""An MoE under its engines and replay modes."""

__all__ = ["MOE", "EngineError", "MoeBlock", "MoeObjective", "MoeProblems", "MoeTraining", "SandboxFlow"]
