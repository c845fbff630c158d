"""A tree, rewards and a tiny model for tests of the exact problems: small enough to enumerate in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sandbox.engines.engine import SandboxEngine
from sandbox.exact.audit import ENGINES, RoutedProblem, moved
from sandbox.exact.routed_policy import RoutedPolicy, rollout_engine
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from theory.contracts import Prompt
from theory.exact.tree import PrefixTree
from theory.objectives import correction, preset
from theory.routing.passes import Mode
from theory.streams import stream

TREE = PrefixTree(num_tokens=4, max_length=3, has_end=True)
PROMPT = Prompt("0", (2, 0), "")
REWARD_Y = (torch.rand(TREE.num_responses, generator=stream(0, "reward"), dtype=torch.float64) < 0.3).double()
# A model of which the FP8 engines flip routes, and which the step flips as well.
SEED = 13
STALENESS = 1e-2
TOKEN_IS = preset("reinforce", correction=correction("token_is", numerator="pi"))
# Sums of some hundred float64 terms of order 1: measured 4e-16 to 3e-15.
ROUNDING = 1e-13


def tiny_moe(num_tokens: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> MoE:
    """A model of two layers, width 8, the top 2 of 4 experts: some 2,100 parameters, drawn in float32, then cast."""
    config = ModelConfig(
        vocab_size=num_tokens, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
        num_experts=4, experts_per_token=2, expert_size=8, max_positions=64,
    )  # fmt: skip
    return MoE(config, generator).to(dtype)


def loaded(model: MoE, name: str) -> SandboxEngine:
    """The named engine, holding the model's weights."""
    engine = rollout_engine(model, ENGINES[name], TREE)
    engine.load_model(model, version=0)
    return engine


def same_edges(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether all values are the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def furthest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest difference."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class World:
    """One model, a step of its weights, and every engine under every mode, with the step (`off`) and without (`on`)."""

    model: MoE
    step_Q: Tensor
    target: RoutedPolicy
    off: dict[tuple[str, Mode], RoutedProblem]
    on: dict[tuple[str, Mode], RoutedProblem]

    @property
    def now(self) -> MoE:
        return moved(self.model, self.step_Q)
