"""Exact training as a subject of the benchmark: updates of a small network on every response of six prompts."""

from __future__ import annotations

from collections.abc import Callable

from theory.exact.engines import engine_at
from theory.exact.forest import Forest
from theory.exact.levels import REWARDS
from theory.exact.networks import NetworkPolicy
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.exact.trajectory import Task
from theory.exact.tree import PrefixTree
from theory.streams import stream

NUM_UPDATES = 20
NUM_PROMPTS, NUM_OPENINGS, VOCABULARY, LENGTH = 6, 3, 3, 5
"""The setting of docs/exact-training.md: T = 6, of which the environment draws the first token."""


def updates(length: int = LENGTH) -> Callable[[], object]:
    """A run of NUM_UPDATES at this length, without a weight under a fixed error; observed at its ends."""
    forest = Forest.uniform(PrefixTree(VOCABULARY, length), NUM_PROMPTS, NUM_OPENINGS)
    generator = stream(0, "benchmark", "exact training", length)
    task = Task(forest, REWARDS["sparse"](forest, generator))
    first = NetworkPolicy.random(forest, generator)
    own = engine_at("fixed", 0.18, first, generator)
    settings = Settings(reinforce("none"), num_updates=NUM_UPDATES, observe_every=NUM_UPDATES)
    return lambda: train(task, first, own, settings)


__all__ = ["LENGTH", "NUM_UPDATES", "updates"]
