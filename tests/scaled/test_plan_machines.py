"""Bytes in the object stores of machines of each kind, as a real Ray counts them, beside the plan's count."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from scaled.config import ScaledRun
from scaled.plan.host_memory import host_memory
from scaled.plan.machines import layer_shares, machines, rank_numbers, stage_sets, with_ranks
from scaled.plan.payloads import feature_bytes, router_logit_bytes, routing_bytes
from scaled.plan.records import compared_logits, dealt, features, likeliest_tokens, router_scores, routes
from scaled.plan.summary import metric_payloads, step_payloads
from tests.scaled import three_machines
from tests.scaled.plan_world import MOONLIGHT, QWEN, loaded


def recipe(*words: str) -> ScaledRun:
    """The Qwen3-30B recipe with R3, changed."""
    return loaded("qwen3_30b_a3b", "--algorithm.replay.mode", "R3", *words)


def lagging(*words: str) -> ScaledRun:
    """R3, one step off, with a batch of `three_machines`."""
    return recipe(
        "--schedule.steps_off", "1",
        "--algorithm.batch.num_prompts", str(three_machines.RESPONSES // 2), "--algorithm.batch.num_responses", "2",
        *words,
    )  # fmt: skip


def test_machines_have_ranks_engines_or_both() -> None:
    """Units of ranks fill machines first, and engines the GPUs that they leave; their shares add up to 1."""

    def kinds(config: ScaledRun) -> list[tuple[bool, float]]:
        return [(machine.has_ranks, machine.engine_share) for machine in machines(config, QWEN)]

    assert kinds(lagging()) == [(True, 0.0), (False, 0.25)]
    assert kinds(lagging("--cluster.gpus_per_node", "64")) == [(True, 1.0)]
    mixed = lagging("--cluster.gpus_per_node", "20")  # 4 units of 8, 16 engines of 2: 16 + 4 | 16 + 4 | 20 | 4
    assert kinds(mixed) == [(True, 0.125), (False, 0.625), (False, 0.125)]
    assert rank_numbers(mixed) == [16, 16] and rank_numbers(lagging("--cluster.gpus_per_node", "12")) == [8] * 4
    together = ("--cluster.placement", "colocated", "--schedule.steps_off", "0", "--rollout.num_engines", "8")
    assert kinds(lagging(*together)) == [(True, 0.5), (True, 0.0)]


def test_a_machine_reads_the_layers_of_its_stages() -> None:
    """Of mu's records a machine of one of PP stages reads their part of the layers, of the responses that are dealt to
    it at this stage. One with ranks of two stages reads both, and where all machines do, layers are not cut."""

    def read(*words: str) -> list[float]:
        config = recipe("--algorithm.replay.mode", "none", *words)
        shared = 2 / with_ranks(config)  # old's and pi's routes
        every, whole = machines(config, QWEN), routing_bytes(QWEN, 1024 * 34_816)
        return [routes(one, config, QWEN, 34_816) / whole - shared for one in every if one.has_ranks]

    def staged(num: int, *words: str) -> list[float]:
        return read("--training.pipeline_parallel", str(num), *words)

    assert read() == pytest.approx([1 / 4])
    assert staged(2) == staged(4) == pytest.approx([1 / 4])  # two machines a stage, and one
    assert staged(4, "--training.expert_parallel", "4", "--cluster.gpus_per_node", "16") == pytest.approx([1 / 2])
    assert staged(2, "--cluster.gpus_per_node", "32") == pytest.approx([1])
    # Of 12 ranks a stage, 8 are on its own machine and 4 on the one between.
    uneven = ("--training.num_ranks", "24", "--training.expert_parallel", "4", "--cluster.gpus_per_node", "8")
    assert staged(2, *uneven) == pytest.approx([1 / 3] * 2)
    centred = ("--algorithm.objective.centering", "top_k", "--algorithm.objective.centering_k", "8")
    config = recipe("--training.pipeline_parallel", "2", *uneven, *centred)
    found = [(one.reads, one.dealt_last) for one in machines(config, QWEN) if one.has_ranks]
    full, half = ((1 / 2, 2 / 3),), ((1 / 2, 1 / 3),) * 2
    assert found == [(full, 0), (half, 1 / 3), (full, 2 / 3)]


def test_objects_of_fewer_layers_have_more_responses() -> None:
    """Half of the layers of a response of one MiB shares an object with another response's; and an answer's 256
    places are shared out over the kinds of both sets: under Pr3 each has 42, for 64 responses."""
    small = recipe("--training.pipeline_parallel", "2", "--algorithm.replay.mode", "R2")
    for tokens, together in ((5_462, 1), (2_731, 2), (1_366, 4)):  # 2**20 / 192 = 5,461.3
        of_ranks, whole = machines(small, QWEN)[0], routing_bytes(QWEN, 1024 * tokens)
        share = routes(of_ranks, small, QWEN, tokens) / whole - 2 / 4
        assert share == pytest.approx((1 - (1 / 2) ** together) / 2), tokens
    batch = ("--algorithm.batch.num_prompts", "16", "--algorithm.batch.num_responses", "64")
    for num, together in ((1, 1), (2, 2)):
        predicted = recipe(
            "--algorithm.replay.mode", "Pr3", "--training.pipeline_parallel", str(num), "--training.num_ranks",
            str(32 * num), *batch,
        )  # fmt: skip
        whole = feature_bytes(QWEN, 2048, 1024)
        share = features(machines(predicted, QWEN)[0], predicted, QWEN, 34_816) / whole
        assert share == pytest.approx((1 - (3 / 4) ** together) / num), num


def test_dense_layers_have_no_routes_to_read() -> None:
    """Of Moonlight's 27 layers the first is dense: its stage's machine reads 8 of 26, the others 9."""
    words = ("--training.num_ranks", "24", "--training.pipeline_parallel", "3", "--training.expert_parallel", "8")
    found = layer_shares(recipe(*words), MOONLIGHT, stage_sets(recipe(*words)))
    assert found == pytest.approx([8 / 26, 9 / 26, 9 / 26])


def test_mus_likeliest_tokens_are_on_the_last_stages_machines() -> None:
    """The first stage reads none of them, nor of old's."""
    words = ("--algorithm.objective.centering", "top_k", "--algorithm.objective.centering_k", "8")
    config = recipe("--training.pipeline_parallel", "4", *words)
    found = [likeliest_tokens(one, config, QWEN, 34_816) for one in machines(config, QWEN) if one.has_ranks]
    assert found == [0, 1024 * 32_768 * 8 * (8 + 4)]


def test_routes_are_counted_where_they_are_stored():
    """A machine of ranks has mu's records of the responses that are dealt to it, in the old pass and again in the
    updates that replay them, and its share of the ranks' own: two where old routes naturally, three where it replays or
    predicts. One of engines has its share of what they sampled, also of each batch ahead; a machine of both has both.
    Without replay there are as many as under R2, since engines and ranks record unasked; without experts none."""
    config = recipe()
    responses = config.algorithm.batch.num_prompts * config.algorithm.batch.num_responses
    one = routing_bytes(QWEN, responses * 34_816)
    assert one == responses * 34_816 * 48 * 8

    def stored(*words: str) -> list[float]:
        changed = recipe(*words)
        return [routes(machine, changed, QWEN, 34_816) / one for machine in machines(changed, QWEN)]

    num = -(-config.training.num_ranks // 8)
    assert stored() == pytest.approx([1 / num + 3 / num, 1 / num])  # 16 engines of 2 GPUs are on 4 machines
    for mode in ("R2", "none"):
        assert stored("--algorithm.replay.mode", mode)[0] == pytest.approx(1 / num + 2 / num)
    # Of what others made, a machine reads in the updates as much as is dealt to it.
    several, again = ("--algorithm.batch.num_minibatches", "4"), (1 - 1 / num) / num
    assert stored(*several)[0] == pytest.approx(1 / num + again + 3 / num)
    for mode in ("R2", "none"):
        assert stored("--algorithm.replay.mode", mode, *several)[0] == pytest.approx(1 / num + 2 / num + again)
    assert stored("--algorithm.replay.mode", "Pr2", *several)[0] == pytest.approx(1 / num + 3 / num + again)
    for k in (1, 3):
        ahead = ("--schedule.steps_off", str(k), "--schedule.max_staleness", str(k))
        apart = recipe("--cluster.placement", "separate", *ahead)
        assert stored("--cluster.placement", "separate", *ahead) == pytest.approx([4 / num, (1 + k) / 4])
        most = max(stored("--cluster.placement", "separate", *ahead))
        assert max(host_memory(apart, QWEN).parts["routing records"] / one, 4 / num) == pytest.approx(most)
        assert stored("--cluster.gpus_per_node", "64", "--cluster.num_nodes", "1", *ahead) == pytest.approx([1 + k + 3])
    wide = ("--training.num_ranks", "16", "--training.expert_parallel", "8", "--cluster.num_nodes", "2")
    assert stored(*wide)[0] == pytest.approx(1 / 2 + 3 / 2)
    colocated = ("--cluster.placement", "colocated", "--cluster.num_nodes", "4", "--rollout.num_engines", "16")
    assert stored(*colocated) == pytest.approx([1 / 4 + (1 - 1 / 4) / num + 3 / num])
    dense = replace(QWEN, dense_layers=tuple(range(48)))
    assert "routing records" not in host_memory(config, dense).parts
    for shape, found in ((QWEN, one), (dense, None)):
        unreplayed = recipe("--algorithm.replay.mode", "none")
        assert step_payloads(unreplayed, shape).get("mu's routing records, int8") == found
        assert metric_payloads(unreplayed, shape).get("transfer/routes_bytes") == found


def test_small_responses_share_an_object() -> None:
    """An object has at least a MiB: where responses have less, a machine fetches the others in it, too. A part that the
    replicas of a machine share is dealt to it as a whole."""
    config = recipe()
    (of_ranks, _), responses = machines(config, QWEN), 1024
    for tokens, together in ((2_731, 1), (2_730, 2), (700, 4), (170, 16), (1, 16)):  # 2**20 / 384 = 2,730.7
        share = routes(of_ranks, config, QWEN, tokens) / routing_bytes(QWEN, responses * tokens) - 3 / 4
        assert share == pytest.approx(1 - (3 / 4) ** together), tokens
    assert [dealt(recipe(*words)) for words in (
        (), ("--training.tensor_parallel", "1"), ("--training.context_parallel", "4"),
        ("--training.pipeline_parallel", "2"), ("--training.pipeline_parallel", "4"), ("--cluster.gpus_per_node", "4"),
    )] == [1 / 4, 1 / 4, 1 / 2, 1 / 2, 1, 1 / 8]  # fmt: skip


def test_what_updates_read_of_old_is_fetched_as_it_is_dealt() -> None:
    """Logits, router scores and likeliest tokens of the old pass stay where they were made, if there is one mini-batch;
    with several a machine fetches its objects of the other three's."""
    shifted = ("--algorithm.objective.correction.name", "token_tis", "--algorithm.objective.router_shift_floor", "0.8")
    centred = ("--algorithm.objective.centering", "top_k", "--algorithm.objective.centering_k", "8")
    for num, others in ((1, 0), (2, 3 / 4)):
        several = ("--algorithm.batch.num_minibatches", str(num))
        config, tokens = recipe(*shifted, *several), recipe(*centred, *several)
        of_ranks, of_engines = machines(config, QWEN)
        # A rank has a fourth of the 64 rows of a response, 0.4 MB: three share an object.
        logits = compared_logits(of_ranks, config, QWEN, False) / router_logit_bytes(QWEN, 2**16)
        assert logits == pytest.approx((1 + others * (1 - (3 / 4) ** 3) / (1 / 4)) / 4)
        scores = router_scores(of_ranks, config, QWEN, 34_816, False) / routing_bytes(QWEN, 1024 * 34_816, 4)
        assert scores == pytest.approx((1 + others) / 4)
        assert compared_logits(of_engines, config, QWEN, True) == 0
        # Mu's take 8 bytes per token and place, old's 4.
        found = likeliest_tokens(machines(tokens, QWEN)[0], tokens, QWEN, 34_816) / (1024 * 32_768 * 8 * 4)
        assert found == pytest.approx((2 + 1) * (1 + others) / 4)


@pytest.fixture(scope="module")
def stores() -> dict[str, float]:
    """The contents of three machines' stores, from a process of its own: Ray's simulated cluster is global."""
    words = [sys.executable, "-m", three_machines.__name__]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("mode", "num_minibatches"), [("R3", 1), ("R3", 2), ("R2", 2)])
def test_three_machines_hold_what_is_counted(mode: str, num_minibatches: int, stores: dict[str, float]) -> None:
    """Engines on one machine and a rank on each of two others, one step off: the engines' store has both batches. A
    rank's has mu's routes of its own responses, not of all, and the experts that its own pass used and would have
    chosen. An update whose responses are dealt anew fetches those that it lacks of what it replays, and no others'
    natural experts; all to 1%."""
    ones = ("training.tensor_parallel", "training.expert_parallel", "rollout.num_engines",
            "rollout.tensor_parallel", "cluster.gpus_per_node")  # fmt: skip
    sizes = ("--training.num_ranks", "2", "--algorithm.batch.num_minibatches", str(num_minibatches))
    words = (*(word for name in ones for word in (f"--{name}", "1")), *sizes, "--algorithm.replay.mode", mode)
    config, tokens = lagging(*words), three_machines.TOKENS
    rows = routing_bytes(QWEN, three_machines.RESPONSES * tokens)
    planned = [routes(machine, config, QWEN, tokens, has_updates=False) / rows for machine in machines(config, QWEN)]
    # R2's ranks read here what R3's did before.
    done = {("R3", 1): "old", ("R3", 2): "R3", ("R2", 2): "R2"}[mode, num_minibatches]
    before = {"old": 0, "R3": 0, "R2": 1 / 4 + 1 / 2}[done]  # mu's again, and natural experts
    assert planned == pytest.approx({"old": [3 / 2, 2], "R3": [7 / 4, 2], "R2": [5 / 4, 2]}[done])
    for i in range(2):
        assert stores[f"{done}, ranks {i}"] - before == pytest.approx(planned[0], rel=0.01)
    assert stores[f"{done}, engines"] == pytest.approx(planned[1], rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("done", "num_minibatches"), [("old", 1), ("R3", 2)])
def test_machines_hold_the_layers_of_their_stage(done: str, num_minibatches: int, stores: dict[str, float]) -> None:
    """Two stages of one replica, with two runs of layers each, on a machine each: of mu's routes each has the layers of
    its stage, of all responses, and in updates no more; all to 0.1%."""
    training = {**three_machines.STAGED, "tensor_parallel": 1, "expert_parallel": 1}
    fields = {f"training.{name}": value for name, value in training.items()}
    fields |= {"training.max_tokens_per_micro_batch": "null", "rollout.num_engines": 1, "rollout.tensor_parallel": 1}
    fields |= {"cluster.gpus_per_node": 1, "algorithm.batch.num_minibatches": num_minibatches}
    config = lagging(*(word for name, value in fields.items() for word in (f"--{name}", str(value))))
    tokens = three_machines.TOKENS
    rows = routing_bytes(QWEN, three_machines.RESPONSES * tokens)
    planned = [routes(machine, config, QWEN, tokens, has_updates=False) / rows for machine in machines(config, QWEN)]
    assert planned == pytest.approx([3 / 2, 2])
    for name, expected in (("ranks 0", planned[0]), ("ranks 1", planned[0]), ("engines", planned[1])):
        assert stores[f"PP2 {done}, {name}"] == pytest.approx(expected, rel=0.001)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_push_does_not_go_through_the_drivers_machine(stores: dict[str, float]) -> None:
    """Weights stay where a rank put them until an engine fetches them: none on the driver's machine, to 1%."""
    assert stores["push, ranks 0"] == pytest.approx(1, rel=0.01)
    for name in ("engines", "ranks 1"):
        assert stores[f"push, {name}"] == pytest.approx(0, abs=0.01)
