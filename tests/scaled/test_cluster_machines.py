"""Laws of places on machines that Ray simulates: groups that fit share one, and as many suffice as a plan says."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from itertools import permutations
from types import ModuleType
from typing import Any

import pytest

from scaled.config import TrainingBlock
from scaled.plan.machines import stage_sets
from scaled.stages import read_together
from scaled.units import shares
from tests.scaled import eight_machines, few_machines
from tests.scaled.eight_machines import ACTING, CASES, GPUS, JOINED, STAGED

pytestmark = pytest.mark.slow

EACH_CASE = pytest.mark.parametrize("name", CASES)
WIDER = {"EP 16": "EP", "CP 8": "CP", "pieces, EP 16": "EP", "pieces, EP 16, colocated": "EP"}
"""The groups that are larger than a machine."""


def printed(module: ModuleType) -> dict[str, Any]:
    """The module's output, from a process of its own: Ray's simulated cluster is global."""
    # Warnings, too, go to its stderr, which a failure shows.
    done = subprocess.run([sys.executable, "-m", module.__name__], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The places on eight machines."""
    return printed(eight_machines)


@pytest.fixture(scope="module")
def few() -> dict[str, Any]:
    """Those on as many machines as a plan says, and the refusals on one less."""
    return printed(few_machines)


def groups_of(training: TrainingBlock) -> dict[str, list[list[int]]]:
    """The ranks of each group, by Megatron's own numbers; of CP and EP with the TP and ETP groups that they cross."""
    from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

    order = inspect.signature(initialize_model_parallel).parameters["order"].default
    pp, etp, ep = training.pipeline_parallel, training.expert_tensor_parallel, training.expert_parallel
    dense = RankGenerator(
        tp=training.tensor_parallel, ep=1, dp=training.data_parallel, pp=pp, cp=training.context_parallel, order=order
    )
    experts = RankGenerator(tp=etp, ep=ep, dp=training.num_ranks // (etp * ep * pp), pp=pp, cp=1, order=order)
    return {"TP": dense.get_ranks("tp"), "CP": dense.get_ranks("tp-cp"), "EP": experts.get_ranks("tp-ep")}


def crossings(machines: list[int], groups: list[list[int]]) -> int:
    """The machines of each group, added up."""
    return sum(len({machines[rank] for rank in group}) for group in groups)


@EACH_CASE
@pytest.mark.filterwarnings("ignore")  # Megatron-core's at its import
def test_groups_share_a_machine(name: str, found: dict[str, Any]) -> None:
    """Every TP, EP and CP group that fits lies on one machine, whatever others use. Groups that do not fit lie on as
    few as any order of the machines allows."""
    machines = [machine for machine, _ in found[name]["rank"]]
    for kind, groups in groups_of(CASES[name].config().training).items():
        if kind != WIDER.get(name):
            assert crossings(machines, groups) == len(groups), kind
            continue
        assert len(groups[0]) > GPUS
        own = Counter(machines)
        orders = ([m for m in order for _ in range(own[m])] for order in permutations(own))
        assert crossings(machines, groups) == min(crossings(order, groups) for order in orders)


@EACH_CASE
def test_no_machine_has_more_than_its_gpus(name: str, found: dict[str, Any]) -> None:
    """Ranks have one GPU each, engines theirs or none of their own; with those in use they are at most 8 a machine."""
    config, places = CASES[name].config(), found[name]
    is_colocated = config.cluster.placement == "colocated"
    width = config.rollout.tensor_parallel
    assert [num for _, num in places["rank"]] == [1] * config.training.num_ranks
    assert [num for _, num in places["engine"]] == [0 if is_colocated else width] * config.rollout.num_engines
    used = Counter(dict(enumerate(places["taken"])))
    for machine, num in places["rank"] + places["engine"]:
        used[machine] += num
    assert sum(places["taken"]) == sum(CASES[name].taken) and max(used.values()) <= GPUS
    if is_colocated:
        shared = [places["rank"][i * width : (i + 1) * width] for i in range(config.rollout.num_engines)]
        machines = [{machine for machine, _ in ranks} for ranks in shared]
        assert machines == [{machine} for machine, _ in places["engine"]]


def test_actors_see_the_gpus_of_their_places(found: dict[str, Any]) -> None:
    """Each rank sees one GPU of its place's machine, which no other sees; a colocated engine those of its ranks."""
    seen, config = found["seen"], CASES[ACTING].config()
    for role in ("rank", "engine"):
        assert [machine for machine, _ in seen[role]] == [machine for machine, _ in found[ACTING][role]]
    ranks, width = [tuple(rank) for rank in seen["rank"]], config.rollout.tensor_parallel
    assert len(set(ranks)) == config.training.num_ranks
    assert {device for _, device in ranks} <= set(map(str, range(GPUS)))
    for i, (_, devices) in enumerate(seen["engine"]):
        assert devices == ",".join(device for _, device in ranks[i * width : (i + 1) * width])


@EACH_CASE
def test_a_plans_stages_lie_where_the_starts_do(name: str, found: dict[str, Any]) -> None:
    """The machines of the ranks are said as they are. Where all GPUs are free, stages share machines as the plan says:
    of two, each has two machines of its own, and engines cut their records between them."""
    machines, config = found[name]["of ranks"], CASES[name].config()
    assert machines == [machine for machine, _ in found[name]["rank"]]
    if not CASES[name].taken:
        sets = read_together(machines, config.training.pipeline_parallel)
        assert sets == stage_sets(config) == (((0,), (1,)) if name == STAGED else ((0,),))


def test_several_machines_do_not_meet_on_loopback(found: dict[str, Any]) -> None:
    """Neither in a cluster that the run joins, nor in one to which its process is connected and no config refers."""
    assert CASES.keys() - {JOINED}
    assert [name for name in CASES if found[name]["is_alone"]] == []


def test_what_no_machine_has_free_is_said(found: dict[str, Any]) -> None:
    """Seven GPUs are free on each machine, more in all than the run needs, and a bundle of its ranks needs eight."""
    assert found["refusal"] == (
        "cluster.address: expected 4 x (8 CPUs and 8 GPUs), 8 x (1 CPUs and 2 GPUs) free, each on one machine, got no "
        "placement within 2 s"
    )


@pytest.mark.parametrize("name", few_machines.CASES)
def test_a_plans_machines_are_those_that_a_start_needs(name: str, few: dict[str, Any]) -> None:
    """Ray places a run on as many free machines as the plan says, each with the ranks and engines that it says, and on
    one less none."""
    planned = shares(few_machines.config_of(name), few_machines.CASES[name][0])
    assert sorted(few[name]["enough"]) == sorted([own.ranks, own.engines] for own in planned)
    assert few[name]["fewer"].endswith("each on one machine, got no placement within 2 s")
