"""The sandbox's MoE as a kind of policy in an audit: its own passes, engine defects and replay modes, enumerated.

A case is a model (a seed), an engine, a replay mode and a reward; `problem` sets staleness by a step of the weights.
The engine is the discrepancy: it has no dial, so its effect on the policy is measured. Papers: MiniRL (arXiv
2512.01374) Table 1; R3 (2510.11370); Pr2 (2606.00395) Eq. 4-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from lab.audit.cases import Case, Cases, draw_reward, tree_keys
from lab.audit.config import AuditConfig, LinearPolicies, Policies, TabularPolicies
from lab.strict import Strict
from sandbox.engines import EngineConfig
from sandbox.exact.audit import (
    RoutedPolicy,
    RoutedProblem,
    moe_problem,
    moved,
    random_direction,
    router_drift,
    step_at,
    target_policy,
)
from sandbox.exact.routed_policy import check_one_policy
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from theory.contracts import Prompt
from theory.exact.problem import Problem, true_gradient
from theory.exact.tree import PrefixTree
from theory.routing.passes import MODES, PASSES, Mode
from theory.streams import stream

PROMPT = Prompt("audit", (0,), answer="")
"""The prompt of every response, one token long."""


class MoeModel(Strict):
    """A decoder small enough for one backward per edge."""

    hidden_size: int = Field(default=8, ge=2, le=128, description="width D of the residual stream")
    num_layers: int = Field(default=2, ge=1, le=8, description="decoder layers, each with experts")
    num_heads: int = Field(default=2, ge=1, le=64, description="query heads")
    num_kv_heads: int = Field(default=1, ge=1, le=64, description="key and value heads")
    head_dim: int = Field(default=4, ge=2, le=128, description="width of one head")
    num_experts: int = Field(default=4, ge=1, le=128, description="experts E per layer")
    experts_per_token: int = Field(default=2, ge=1, description="slots K")
    expert_size: int = Field(default=8, ge=1, le=128, description="hidden width F of one expert")

    def build(self, num_tokens: int, max_length: int, generator: torch.Generator) -> MoE:
        """A model with random weights, in float64; ValueError for sizes that do not fit together."""
        # One more position for a prompt of one token; flow.py, whose prompts have two, adds the second to `max_length`.
        sizes = ModelConfig(vocab_size=num_tokens, max_positions=max_length + 1, **self.model_dump())
        return MoE(sizes, generator).to(torch.float64)


def _one_policy(engine: EngineConfig) -> EngineConfig:
    check_one_policy(engine, "staleness.token_kl")
    return engine


class MoePolicies(Policies):
    """MoE models with random weights, under inference engines and replay modes."""

    kind: Literal["moe"] = "moe"
    model: MoeModel = Field(default_factory=MoeModel, description="sizes of the model")
    engines: dict[str, Annotated[EngineConfig, AfterValidator(_one_policy)]] = Field(
        min_length=1, description="label to inference engine, as in a run's config"
    )
    modes: tuple[Mode, ...] = Field(default=MODES, min_length=1, description="routing replay")

    @property
    def label(self) -> str:
        """The name of these policies in tables."""
        return f"moe, {self.num_tokens} tokens" + (" with an end" if self.has_end else "")

    @model_validator(mode="after")
    def _model_fits(self) -> MoePolicies:
        self.model.build(self.num_tokens, max(self.lengths), torch.Generator())
        return self


class SandboxAudit(AuditConfig):
    """An audit that may hold policies of kind moe."""

    backend: Literal["sandbox"] = "sandbox"
    policies: tuple[Annotated[TabularPolicies | LinearPolicies | MoePolicies, Field(discriminator="kind")], ...] = (
        Field(min_length=1, description="whose gradients are audited")
    )


def moe_cases(config: AuditConfig, block: MoePolicies) -> Cases:
    """A case per engine and mode of each model, with rewards of its own seed; `discrepancy` is not used."""
    levels = [(math.inf, s) for s in config.staleness.token_kl]
    labels = [objective.name for objective in config.objectives_of(block)]

    def each() -> Iterator[Case]:
        for tree in block.trees():
            for seed in range(block.seeds):
                for reward in config.rewards:
                    world = _World(config, block, tree, seed, reward)
                    for engine in block.engines:
                        for mode in block.modes:
                            keys = {"policy": block.label, "kind": "moe"} | tree_keys(tree)
                            keys |= {"seed": seed, "reward": reward, "engine": engine, "mode": mode}
                            yield Case(keys, levels, labels, world.problems(engine, mode))

    per_model = len(config.rewards) * len(block.engines) * len(block.modes)
    return Cases(len(block.lengths) * block.seeds * per_model, each())


@dataclass
class _World:
    """One model with one reward; the parts that its engines and modes share are computed once."""

    config: AuditConfig
    block: MoePolicies
    tree: PrefixTree
    seed: int
    reward: str
    _steps: dict[float, Tensor] = field(default_factory=dict)
    _targets: dict[float, RoutedPolicy] = field(default_factory=dict)
    _problems: dict[tuple[str, Mode, float], RoutedProblem] = field(default_factory=dict)

    def _stream(self, *names: str) -> torch.Generator:
        return stream(self.config.seed, "audit", *names, self.block.label, self.tree.max_length, self.seed)

    @cached_property
    def model(self) -> MoE:
        return self.block.model.build(self.block.num_tokens, self.tree.max_length, self._stream("policy"))

    @cached_property
    def reward_Y(self) -> Float[Tensor, " Y"]:
        return draw_reward(self.config, self.tree, self.reward, self._stream("reward", self.reward))

    @cached_property
    def direction_Q(self) -> Float[Tensor, " Q"]:
        """The direction in which the weights move, with about the length of a random one."""
        if self.config.staleness.direction == "random":
            return random_direction(self.model, self._stream("learner"))
        policy = target_policy(self.model, self.tree, PROMPT)
        gradient_Q = true_gradient(Problem(policy, policy.logp(), policy.logp(), self.reward_Y))
        # As long as a standard normal vector, so that both directions have comparable steps.
        return gradient_Q * math.sqrt(len(gradient_Q)) / gradient_Q.norm()

    def step(self, staleness: float) -> Float[Tensor, " Q"]:
        if staleness not in self._steps:
            self._steps[staleness] = step_at(self.model, self.direction_Q, self.tree, PROMPT, staleness)
        return self._steps[staleness]

    def target(self, staleness: float) -> RoutedPolicy:
        if staleness not in self._targets:
            now = moved(self.model, self.step(staleness))
            self._targets[staleness] = target_policy(now, self.tree, PROMPT)
        return self._targets[staleness]

    def problems(self, engine: str, mode: Mode) -> Callable[[float, float], Problem]:
        """The problem as a function of discrepancy (inf: that engine, 0: the exact one) and staleness."""

        def problem(discrepancy: float, staleness: float) -> Problem:
            name = "exact" if discrepancy == 0 else engine
            # The prefix separates an engine that the config calls `exact` from the exact one.
            key = (name if discrepancy == 0 else f"engine {name}", mode, staleness)
            if key not in self._problems:
                defects = EngineConfig() if discrepancy == 0 else self.block.engines[engine]
                self._problems[key] = self._problem(defects, mode, staleness)
            return self._problems[key]

        return problem

    def _problem(self, engine: EngineConfig, mode: Mode, staleness: float) -> RoutedProblem:
        step_Q = self.step(staleness)
        predictor = router_drift(self.model, step_Q) if PASSES[mode].trains_predictor else None
        return moe_problem(
            self.model, engine, mode, self.tree, PROMPT, self.reward_Y, step_Q=step_Q, predictor=predictor,
            # An engine's noise under seed 0 of an audit is that of the policy's index alone.
            seed=(self.config.seed << 32) + self.seed, target=self.target(staleness),
        )  # fmt: skip


__all__ = ["MoeModel", "MoePolicies", "SandboxAudit", "moe_cases"]
