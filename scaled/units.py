"""The ranks that share a machine, and the groups of ranks that do not: for the cluster and for its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.strict import ConfigError
from scaled.config import ScaledRun


@dataclass(frozen=True)
class Unit:
    """`size` neighbouring ranks share a machine; a line of `spans` for each kind of group that does not."""

    size: int
    spans: tuple[str, ...] = ()


def unit_of(config: ScaledRun, node_gpus: int) -> Unit:
    """Ranks that share a machine of `node_gpus` GPUs: whole TP groups, colocated engines, EP and CP groups that fit.

    Megatron numbers the ranks of a TP group consecutively, those of an EP x ETP group, and those of a TP x CP group.
    Raises ConfigError where not even TP groups and engines fit.
    """
    training = config.training
    width = config.rollout.tensor_parallel if config.cluster.placement == "colocated" else 1
    size = math.lcm(training.tensor_parallel, width)
    if size > node_gpus:
        raise ConfigError(
            f"training.tensor_parallel: expected groups of ranks, with the engines on them, within a machine of "
            f"{node_gpus} GPUs, got {size}"
        )
    kinds = [
        ("expert_parallel", training.expert_parallel * training.expert_tensor_parallel, "all-to-all"),
        ("context_parallel", training.tensor_parallel * training.context_parallel, "exchange of keys and values"),
    ]
    spans = []
    for field, num, exchange in kinds:
        whole = math.lcm(size, num)
        if whole <= node_gpus:
            size = whole
        else:
            spans.append(
                f"training.{field}: groups of {num} ranks span machines of {node_gpus} GPUs, and so does their "
                f"{exchange}"
            )
    return Unit(size, tuple(spans))


__all__ = ["Unit", "unit_of"]
