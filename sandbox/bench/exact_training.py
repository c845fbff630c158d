"""Exact training in the benchmark: updates of a small network and of the sandbox's MoE on all responses of prompts."""

from __future__ import annotations

from collections.abc import Callable

from sandbox.engines import EngineConfig
from sandbox.exact.cases import MoeModel
from sandbox.exact.routed_training import MoeEngine, MoePolicy
from theory.contracts import Prompt
from theory.exact.engines import engine_at
from theory.exact.forest import Forest
from theory.exact.levels import REWARDS
from theory.exact.networks import NetworkPolicy
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.exact.trajectory import ExactTask
from theory.exact.tree import PrefixTree
from theory.objectives import preset
from theory.streams import stream

NUM_UPDATES = 20
NUM_PROMPTS, NUM_OPENINGS, VOCABULARY, LENGTH = 6, 3, 3, 5
"""The setting of docs/exact-training.md: T = 6, where the environment draws the first token."""

MOE_PROMPTS, MOE_VOCABULARY, MOE_LENGTH, MOE_MINIBATCHES, MOE_DRAWS = 4, 4, 5, 8, 2
"""4 prompts of 1,024 responses each, 8 updates per rollout, and 2 fixed draws of the router's noise."""


def updates(length: int = LENGTH) -> Callable[[], object]:
    """A run of NUM_UPDATES at this length, without an importance weight, under a fixed error, observed at its ends."""
    forest = Forest.uniform(PrefixTree(VOCABULARY, length), NUM_PROMPTS, NUM_OPENINGS)
    generator = stream(0, "benchmark", "exact training", length)
    task = ExactTask(forest, REWARDS["sparse"](forest, generator))
    first = NetworkPolicy.random(forest, generator)
    own = engine_at("fixed", 0.18, first, generator)
    settings = Settings(reinforce("none"), num_updates=NUM_UPDATES, observe_every=NUM_UPDATES)
    return lambda: train(task, first, own, settings)


def moe_updates() -> Callable[[], object]:
    """A run of NUM_UPDATES of the MoE of `firstorder flow`, without replay, under a noisy router."""
    forest = Forest.uniform(PrefixTree(MOE_VOCABULARY, MOE_LENGTH), MOE_PROMPTS)
    generator = stream(0, "benchmark", "exact training", "moe")
    task = ExactTask(forest, REWARDS["sparse"](forest, generator))
    # One position more for the second token of the prompts, as in sandbox/exact/flow.py.
    model = MoeModel().build(MOE_VOCABULARY, MOE_LENGTH + 1, generator)
    prompts = [Prompt(f"{token}", (token, 0), answer="") for token in range(MOE_PROMPTS)]
    first = MoePolicy.of(forest, model, prompts)
    noisy = EngineConfig(defects=({"kind": "router_noise", "std": 0.5},))  # pyright: ignore[reportArgumentType]
    settings = Settings(
        preset("dr_grpo"), num_updates=NUM_UPDATES, num_minibatches=MOE_MINIBATCHES, observe_every=NUM_UPDATES,
        has_variance=False,
    )  # fmt: skip
    return lambda: train(task, first, MoeEngine(noisy, num_draws=MOE_DRAWS), settings)


__all__ = ["LENGTH", "NUM_UPDATES", "moe_updates", "updates"]
