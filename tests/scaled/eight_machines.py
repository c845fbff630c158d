"""The places of ranks and engines on eight machines of eight GPUs that Ray simulates, as `cluster()` gives them out.

`python -m tests.scaled.eight_machines` prints the machine of each, and for one case what actors there see.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray import cluster_utils
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from scaled.cluster import ray_cluster
from scaled.cluster.ray_cluster import Cluster
from scaled.config import ScaledRun
from tests.scaled.plan_world import loaded

MACHINES, GPUS = 8, 8
SIZES = {"num_cpus": 2 * GPUS, "num_gpus": GPUS, "object_store_memory": 80 * 2**20}  # Ray's least is 75 MiB


@dataclass(frozen=True)
class Case:
    """The shipped recipe n8_r3, changed by `options`, where others use `taken` GPUs of some machines."""

    options: tuple[str, ...] = ()
    taken: tuple[int, ...] = ()

    def config(self, *more: str) -> ScaledRun:
        return loaded("minirl/n8_r3", *self.options, *more)


def layout(tp: int, ep: int, cp: int = 1, ranks: int = 32, engines: int = 16) -> tuple[str, ...]:
    """The options for it."""
    sizes = {"training.tensor_parallel": tp, "training.expert_parallel": ep, "training.context_parallel": cp,
             "training.num_ranks": ranks, "rollout.num_engines": engines}  # fmt: skip
    return tuple(word for name, size in sizes.items() for word in (f"--{name}", str(size)))


PP2 = ("--training.pipeline_parallel", "2")
COLOCATED = ("--cluster.placement", "colocated")
CASES = {
    "n8_r3": Case(),
    "colocated": Case(COLOCATED),
    "EP 16": Case(layout(4, 16)),
    "CP 8": Case(layout(2, 2, 8)),
    "single ranks": Case(layout(1, 1)),
    "PP 2": Case(PP2),
    "sixes": Case(layout(2, 4, 2, engines=8), taken=(2,) * 6),
    "sixes, colocated": Case(layout(2, 4, 2) + COLOCATED, taken=(2,) * 6),
    # No GPU is left over, so that the number of ranks on each machine does not depend on Ray.
    "pieces, EP 16": Case((*layout(2, 16, engines=1), "--rollout.tensor_parallel", "1"), taken=(8, 7, 6, 6, 2, 2)),
    "pieces, EP 16, colocated": Case(layout(2, 16, ranks=16, engines=8) + COLOCATED, taken=(6, 6, 6, 6, 4, 4, 2, 2)),
}
STAGED = "PP 2"
JOINED, ACTING = "n8_r3", "pieces, EP 16, colocated"
SEVENS = Case(("--rollout.num_engines", "8"), taken=(1,) * 8)


class Light:
    """An actor that sees what `Worker` does. Without torch, two dozen fit into a small machine."""

    def __init__(self, log: str):
        pass

    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@contextlib.contextmanager
def others(taken: Sequence[int]) -> Iterator[list[int]]:
    """Inside the block so many GPUs, each number on a machine of its own, are in use; yields those of each machine."""
    machines = sorted(node["NodeID"] for node in ray.nodes())
    if not taken:
        yield [0] * len(machines)
        return
    group = placement_group([{"GPU": float(num)} for num in taken], strategy="STRICT_SPREAD")
    try:
        assert group.wait(60)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        yield [sum(num for b, num in enumerate(taken) if nodes[b] == machine) for machine in machines]
    finally:
        remove_placement_group(group)


def placed(made: Cluster) -> dict[str, Any]:
    """The machine, by its number, and the GPUs of each place: of ranks, then of engines."""
    machines = sorted(node["NodeID"] for node in ray.nodes())
    nodes = placement_group_table(made.group)["bundles_to_node_id"]
    found: dict[str, Any] = {"is_alone": made.is_alone, "rank": [], "engine": []}
    found["of ranks"] = [machines.index(machine) for machine in made.machines_of_ranks()]
    for role, index in sorted(made.places):
        place = made.places[role, index]
        assert len(found[role]) == index
        found[role].append([machines.index(nodes[place.bundle]), place.num_gpus])
    return found


def seen(made: Cluster, config: ScaledRun) -> dict[str, Any]:
    """The machine and the devices that each actor sees; ranks start first, as in `ScoringGroup`."""
    machines = sorted(node["NodeID"] for node in ray.nodes())
    found: dict[str, Any] = {}
    numbers = {"rank": config.training.num_ranks, "engine": config.rollout.num_engines}
    for role in ("rank", "engine"):
        actors = [made.spawn(role, i, Light) for i in range(numbers[role])]
        devices = ray.get([actor.devices.remote() for actor in actors])
        nodes = ray.get([actor.node.remote() for actor in actors])
        if role == "rank":
            made.devices = dict(enumerate(devices))
        found[role] = [[machines.index(node), own] for node, own in zip(nodes, devices, strict=True)]
    return found


def refusal(folder: Path) -> str:
    """The refusal of a run where no machine has all its GPUs free."""
    with others(SEVENS.taken), mock.patch.object(ray_cluster, "PLACEMENT_TIMEOUT_S", 2.0):
        try:
            with ray_cluster.cluster(SEVENS.config(), folder):
                return "nothing"
        except ValueError as error:
            return str(error)


def measured(folder: Path) -> dict[str, Any]:
    """The places of every case, what actors see in one, and the refusal. One case joins, others are connected."""
    simulated = cluster_utils.Cluster(initialize_head=True, head_node_args=SIZES)
    try:
        for _ in range(MACHINES - 1):
            simulated.add_node(wait=False, **SIZES)
        simulated.wait_for_nodes()
        found: dict[str, Any] = {}
        with ray_cluster.cluster(CASES[JOINED].config("--cluster.address", simulated.address), folder) as made:
            found[JOINED] = placed(made) | {"taken": [0] * MACHINES}
        ray.init(address=simulated.address, log_to_driver=False)
        found["refusal"] = refusal(folder)
        for name, case in CASES.items():
            if name == JOINED:
                continue
            config = case.config()
            with others(case.taken) as taken, ray_cluster.cluster(config, folder) as made:
                found[name] = placed(made) | {"taken": taken}
                if name == ACTING:
                    found["seen"] = seen(made, config)
        return found
    finally:
        ray.shutdown()
        simulated.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback, for a minute
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measured(Path(name))))
