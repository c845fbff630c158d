"""Bytes in the object stores of machines of each kind, as a real Ray counts them, beside the plan's count."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from scaled.config import ScaledRun
from scaled.plan.host_memory import host_memory, stored_routes
from scaled.plan.machines import Machine, machines, rank_numbers
from scaled.plan.payloads import routing_bytes
from scaled.plan.summary import metric_payloads, step_payloads
from tests.scaled import two_machines
from tests.scaled.plan_world import QWEN, loaded


def recipe(*words: str) -> ScaledRun:
    """The Qwen3-30B recipe with R3, changed."""
    return loaded("qwen3_30b_a3b", "--algorithm.replay.mode", "R3", *words)


def lagging(*words: str) -> ScaledRun:
    """R3, one step off, with a batch of `two_machines`."""
    return recipe(
        "--schedule.steps_off", "1",
        "--algorithm.batch.num_prompts", str(two_machines.RESPONSES // 2), "--algorithm.batch.num_responses", "2",
        *words,
    )  # fmt: skip


def test_machines_have_ranks_engines_or_both() -> None:
    """Units of ranks fill machines first, and engines the GPUs that they leave; their shares add up to 1."""
    assert machines(lagging()) == (Machine(True, 0.0), Machine(False, 0.25))
    assert machines(lagging("--cluster.gpus_per_node", "64")) == (Machine(True, 1.0),)
    mixed = lagging("--cluster.gpus_per_node", "20")  # 4 units of 8, 16 engines of 2: 16 + 4 | 16 + 4 | 20 | 4
    assert machines(mixed) == (Machine(True, 0.125), Machine(False, 0.625), Machine(False, 0.125))
    assert rank_numbers(mixed) == [16, 16] and rank_numbers(lagging("--cluster.gpus_per_node", "12")) == [8] * 4
    together = ("--cluster.placement", "colocated", "--schedule.steps_off", "0", "--rollout.num_engines", "8")
    assert machines(lagging(*together)) == (Machine(True, 0.5), Machine(True, 0.0))


def test_routes_are_counted_where_they_are_stored():
    """A machine of ranks has mu's record and its share of the ranks' own: two where old routes naturally, three where
    it replays or predicts. One of engines has its share of what they sampled, also of each batch ahead; a machine of
    both has both. Without replay there are as many as under R2, since engines and ranks record unasked; without experts
    none."""
    config = recipe()
    responses = config.algorithm.batch.num_prompts * config.algorithm.batch.num_responses
    one = routing_bytes(QWEN, responses * 34_816)
    assert one == responses * 34_816 * 48 * 8

    def stored(*words: str) -> float:
        return host_memory(recipe(*words), QWEN).parts["routing records"] / one

    num = -(-config.training.num_ranks // 8)
    assert stored() == pytest.approx(1 + 3 / num)
    for mode in ("R2", "none"):
        assert stored("--algorithm.replay.mode", mode) == pytest.approx(1 + 2 / num)
    for k in (1, 3):
        ahead = ("--schedule.steps_off", str(k), "--schedule.max_staleness", str(k))
        apart = recipe("--cluster.placement", "separate", *ahead)
        routes = [stored_routes(machine, apart, QWEN, 34_816) / one for machine in machines(apart)]
        assert routes == pytest.approx([1 + 3 / num, (1 + k) / 4])  # 16 engines of 2 GPUs are on 4 machines
        assert stored("--cluster.placement", "separate", *ahead) == pytest.approx(max(routes))
        assert stored("--cluster.gpus_per_node", "64", "--cluster.num_nodes", "1", *ahead) == pytest.approx(1 + k + 3)
    wide = ("--training.num_ranks", "16", "--training.expert_parallel", "8", "--cluster.num_nodes", "2")
    assert stored(*wide) == pytest.approx(1 + 3 / 2)
    dense = replace(QWEN, dense_layers=tuple(range(48)))
    assert "routing records" not in host_memory(config, dense).parts
    for shape, found in ((QWEN, one), (dense, None)):
        unreplayed = recipe("--algorithm.replay.mode", "none")
        assert step_payloads(unreplayed, shape).get("mu's routing records, int8") == found
        assert metric_payloads(unreplayed, shape).get("transfer/routes_bytes") == found


@pytest.fixture(scope="module")
def two_stores() -> dict[str, float]:
    """The contents of two machines' stores, from a process of its own: Ray's simulated cluster is global."""
    words = [sys.executable, "-m", two_machines.__name__]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_two_machines_hold_what_is_counted(two_stores: dict[str, float]) -> None:
    """Engines on one machine and ranks on another, one step off: the engines' store has both batches, and the ranks'
    the batch that they fetched and their own two records, to 1%."""
    ones = ("training.num_ranks", "training.tensor_parallel", "training.expert_parallel", "rollout.num_engines",
            "rollout.tensor_parallel", "cluster.gpus_per_node")  # fmt: skip
    config = lagging(*(word for name in ones for word in (f"--{name}", "1")))
    rows = routing_bytes(QWEN, two_machines.RESPONSES * two_machines.TOKENS)
    planned = [stored_routes(m, config, QWEN, two_machines.TOKENS, has_updates=False) / rows for m in machines(config)]
    assert planned == [3, 2]
    assert [two_stores["ranks"], two_stores["engines"]] == pytest.approx(planned, rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_push_does_not_go_through_the_drivers_machine(two_stores: dict[str, float]) -> None:
    """Weights stay where a rank put them until an engine fetches them: none on the driver's machine, to 1%."""
    assert two_stores["push, ranks"] == pytest.approx(1, rel=0.01)
    assert two_stores["push, engines"] == pytest.approx(0, abs=0.01)
