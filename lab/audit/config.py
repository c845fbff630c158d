"""The config of an audit: policies, distances, rewards, groups and objectives; every combination is a cell.

Tabular and linear policies need no world. `backend: sandbox` selects a subclass with Mixture-of-Experts policies
(sandbox/exact/cases.py). Paper: MiniRL (arXiv 2512.01374) Eq. 5 names the two gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from lab.audit.every import every_objective
from lab.config.algorithm import ObjectiveBlock
from lab.config.load import load
from lab.strict import Strict
from theory.exact.groups import Group
from theory.exact.levels import REWARDS
from theory.exact.policies import FEATURES
from theory.exact.tree import PrefixTree
from theory.names import did_you_mean

Level = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(ge=1e-12, le=1e12)]
"""A scale or a temperature; products and quotients of two are floats above 0, and below infinity."""
Length = Annotated[int, Field(ge=1)]


class DiscrepancyBlock(Strict):
    """Departure of the inference engine's mu from old, at the same weights: the training-inference discrepancy."""

    kind: Literal["logits", "weights"] = Field(
        default="logits", description="independent noise on every prefix's logits, or noise on the parameters"
    )
    token_kl: tuple[Level, ...] = Field(default=(1e-3,), min_length=1, description="KL(mu || old), nats per token")


class Policies(Strict):
    """Random policies on trees of several lengths; each seed is one policy with its own noise and reward."""

    num_tokens: int = Field(default=3, ge=2, description="tokens of the vocabulary, the end token included")
    has_end: bool = Field(default=False, description="whether the last token ends a response (ragged lengths)")
    lengths: tuple[Length, ...] = Field(default=(4,), min_length=1, description="maximum response lengths, in tokens")
    seeds: int = Field(default=4, ge=1, le=10**5, description="random policies per length")
    objectives: tuple[str, ...] | None = Field(default=None, description="labels of the objectives; null: all")

    @model_validator(mode="after")
    def _trees_exist(self) -> Policies:
        self.trees()
        return self

    def trees(self) -> list[PrefixTree]:
        """One tree per length; ValueError for a tree too large to enumerate."""
        return [PrefixTree(self.num_tokens, length, self.has_end) for length in self.lengths]


class TabularPolicies(Policies):
    """Tabular policies: free logits at every prefix, with no shared parameter."""

    kind: Literal["tabular"] = "tabular"
    discrepancy: DiscrepancyBlock | None = Field(default=None, description="mu against old; null: the audit's")
    scale: Positive = Field(default=1.0, description="standard deviation of the random logits")
    temperature: Positive | None = Field(default=None, description="T, which divides the logits; null: 1")

    @property
    def label(self) -> str:
        """The name of these policies in tables."""
        return _label("tabular", self, self.temperature)


class LinearPolicies(Policies):
    """Linear-softmax policies: prefixes with the same features share their parameters."""

    kind: Literal["linear"] = "linear"
    discrepancy: DiscrepancyBlock | None = Field(default=None, description="mu against old; null: the audit's")
    features: Literal["bigram", "counts"] = Field(default="bigram", description=f"one of {', '.join(FEATURES)}")
    scale: Positive = Field(default=1.0, description="standard deviation of the random parameters")
    temperature: Positive | None = Field(default=None, description="T, which divides the logits; null: 1")

    @property
    def label(self) -> str:
        """The name of these policies in tables."""
        return _label(self.features, self, self.temperature)


def _label(kind: str, block: Policies, temperature: float | None) -> str:
    heat = "" if temperature is None else f", T {temperature:g}"
    return f"{kind}, {block.num_tokens} tokens" + (" with an end" if block.has_end else "") + heat


class StalenessBlock(Strict):
    """Departure of pi from old, the weights that were rolled out: policy staleness."""

    direction: Literal["random", "gradient"] = Field(
        default="random", description="a random direction in parameter space, or the true gradient at old"
    )
    token_kl: tuple[Level, ...] = Field(default=(0.0,), min_length=1, description="KL(old || pi), nats per token")


class GroupBlock(Strict):
    """Source of advantages: a group of this size, or an infinite one with a chosen baseline."""

    size: Annotated[int, Field(ge=2, le=4096)] | Literal["infinite"] = Field(
        default="infinite", description="responses per group of one prompt, or infinite"
    )
    baseline: Literal["own", "mean", "none"] = Field(
        default="mean", description="subtracted from rewards: mean or none if infinite, else own, the objective's"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_by_default(cls, raw: object) -> object:
        # The field's default, mean, is for infinite groups; a finite one has the objective's own baseline.
        if isinstance(raw, Mapping) and raw.get("size", "infinite") != "infinite":
            return {"baseline": "own", **raw}
        return raw

    @model_validator(mode="after")
    def _fits(self) -> GroupBlock:
        if (self.size != "infinite") != (self.baseline == "own"):
            expected = "mean or none with size infinite" if self.size == "infinite" else f"own with size {self.size}"
            raise ValueError(f"baseline: expected {expected}, got {self.baseline}")
        return self

    def build(self) -> Group:
        """The group for the enumeration."""
        if self.baseline == "own":
            return Group(int(self.size))
        return Group(None, self.baseline)


class AuditObjective(ObjectiveBlock):
    """An objective with a label: a preset with overrides, or `reinforce` with a correction."""

    label: str = Field(default="", max_length=40, description="name in tables; empty: the preset's")

    @property
    def name(self) -> str:
        """The label, or else the preset's name."""
        return self.label or self.preset

    @model_validator(mode="after")
    def _no_reference(self) -> AuditObjective:
        if self.kl_coefficient > 0:
            raise ValueError(f"kl_coefficient: expected 0 (an audit has no reference), got {self.kl_coefficient}")
        return self


class CompareBlock(Strict):
    """Two objectives, for the map of the ratio bias(first) / bias(second)."""

    first: str = Field(description="label of the numerator's objective")
    second: str = Field(description="label of the denominator's objective")


class AuditConfig(Strict):
    """One audit. `backend` selects the kinds of policies: exact has tabular and linear ones."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$", description="the records' folder is <output>/<name>/<time>-<hash>"
    )
    seed: int = Field(default=0, ge=0, description="root of every named random stream")
    backend: str = Field(default="exact", description="exact, or sandbox, which adds policies of kind moe")
    policies: tuple[Annotated[TabularPolicies | LinearPolicies, Field(discriminator="kind")], ...] = Field(
        min_length=1, description="the policies whose gradients are audited"
    )
    discrepancy: DiscrepancyBlock = Field(default_factory=DiscrepancyBlock, description="mu against old")
    staleness: StalenessBlock = Field(default_factory=StalenessBlock, description="old against pi")
    rewards: tuple[str, ...] = Field(default=("sparse",), min_length=1, description=f"any of {', '.join(REWARDS)}")
    groups: tuple[GroupBlock, ...] = Field(default=(GroupBlock(),), min_length=1, description="sources of advantages")
    objectives: tuple[AuditObjective, ...] = Field(
        min_length=1, description="the audited objectives; `all`, alone or in the list: every preset and correction"
    )
    num_responses: tuple[Length, ...] = Field(
        default=(64, 1024), min_length=1, description="sample sizes for the root mean squared error"
    )
    compare: CompareBlock | None = Field(default=None, description="the pair of objectives for the map of bias ratios")
    output: str = Field(default="runs", min_length=1, description="folder of all record folders")

    @field_validator("objectives", mode="before")
    @classmethod
    def _all_objectives(cls, raw: object) -> object:
        if raw == "all":
            return tuple(every_objective())
        if not isinstance(raw, list):
            return raw
        # Strict mode takes a list for a tuple only straight from JSON, which a validator's output no longer is.
        return tuple(block for one in raw for block in (every_objective() if one == "all" else [one]))

    @model_validator(mode="after")
    def _names_are_known(self) -> AuditConfig:
        labels = [objective.name for objective in self.objectives]
        _distinct("objectives", labels)
        _distinct("policies", [f"{block.label}, {_engine(self.discrepancy_of(block))}" for block in self.policies])
        _distinct("rewards", self.rewards)
        for reward in self.rewards:
            require_known("rewards", reward, REWARDS)
        for index, block in enumerate(self.policies):
            for label in block.objectives or ():
                require_known(f"policies.{index}.objectives", label, labels)
        for field in ("first", "second") if self.compare is not None else ():
            require_known(f"compare.{field}", getattr(self.compare, field), labels)
        return self

    def discrepancy_of(self, block: Policies) -> DiscrepancyBlock | None:
        """Departure of mu from old for these policies; None where their engines determine it."""
        if isinstance(block, TabularPolicies | LinearPolicies):
            return block.discrepancy or self.discrepancy
        return None

    def objectives_of(self, block: Policies) -> list[AuditObjective]:
        """The objectives for these policies, in the config's order."""
        return [one for one in self.objectives if block.objectives is None or one.name in block.objectives]


S = TypeVar("S", bound=Strict)


class StudySchemas(Mapping[str, type[S]]):
    """Backend name to the schema of its studies; the sandbox's is imported only when a config asks for it."""

    def __init__(self, exact: type[S], sandbox: Callable[[], type[S]] | None) -> None:
        self.exact, self.sandbox = exact, sandbox

    def __getitem__(self, backend: str) -> type[S]:
        if backend == "sandbox" and self.sandbox is not None:
            return self.sandbox()
        return {"exact": self.exact}[backend]

    def __iter__(self) -> Iterator[str]:
        return iter(["exact"] if self.sandbox is None else ["exact", "sandbox"])

    def __len__(self) -> int:
        return len(list(iter(self)))


def load_config(
    path: str | Path, overrides: Sequence[str] = (), sandbox: Callable[[], type[AuditConfig]] | None = None
) -> AuditConfig:
    """The audit config in a YAML file, after overrides such as `--seed 1`; ConfigError of one line if it is invalid.

    `sandbox` returns the schema for `backend: sandbox`, if that world is available.
    """
    return load(path, overrides, StudySchemas(AuditConfig, sandbox))


def _engine(discrepancy: DiscrepancyBlock | None) -> str:
    return "engines" if discrepancy is None else discrepancy.kind


def _distinct(field: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{field}: expected distinct names, got '{name}' {count} times")


def require_known(field: str, name: str, known: Iterable[str]) -> None:
    """Raises ValueError, naming the field, for a name that is not one of these."""
    known = list(known)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{field}: expected one of {', '.join(known)}, got '{name}'{hint and f'; {hint}'}")
