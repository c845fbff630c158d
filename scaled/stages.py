"""The pipeline stages whose layers a machine reads together: in the cluster's object stores and in their plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import layers_of

MOST_SETS = 32
"""The most sets of layers into which an engine cuts its records: each has objects of its own in an answer."""


def read_together(machines: Sequence[Hashable], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages in sets: two whose ranks are on the same machines share one. machines: that of each rank, in order.

    One set where they would be more than MOST_SETS.
    """
    # Stages are the slowest index of a rank's number.
    num = len(machines) // num_stages
    sets: dict[frozenset[Hashable], list[int]] = {}
    for stage in range(num_stages):
        sets.setdefault(frozenset(machines[stage * num : (stage + 1) * num]), []).append(stage)
    if len(sets) > MOST_SETS:
        return (tuple(range(num_stages)),)
    return tuple(tuple(stages) for stages in sets.values())


def layer_sets(training: TrainingBlock, num_layers: int, machines: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The decoder layers of each of these sets, those of all chunks of its stages; together they are all layers."""
    stages = read_together(machines, training.pipeline_parallel)
    own = [[n for stage in one for chunk in layers_of(training, num_layers, stage) for n in chunk] for one in stages]
    return tuple(tuple(sorted(layers)) for layers in own)


__all__ = ["MOST_SETS", "layer_sets", "read_together"]
