"""The kinds of machine of a run: those with ranks, with engines, or with both hold different things."""

from __future__ import annotations

from dataclasses import dataclass

from scaled.config import ScaledRun


@dataclass(frozen=True)
class Machine:
    """A machine's part of a run: whether it has ranks, and its share of the engines, from 0 to 1."""

    has_ranks: bool
    engine_share: float


def machines(config: ScaledRun) -> tuple[Machine, ...]:
    """Each kind of machine once. Ranks fill machines one after the other, and engines go on where they end, or lie over
    them (colocated), as `cluster.ray_cluster` places them."""
    ranks, engines = config.training.num_ranks, config.rollout.num_engines * config.rollout.tensor_parallel
    first = 0 if config.cluster.placement == "colocated" else ranks
    node = config.cluster.gpus_per_node
    found = []
    for start in range(0, max(ranks, first + engines), node):
        own = min(start + node, first + engines) - max(start, first)
        found.append(Machine(start < ranks, max(0, own) / engines))
    return tuple(dict.fromkeys(found))


def with_ranks(config: ScaledRun) -> int:
    """The number of machines that have ranks."""
    return -(-config.training.num_ranks // config.cluster.gpus_per_node)


__all__ = ["Machine", "machines", "with_ranks"]
