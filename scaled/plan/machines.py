"""The kinds of machine of a run: those with ranks of these or those layers, with engines, or with both hold different
things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan.parameters import stage_layers
from scaled.stages import read_together
from scaled.units import Share, shares


@dataclass(frozen=True)
class Machine:
    """A machine's part of a run, in shares from 0 to 1: of the engines, and of the layers and replicas of its ranks.

    reads: for each set of stages that machines read together and that has a rank here, the share of the MoE layers that
    it has, and that of the replicas that have one here. dealt_last: the latter at the last stage, which alone reads
    mu's likeliest tokens; 0 where there are none. num_sets: of all machines.
    """

    engine_share: float
    reads: tuple[tuple[float, float], ...]
    dealt_last: float
    num_sets: int

    @property
    def has_ranks(self) -> bool:
        """Whether ranks are on it."""
        return bool(self.reads)


def machines(config: ScaledRun, shape: ModelShape) -> tuple[Machine, ...]:
    """Each kind of machine once, as the run's start packs ranks and engines (`units.shares`)."""
    sets, last = stage_sets(config), config.training.pipeline_parallel - 1
    has_tokens = config.algorithm.objective.centering is not None
    layers, found, start = layer_shares(config, shape, sets), [], 0
    for own in _shares(config):
        ranks = range(start, start + own.ranks)
        dealt = [_dealt(config, ranks, stages) for stages in sets]
        # Sorted, as machines of other stages with as much to read are of a kind.
        reads = tuple(sorted((size, share) for size, share in zip(layers, dealt, strict=True) if share))
        at_last = _dealt(config, ranks, [last]) if has_tokens else 0.0
        found.append(Machine(own.engines / config.rollout.num_engines, reads, at_last, len(sets)))
        start += own.ranks
    return tuple(dict.fromkeys(found))


def stage_sets(config: ScaledRun) -> tuple[tuple[int, ...], ...]:
    """The pipeline stages in sets: the layers of one are in objects of their own."""
    stages = config.training.pipeline_parallel
    if stages == 1:  # a search asks for it at every layout
        return ((0,),)
    of_ranks = [number for number, own in enumerate(_shares(config)) for _ in range(own.ranks)]
    return read_together(of_ranks, stages)


def layer_shares(config: ScaledRun, shape: ModelShape, sets: Sequence[Sequence[int]]) -> list[float]:
    """The share of the MoE layers that each of these sets of stages has."""
    if len(sets) == 1:
        return [1.0]
    moe = set(shape.moe_layers)
    own = [sum(len(moe.intersection(stage_layers(shape, config.training, s))) for s in stages) for stages in sets]
    return [num / max(1, len(moe)) for num in own]


def _dealt(config: ScaledRun, ranks: range, stages: Iterable[int]) -> float:
    """The share of the replicas that have one of these ranks at one of these stages."""
    training = config.training
    of_stage = training.num_ranks // training.pipeline_parallel
    of_replica = training.tensor_parallel * training.context_parallel
    replicas = set[int]()
    for stage in stages:
        # Stages are the slowest index of a rank's number, replicas the next.
        first, stop = max(ranks.start, stage * of_stage), min(ranks.stop, (stage + 1) * of_stage)
        if first < stop:
            replicas |= set(range(first % of_stage // of_replica, (stop - 1) % of_stage // of_replica + 1))
    return len(replicas) / training.data_parallel


def rank_numbers(config: ScaledRun) -> list[int]:
    """The number of ranks of each machine that has some, in the order of the ranks, the largest first."""
    return [own.ranks for own in _shares(config) if own.ranks]


def with_ranks(config: ScaledRun) -> int:
    """The number of machines that have ranks."""
    return len(rank_numbers(config))


def _shares(config: ScaledRun) -> list[Share]:
    return shares(config, config.cluster.gpus_per_node)


__all__ = ["Machine", "layer_shares", "machines", "rank_numbers", "stage_sets", "with_ranks"]
