"""The ranks that share a machine, the groups of ranks that do not, and what each machine gets: for the cluster and for
its plan."""

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


@dataclass(frozen=True)
class Share:
    """The numbers of ranks and of engines on a machine; colocated engines are on the machine of their ranks."""

    ranks: int
    engines: int


def shares(config: ScaledRun, node_gpus: int) -> list[Share]:
    """The share of each machine where all have `node_gpus` GPUs, every one free, in the order of the ranks.

    Units (`unit_of`) and engines are whole on a machine. Ray packs them from the largest to the smallest and fills a
    machine with all that still fit before it takes the next (tests/scaled/few_machines.py asks it). On machines of up
    to 8 GPUs no other packing takes fewer machines; on 9 one may: two machines have room for 6 units of 2 and 2 engines
    of 3, and Ray takes three. Raises ConfigError where a unit or an engine needs more GPUs than a machine has.
    """
    ranks, width, number = config.training.num_ranks, config.rollout.tensor_parallel, config.rollout.num_engines
    is_colocated, size = config.cluster.placement == "colocated", unit_of(config, node_gpus).size
    if width > node_gpus:
        raise ConfigError(
            f"rollout.tensor_parallel: expected an engine within a machine of {node_gpus} GPUs, got {width}"
        )
    units, engines = -(-ranks // size), 0 if is_colocated else number
    machines = []
    while units or engines:
        # Of equal sizes units come first: they have a CPU for each rank, and an engine has one.
        own_engines = min(engines, node_gpus // width) if width > size else 0
        own_units = min(units, (node_gpus - own_engines * width) // size)
        if width <= size:
            own_engines = min(engines, (node_gpus - own_units * size) // width)
        units, engines = units - own_units, engines - own_engines
        machines.append((own_units, own_engines))
    # The ranks begin on the machines with the most units (`ray_cluster.by_node`).
    machines.sort(key=lambda own: -own[0])
    found, start = [], 0
    for own_units, own_engines in machines:
        stop = min(ranks, start + own_units * size)
        if is_colocated:
            # An engine is where its first rank is: its other ranks share the unit.
            own_engines = sum(start <= first < stop for first in range(0, number * width, width))
        found.append(Share(stop - start, own_engines))
        start = stop
    return found


__all__ = ["Share", "Unit", "shares", "unit_of"]
