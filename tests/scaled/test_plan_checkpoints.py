"""Laws of a checkpoint's host memory: the plan counts the memory that Megatron-core's ranks allocate, where they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sandbox.bench.memory import peak_bytes
from sandbox.model import ModelConfig, MoE, checkpoint
from scaled.config import ModelBlock, ScaledRun, TrainingBlock
from scaled.model_shape import load_shape
from scaled.plan import feasibility
from scaled.plan.engine_memory import engine_weights
from scaled.plan.hardware import gpu_named
from scaled.plan.host_memory import (
    LAST_PUSH,
    host_memory,
    host_pools,
    in_memory,
    loading_memory,
    peak_host_memory,
    saving,
    stored_on,
)
from scaled.plan.machines import machines as plan_machines
from scaled.plan.memory import GIB
from tests.scaled.megatron_world import free_ports, in_turn, spawn
from tests.scaled.plan_world import QWEN, loaded
from tests.scaled.rank_world import algorithm, training
from theory.streams import stream

MEASURED: dict[str, dict[str, Any]] = {
    "DP2, bf16": {"distributed_optimizer": True, "precision": "bf16"},
    "EP2": {"distributed_optimizer": True, "expert_parallel": 2},
    "PP2": {"distributed_optimizer": True, "pipeline_parallel": 2},
    "DP2, whole": {"precision": "bf16"},
}


def write_model(folder: Path) -> Path:
    """A Hugging Face folder of a model so large that the padding of Megatron's buffers does not count."""
    sizes = {"vocab_size": 2048, "hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    config = ModelConfig(**sizes, head_dim=32, num_experts=8, experts_per_token=2, expert_size=128)
    folder.mkdir()
    checkpoint.save(MoE(config, stream(0, "checkpoint-memory")), folder)
    return folder


def measure(rank: int, folder: Path, root: Path, ports: list[int]) -> dict[str, tuple[int, int, int]]:
    """On one rank, the peak bytes of a save, of the beginning of an asynchronous one, and of a load, by layout."""
    from scaled.megatron_engine.rank import MegatronRank

    def act(name: str, layout: TrainingBlock) -> tuple[int, int, int]:
        engine = MegatronRank(ModelBlock(path=str(folder)), layout, algorithm("R3"))
        for one in engine.optimizer.megatron.chained_optimizers:
            one.init_state_fn(one.optimizer, one.config)  # AdamW's states, which a checkpoint does not add
        saved = peak_bytes(lambda: engine.save(root / name))
        begun = peak_bytes(lambda: engine.begin_save(root / f"{name} begun"))
        assert engine.has_saved(wait=True)
        return saved, begun, peak_bytes(lambda: engine.load(root / name))

    return in_turn(rank, {name: training(2, **fields) for name, fields in MEASURED.items()}, ports, act)


def counted(name: str, shape: Any, gpus_per_node: int) -> tuple[int, int, int]:
    """The same by the plan, with that many ranks on a machine: those of the machine that has most."""
    config = ScaledRun.model_construct(
        training=training(2, **MEASURED[name]),
        algorithm=loaded("qwen3_30b_a3b").algorithm,
        cluster=loaded("qwen3_30b_a3b").cluster.model_copy(update={"gpus_per_node": gpus_per_node}),
        checkpoint=loaded("qwen3_30b_a3b").checkpoint,
        # Engines that a machine of one GPU has room for; they have no part in a checkpoint.
        rollout=loaded("qwen3_30b_a3b").rollout.model_copy(update={"tensor_parallel": 1}),
    )
    found = [
        sum(saving(config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=own)}), shape).values())
        for own in ({"asynchronous": False}, {"asynchronous": True})
    ]
    read = loading_memory(config, shape).parts
    return found[0], found[1], sum(size for part, size in read.items() if part != LAST_PUSH)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, tuple[int, int, int]]]]:
    root = tmp_path_factory.mktemp("checkpoint-memory")
    folder = write_model(root / "model")
    return load_shape(folder), spawn(2, measure, folder, root, free_ports(len(MEASURED)), limit_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_ranks_allocate_what_is_counted(name: str, measured: Any) -> None:
    """A save, the beginning of an asynchronous one and a load, at their peaks, on one machine and on two.

    Copies and loads agree to 0.3 MB for each rank: descriptions of pieces, which gloo's threads let go of when they
    come to it. A synchronous save has no copies: it takes less than half of what they take in the smaller rank, and
    that is such descriptions and the writer's copy of one piece (measured: 6.0 MB at most, of 16.9).
    """
    shape, ranks = measured
    for gpus_per_node, of_machines in ((1, max), (2, sum)):
        found = [of_machines(rank[name][kind] for rank in ranks) for kind in range(3)]
        saved, begun, read = counted(name, shape, gpus_per_node)
        slack = 0.3e6 * gpus_per_node
        assert saved == 0
        assert found[1] == pytest.approx(begun, abs=slack)
        assert found[2] == pytest.approx(read, abs=slack)
    if MEASURED[name].get("distributed_optimizer"):
        assert max(rank[name][0] for rank in ranks) < min(rank[name][1] for rank in ranks) / 2


def test_every_rank_copies_its_own_shard() -> None:
    """An asynchronous save copies 12 bytes of states a weight, and 2 of the weight, over all machines; the states are
    spread evenly, the weights are where the first ranks are. A synchronous one has no copies."""
    copy = "copy of a checkpoint that is being written"
    words = ["--training.tensor_parallel", "1", "--training.expert_parallel", "8"]
    n = QWEN.num_parameters
    for machines in (1, 2, 4):
        ranks = ["--training.num_ranks", str(8 * machines), "--cluster.num_nodes", str(machines)]
        plain = loaded("qwen3_30b_a3b", *words, *ranks)
        config = loaded("qwen3_30b_a3b", *words, *ranks, "--checkpoint.asynchronous", "true")
        assert saving(plain, QWEN) == {}
        assert saving(config, QWEN)[copy] == pytest.approx((2 + 12 / machines) * n, rel=1e-6)
        whole = loaded("qwen3_30b_a3b", *words, *ranks, "--training.distributed_optimizer", "false",
                       "--checkpoint.asynchronous", "true")  # fmt: skip
        assert saving(whole, QWEN)[copy] == (2 + 12) * n
    # Ranks make way for engines before they load, so that what they offload lies beside what they read.
    awake = "optimizer states while engines are awake"
    assert awake not in loading_memory(config, QWEN).parts
    offloaded = config.model_copy(update={"training": config.training.model_copy(update={"offload": ("optimizer",)})})
    assert loading_memory(offloaded, QWEN).parts[awake] == host_memory(offloaded, QWEN).parts[awake] > 0
    parts = host_memory(config, QWEN).parts
    assert saving(config, QWEN).items() <= parts.items()


COPIED = ("--checkpoint.asynchronous", "true", "--cluster.host_gib", "null")
MACHINE = ("--training.tensor_parallel", "1", "--training.expert_parallel", "8")


def peak_of(*words: str) -> int:
    return peak_host_memory(loaded("qwen3_30b_a3b", *MACHINE, *words), QWEN).total


def test_a_machine_that_is_too_small_is_a_misfit() -> None:
    """The host memory of a machine is checked where the config states it: the line has need, largest part and limit,
    and what it offers fits. No former config has another hash for the field."""
    gpu, plain = gpu_named("H100-80GB"), loaded("qwen3_30b_a3b", *MACHINE, *COPIED)
    need = peak_of(*COPIED) / GIB
    assert plain.cluster.host_gib is None
    assert "host_gib" not in plain.model_dump(mode="json", exclude_none=True)["cluster"]  # what is hashed
    assert feasibility.misfits(plain, QWEN, gpu) == []
    enough, less = (f"{need + more:.3f}" for more in (0.01, -0.01))
    assert (
        feasibility.misfits(loaded("qwen3_30b_a3b", *MACHINE, *COPIED, "--cluster.host_gib", enough), QWEN, gpu) == []
    )
    (line,) = feasibility.misfits(loaded("qwen3_30b_a3b", *MACHINE, *COPIED, "--cluster.host_gib", less), QWEN, gpu)
    said = r"cluster\.host_gib: expected at least (\S+) GiB for a step and its checkpoint, of which \S+ are copy "
    found = re.fullmatch(said + r"of .*, got \S+; fits with (checkpoint\.\S+) (\S+) \((\S+) GiB\).*", line)
    assert found is not None, line
    assert float(found[1]) == pytest.approx(need, abs=0.06)
    assert float(found[4]) < need
    assert peak_of(f"--{found[2]}", found[3]) / GIB == pytest.approx(float(found[4]), abs=0.06)


def test_what_spills_takes_no_memory() -> None:
    """The object store counts with its content, and with its size where the content exceeds it; a cluster that runs
    already has a store of an unknown size."""
    words = (*MACHINE, "--algorithm.replay.mode", "Pr2")
    plain = loaded("qwen3_30b_a3b", *words)
    # The machine that needs most: its ranks keep features, and buckets outside.
    of_ranks = plan_machines(plain, QWEN)[0]
    stored = sum(stored_on(of_ranks, plain, QWEN, None, has_updates=True).values())

    def step(*more: str) -> int:
        config = loaded("qwen3_30b_a3b", *words, *more)
        return in_memory(config, host_pools(config, QWEN)[0]).total

    roomy, small = (step("--cluster.object_store_gib", str(gib)) for gib in (1000, 20))
    assert roomy - small == stored - 20 * GIB > 0
    assert step("--cluster.object_store_gib", "20", "--cluster.address", "auto") == roomy


def test_loading_may_be_what_a_machine_must_hold() -> None:
    """Where a step's records are small, the load is the larger: the reader's copies of an embedding in each rank, and
    the engines' weights that the machine keeps in the store."""
    words = (*MACHINE, "--training.num_ranks", "8", "--cluster.placement", "colocated", "--cluster.num_nodes", "1")
    engines = ("--rollout.num_engines", "4", "--rollout.tensor_parallel", "2", "--algorithm.batch.num_prompts", "8")
    config = loaded("qwen3_30b_a3b", *words, *engines)
    step, load = host_pools(config, QWEN)
    assert step.total < load.total == peak_host_memory(config, QWEN).total
    table = QWEN.vocab_size * QWEN.hidden_size
    assert load.parts == {LAST_PUSH: engine_weights(config, QWEN), "the reader's copies of a tensor": 8 * 2 * 4 * table}
