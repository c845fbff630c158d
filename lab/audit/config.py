"""The config of an audit: policies, their distances, rewards, groups and objectives; every pairing is a cell.

Tabular and linear policies need no world. The sandbox adds a Mixture-of-Experts kind of policies in a subclass, which
`backend: sandbox` asks for (sandbox/exact/cases.py). Paper: MiniRL (arXiv 2512.01374) Eq. 5 names the two gaps.
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

Level = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1)]


class DiscrepancyBlock(Strict):
    """Departure of the inference engine's mu from old, at the same weights: the training-inference discrepancy."""

    kind: Literal["logits", "weights"] = Field(
        default="logits", description="noise on every prefix's logits by itself, or on the parameters"
    )
    token_kl: tuple[Level, ...] = Field(default=(1e-3,), min_length=1, description="KL(mu || old), nats per token")


class Policies(Strict):
    """Random policies on trees of several lengths; one seed is one policy, with its own noise and reward."""

    num_tokens: int = Field(default=3, ge=2, description="tokens of the vocabulary, the end token included")
    has_end: bool = Field(default=False, description="whether the last token ends a response (ragged lengths)")
    lengths: tuple[Length, ...] = Field(default=(4,), min_length=1, description="longest responses, in tokens")
    seeds: int = Field(default=4, ge=1, description="random policies of each length")
    objectives: tuple[str, ...] | None = Field(default=None, description="labels of the objectives; null takes all")

    @model_validator(mode="after")
    def _trees_exist(self) -> Policies:
        self.trees()
        return self

    def trees(self) -> list[PrefixTree]:
        """One tree per length; ValueError for one that is too large to enumerate."""
        return [PrefixTree(self.num_tokens, length, self.has_end) for length in self.lengths]


class TabularPolicies(Policies):
    """Free logits at every prefix: no parameter is shared."""

    kind: Literal["tabular"] = "tabular"
    discrepancy: DiscrepancyBlock | None = Field(default=None, description="mu against old; null is the audit's own")
    scale: float = Field(default=1.0, gt=0, description="standard deviation of the random logits")
    temperature: float | None = Field(default=None, gt=0, description="T: the logits are divided by it; null is 1")

    @property
    def label(self) -> str:
        """The name of these policies in tables."""
        return _label("tabular", self, self.temperature)


class LinearPolicies(Policies):
    """Linear-softmax policies: parameters shared by all prefixes with the same features."""

    kind: Literal["linear"] = "linear"
    discrepancy: DiscrepancyBlock | None = Field(default=None, description="mu against old; null is the audit's own")
    features: Literal["bigram", "counts"] = Field(default="bigram", description=f"one of {', '.join(FEATURES)}")
    scale: float = Field(default=1.0, gt=0, description="standard deviation of the random parameters")
    temperature: float | None = Field(default=None, gt=0, description="T: the logits are divided by it; null is 1")

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
        default="random", description="a random direction of the parameters, or that of the true gradient at old"
    )
    token_kl: tuple[Level, ...] = Field(default=(0.0,), min_length=1, description="KL(old || pi), nats per token")


class GroupBlock(Strict):
    """Source of advantages: a group of this size, or an infinite one with a baseline of one's choice."""

    size: Annotated[int, Field(ge=2)] | Literal["infinite"] = Field(
        default="infinite", description="responses of a prompt that are compared with each other, or infinite"
    )
    baseline: Literal["own", "mean", "none"] = Field(
        default="mean", description="infinite: what is subtracted from rewards; a number: own, the objective's"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_by_default(cls, raw: object) -> object:
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
        """The group as the enumeration takes it."""
        if self.baseline == "own":
            return Group(int(self.size))
        return Group(None, self.baseline)


class AuditObjective(ObjectiveBlock):
    """An objective under a label of its own: a preset with overrides, or `reinforce` with a correction."""

    label: str = Field(default="", max_length=40, description="name in tables; the preset's where it is empty")

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
    """Two objectives whose biases are divided, for the map of where the first has less."""

    first: str = Field(description="label of the objective above the line")
    second: str = Field(description="label of the objective below it")


class AuditConfig(Strict):
    """One audit. `backend` says which kinds of policies there are: exact has tabular and linear ones."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$", description="the records' folder is <output>/<name>/<time>-<hash>"
    )
    seed: int = Field(default=0, ge=0, description="root of every named random stream")
    backend: str = Field(default="exact", description="exact, or sandbox for policies of kind moe besides")
    policies: tuple[Annotated[TabularPolicies | LinearPolicies, Field(discriminator="kind")], ...] = Field(
        min_length=1, description="whose gradients are audited"
    )
    discrepancy: DiscrepancyBlock = Field(default_factory=DiscrepancyBlock, description="mu against old")
    staleness: StalenessBlock = Field(default_factory=StalenessBlock, description="old against pi")
    rewards: tuple[str, ...] = Field(default=("sparse",), min_length=1, description=f"any of {', '.join(REWARDS)}")
    groups: tuple[GroupBlock, ...] = Field(default=(GroupBlock(),), min_length=1, description="how advantages arise")
    objectives: tuple[AuditObjective, ...] = Field(
        min_length=1, description="what is audited; `all`, alone or in the list: every preset and correction"
    )
    num_responses: tuple[Length, ...] = Field(
        default=(64, 1024), min_length=1, description="sample sizes for the root mean squared error"
    )
    compare: CompareBlock | None = Field(default=None, description="the pair whose ratio of biases is mapped")
    output: str = Field(default="runs", min_length=1, description="folder of all record folders")

    @field_validator("objectives", mode="before")
    @classmethod
    def _all_objectives(cls, raw: object) -> object:
        if raw == "all":
            return tuple(every_objective())
        if not isinstance(raw, list):
            return raw
        # A tuple: what a validator has seen is no JSON array any more.
        return tuple(block for one in raw for block in (every_objective() if one == "all" else [one]))

    @model_validator(mode="after")
    def _names_are_known(self) -> AuditConfig:
        labels = [objective.name for objective in self.objectives]
        _distinct("objectives", labels)
        _distinct("policies", [f"{block.label}, {_engine(self.discrepancy_of(block))}" for block in self.policies])
        _distinct("rewards", self.rewards)
        for reward in self.rewards:
            _known("rewards", reward, REWARDS)
        for index, block in enumerate(self.policies):
            for label in block.objectives or ():
                _known(f"policies.{index}.objectives", label, labels)
        for field in ("first", "second") if self.compare is not None else ():
            _known(f"compare.{field}", getattr(self.compare, field), labels)
        return self

    def discrepancy_of(self, block: Policies) -> DiscrepancyBlock | None:
        """Departure of mu from old for these policies; None where their engines say it."""
        if isinstance(block, TabularPolicies | LinearPolicies):
            return block.discrepancy or self.discrepancy
        return None

    def objectives_of(self, block: Policies) -> list[AuditObjective]:
        """The objectives that these policies are audited with, in the config's order."""
        return [one for one in self.objectives if block.objectives is None or one.name in block.objectives]


S = TypeVar("S", bound=Strict)


class Schemas(Mapping[str, type[S]]):
    """Backend name to the schema of its studies; that of the sandbox is fetched when a config asks for it."""

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
    """The audit config in a YAML file, after overrides such as `--seed 1`; ConfigError, one line, if it is none.

    `sandbox` gives the schema for `backend: sandbox`, where that world is at hand.
    """
    return load(path, overrides, Schemas(AuditConfig, sandbox))


def _engine(discrepancy: DiscrepancyBlock | None) -> str:
    return "engines" if discrepancy is None else discrepancy.kind


def _distinct(field: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{field}: expected distinct names, got '{name}' {count} times")


def _known(field: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{field}: expected one of {', '.join(known)}, got '{name}'{hint and f'; {hint}'}")
