"""The config of a flow: a run per problem, engine error, objective, updates per rollout (N) and batch size (B).

Paper: MiniRL (arXiv 2512.01374) Eq. 5, whose two gaps are the errors and N.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from lab.audit.config import AuditObjective, GroupBlock, Positive, StudySchemas, require_known
from lab.config.load import load
from lab.strict import Strict
from theory.exact.engines import BY_SCALE, ERRORS
from theory.exact.forest import Forest
from theory.exact.levels import REWARDS
from theory.exact.networks import NetworkPolicy, placed
from theory.exact.policies import LinearPolicy, TabularPolicy
from theory.exact.training import OPTIMIZERS, Settings
from theory.exact.tree import PrefixTree
from theory.names import unknown_name

Count = Annotated[int, Field(ge=1)]
BatchSize = Annotated[float, Field(gt=0, allow_inf_nan=True)]


class PolicyBlock(Strict):
    """A random first policy. `backend: sandbox` also has the kind moe (sandbox/exact/flow.py)."""

    kind: Literal["network", "linear", "tabular"] = Field(
        default="network", description="one hidden layer, a linear map of the prefix, or free logits at every node"
    )
    scale: Positive = Field(default=1.0, description="standard deviation of its logits, or parameters if linear")

    def draw(
        self, forest: Forest, generator: torch.Generator, temperature: float
    ) -> NetworkPolicy | LinearPolicy | TabularPolicy:
        """The policy."""
        if self.kind == "linear":
            return LinearPolicy.random(forest, generator, self.scale, placed, temperature)
        kind = NetworkPolicy if self.kind == "network" else TabularPolicy
        return kind.random(forest, generator, self.scale, temperature=temperature)


class ProblemsBlock(Strict):
    """Random problems: prompts with openings that the environment draws, rewards, and a first policy each."""

    count: int = Field(
        default=4, ge=1, le=10**5, description="problems: first policies, rewards and errors of their own"
    )
    num_tokens: int = Field(default=3, ge=2, description="tokens of the vocabulary, the end token included")
    length: int = Field(default=4, ge=1, description="tokens that the policy generates, at most")
    has_end: bool = Field(default=False, description="whether the last token ends a response (ragged lengths)")
    prompts: int = Field(default=3, ge=1, description="prompts, each as likely as any other")
    openings: int = Field(default=3, ge=1, description="first tokens of each prompt, drawn by the environment")
    lost: int = Field(default=2, ge=0, description="openings of each prompt after which nothing earns a reward")
    reward: str = Field(default="sparse", description=f"of the other contexts, one of {', '.join(REWARDS)}")
    policy: PolicyBlock = Field(default_factory=PolicyBlock, description="the first policy")

    @model_validator(mode="after")
    def _exists(self) -> ProblemsBlock:
        if self.reward not in REWARDS:
            raise unknown_name("reward", self.reward, REWARDS)
        if self.lost >= self.openings:
            raise ValueError(f"lost: expected fewer than openings ({self.openings}), got {self.lost}")
        self.forest()
        return self

    def forest(self) -> Forest:
        """The contexts and their responses; ValueError for more than can be enumerated."""
        return Forest.uniform(PrefixTree(self.num_tokens, self.length, self.has_end), self.prompts, self.openings)


class ErrorBlock(Strict):
    """An engine error, by its KL at the start, or by its scale (top_p, rounded and floating by scale alone)."""

    kind: str = Field(description=f"exact, or one of {', '.join(ERRORS)}")
    token_kl: float | None = Field(default=None, gt=0, description="KL(mu || pi) of the first policy, nats per token")
    scale: float | None = Field(default=None, gt=0, description="the dial itself")

    @model_validator(mode="after")
    def _has_one_dial(self) -> ErrorBlock:
        if self.kind != "exact" and self.kind not in ERRORS:
            raise unknown_name("kind", self.kind, ("exact", *ERRORS))
        given = [name for name in ("token_kl", "scale") if getattr(self, name) is not None]
        if len(given) != (self.kind != "exact"):
            wanted = "neither token_kl nor scale" if self.kind == "exact" else "one of token_kl and scale"
            raise ValueError(f"{self.kind}: expected {wanted}, got {' and '.join(given) or 'neither'}")
        if self.kind in BY_SCALE and self.scale is None:
            raise ValueError(f"{self.kind}: expected scale, got token_kl: its KL jumps as tokens or weights change")
        return self

    @property
    def label(self) -> str:
        """The error's name in tables."""
        if self.kind == "exact":
            return "exact"
        return f"{self.kind}, KL {self.token_kl:g}" if self.scale is None else f"{self.kind}, scale {self.scale:g}"

    @property
    def level(self) -> float:
        """The dial's value, the number on the gap's axis; 0 for an exact engine."""
        return (self.token_kl or 0.0) if self.scale is None else self.scale


class FlowObjective(AuditObjective):
    """An objective, with the score centred under mu or not."""

    centred: bool = Field(default=False, description="take the drift off every update (arXiv 2609.20807)")


class TrainingBlock(Strict):
    """The training of every run."""

    optimizer: str = Field(default="adam", description=f"one of {', '.join(OPTIMIZERS)}")
    rate: float = Field(default=1e-2, gt=0, description="learning rate; of a flow, units of time per update")
    num_updates: int = Field(default=200, ge=1, le=10**7, description="updates of a run")
    temperature: Positive = Field(default=1.0, description="pi and mu are the policies of logits / T, as in a run")
    lag: int = Field(default=0, ge=0, le=10**7, description="updates by which the weights of the engine are older")
    group: GroupBlock = Field(default_factory=GroupBlock, description="how advantages arise")
    observe_every: int = Field(default=10, ge=1, description="updates between two rows of the dataframe")
    variance: bool = Field(default=True, description="whether rows have the variance (of an MoE: slow)")


class FlowConfig(Strict):
    """One study by exact training. `backend` decides the kinds of policies and engine errors."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$", description="the records' folder is <output>/<name>/<time>-<hash>"
    )
    seed: int = Field(default=0, ge=0, description="root of every named random stream")
    backend: str = Field(default="exact", description="exact, or sandbox for an MoE, its engines and replay modes")
    problems: ProblemsBlock = Field(default_factory=ProblemsBlock, description="what is trained on")
    errors: tuple[ErrorBlock, ...] = Field(min_length=1, description="engines that sample")
    objectives: tuple[FlowObjective, ...] = Field(min_length=1, description="remedies that are compared")
    num_minibatches: tuple[Count, ...] = Field(default=(1,), min_length=1, description="N, updates per rollout")
    batch_sizes: tuple[BatchSize, ...] = Field(
        default=(math.inf,), min_length=1, description="B, responses whose Gaussian noise an update has; .inf for none"
    )
    training: TrainingBlock = Field(default_factory=TrainingBlock, description="optimizer, updates, groups")
    output: str = Field(default="runs", min_length=1, description="folder of all record folders")

    @model_validator(mode="after")
    def _cells_exist(self) -> FlowConfig:
        for field, names in (
            ("objectives", [one.name for one in self.objectives]),
            ("errors", [one.label for one in self.errors]),
            ("num_minibatches", [str(n) for n in self.num_minibatches]),
            ("batch_sizes", [str(size) for size in self.batch_sizes]),
        ):
            for name, count in Counter(names).items():
                if count > 1:
                    raise ValueError(f"{field}: expected distinct values, got '{name}' {count} times")
        for objective in self.objectives:
            for n in self.num_minibatches:
                for size in self.batch_sizes:
                    # For its checks: a setting that no run can have is an error before the first run.
                    self.settings(objective, n, size)
        return self

    def settings(self, objective: FlowObjective, num_minibatches: int, batch_size: float) -> Settings:
        """The training of one run; ValueError for settings that no run can have."""
        of = self.training
        return Settings(
            objective.build(), of.optimizer, of.rate, of.num_updates, num_minibatches, of.lag, objective.centred,
            of.group.build(), batch_size, of.observe_every, of.variance,
        )  # fmt: skip

    def objective(self, label: str) -> FlowObjective:
        """The objective with this label; ValueError for an unknown one."""
        known = {one.name: one for one in self.objectives}
        require_known("objective", label, known)
        return known[label]


def load_config(
    path: str | Path, overrides: Sequence[str] = (), sandbox: Callable[[], type[FlowConfig]] | None = None
) -> FlowConfig:
    """The flow config in a YAML file, after overrides such as `--seed 1`; ConfigError in one line for any other file.

    `sandbox` gives the schema for `backend: sandbox`, where that world is installed.
    """
    return load(path, overrides, StudySchemas(FlowConfig, sandbox))
