"""As few machines as a plan says, and one less, that Ray simulates: what `cluster()` places there.

`python -m tests.scaled.few_machines` prints the ranks and engines of each machine, or the refusal.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray import cluster_utils

from scaled.cluster import ray_cluster
from scaled.config import ScaledRun
from scaled.plan.division import machines_needed
from tests.scaled.eight_machines import COLOCATED, layout, others, placed
from tests.scaled.plan_world import loaded

MOST = 3
"""Machines of a cluster."""


def engines_of(width: int) -> tuple[str, ...]:
    """The option for it."""
    return ("--rollout.tensor_parallel", str(width))


CASES = {
    "units of 4 on 6": (6, layout(4, 4, ranks=12, engines=6) + COLOCATED),
    "units of 4, engines of 2 on 6": (6, layout(4, 4, ranks=8, engines=2)),
    "units of 4, engines of 3 on 6": (6, (*layout(4, 4, ranks=8, engines=2), *engines_of(3))),
    "units of 4, engines of 6 on 6": (6, (*layout(4, 4, ranks=8, engines=1), *engines_of(6))),
    "units of 2, engines of 4 on 6": (6, (*layout(2, 2, ranks=6, engines=2), *engines_of(4))),
    "units of 4, over them engines of 4 on 6": (6, (*layout(2, 2, ranks=12, engines=3), *engines_of(4), *COLOCATED)),
    "units of 2, engines of 3 on 9": (9, (*layout(2, 2, ranks=12, engines=2), *engines_of(3))),
}
"""The GPUs of a machine, and the options."""


def config_of(name: str) -> ScaledRun:
    """The recipe n8_r3 with a case's options."""
    gpus, options = CASES[name]
    return loaded("minirl/n8_r3", *options, "--cluster.gpus_per_node", str(gpus), "--cluster.num_nodes", str(MOST))


def on(number: int, name: str, folder: Path, limit_s: float) -> Any:
    """[ranks, engines] of each machine that has some, where `number` of them are free; or the refusal."""
    gpus, config = CASES[name][0], config_of(name)
    with others((gpus,) * (MOST - number)), mock.patch.object(ray_cluster, "PLACEMENT_TIMEOUT_S", limit_s):
        try:
            with ray_cluster.cluster(config, folder) as made:
                found = placed(made)
        except ValueError as error:
            return str(error)
    owners = {role: [machine for machine, _ in found[role]] for role in ("rank", "engine")}
    used = sorted({*owners["rank"], *owners["engine"]})
    return [[owners[role].count(machine) for role in ("rank", "engine")] for machine in used]


def measured(folder: Path) -> dict[str, Any]:
    """The ranks and engines on each machine, by the case and the number of machines: the plan's, and one less."""
    sizes = {"num_cpus": 30, "object_store_memory": 80 * 2**20}
    simulated = cluster_utils.Cluster(initialize_head=True, head_node_args=sizes | {"num_cpus": 0, "num_gpus": 0})
    try:
        ray.init(address=simulated.address, log_to_driver=False)
        found: dict[str, Any] = {}
        for gpus in sorted({gpus for gpus, _ in CASES.values()}):
            nodes = [simulated.add_node(wait=False, num_gpus=gpus, **sizes) for _ in range(MOST)]
            simulated.wait_for_nodes()
            for name in (name for name in CASES if CASES[name][0] == gpus):
                need = machines_needed(config_of(name))
                # The first has time to start; the second must be told from one that Ray places late.
                found[name] = {"enough": on(need, name, folder, 30.0), "fewer": on(need - 1, name, folder, 2.0)}
            for node in nodes:
                simulated.remove_node(node, allow_graceful=False)
        return found
    finally:
        ray.shutdown()
        simulated.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback, for a minute
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measured(Path(name))))
