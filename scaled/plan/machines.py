"""The kinds of machine of a run: those with ranks, with engines, or with both hold different things."""

from __future__ import annotations

from dataclasses import dataclass

from scaled.config import ScaledRun
from scaled.units import shares


@dataclass(frozen=True)
class Machine:
    """A machine's part of a run: whether it has ranks, and its share of the engines, from 0 to 1."""

    has_ranks: bool
    engine_share: float


def machines(config: ScaledRun) -> tuple[Machine, ...]:
    """Each kind of machine once, as the run's start packs ranks and engines (`units.shares`)."""
    engines = config.rollout.num_engines
    found = (Machine(own.ranks > 0, own.engines / engines) for own in shares(config, config.cluster.gpus_per_node))
    return tuple(dict.fromkeys(found))


def rank_numbers(config: ScaledRun) -> list[int]:
    """The number of ranks of each machine that has some, in the order of the ranks, the largest first."""
    return [own.ranks for own in shares(config, config.cluster.gpus_per_node) if own.ranks]


def with_ranks(config: ScaledRun) -> int:
    """The number of machines that have ranks."""
    return len(rank_numbers(config))


__all__ = ["Machine", "machines", "rank_numbers", "with_ranks"]
