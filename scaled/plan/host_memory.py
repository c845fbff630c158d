"""CPU memory of one machine in a global step, in bytes, and the part of it that lies in Ray's object store.

The machine is the one that has most: with ranks, with engines, or with both. memory.py has the memory of the GPUs.

A checkpoint is written from where its tensors are, piece by piece, each rank its own shard of the optimizer states
(`megatron_engine.optimizer_shards`), and read into where they belong. So only copies count: those of an asynchronous
save, and those of a reader. tests/scaled/test_plan_checkpoints.py measures both. What a process needs besides (Python,
torch, CUDA: some GiB each) is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from lab.hf import ModelShape
from scaled.config import ScaledRun, TrainingBlock
from scaled.plan import engine_memory, records
from scaled.plan.machines import Machine, machines, rank_numbers, with_ranks
from scaled.plan.memory import GIB, Memory
from scaled.plan.parameters import ELEMENT_BYTES, most_optimizer_bytes, rank_parameters

STORED = (
    "router logits that are compared", "routing records", "router features", "router scores of old and pi",
    "weights that wait for engines", "mu's likeliest tokens",
)  # fmt: skip
"""The parts of host memory that lie in the object store."""

LAST_PUSH = "the weights of the last push"
"""Weights in the object store, which an engine's replacement loads."""

STATE_BYTES = 12
"""Bytes per weight of a checkpoint's optimizer states, where masters are not the weights: with two moments, in fp32."""


def stored_bytes(config: ScaledRun, shape: ModelShape, num_tokens: int | None = None) -> dict[str, int]:
    """Bytes in the object store of the machine that has most at a push, by name: those of the step, and the weights
    that engines load.

    The updates' own records are gone by then, unless training continues during the push (from two steps off on).
    Sequences have `num_tokens` tokens on average, by default full length.
    """
    return _most_stored(config, shape, num_tokens, has_updates=config.schedule.steps_off > 1)


def most_stored_bytes(config: ScaledRun, shape: ModelShape, num_tokens: int | None = None) -> dict[str, int]:
    """The same after the last update of a step, when the store holds most."""
    return _most_stored(config, shape, num_tokens, has_updates=True)


def _most_stored(
    config: ScaledRun, shape: ModelShape, num_tokens: int | None, has_updates: bool
) -> dict[str, int]:  # fmt: skip
    found = [stored_on(machine, config, shape, num_tokens, has_updates) for machine in machines(config, shape)]
    return max(found, key=lambda parts: sum(parts.values()))


def stored_on(
    machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int | None, has_updates: bool
) -> dict[str, int]:
    """The same on this machine, after a step's last update or without the records of its updates."""
    parts = _of_step(machine, config, shape, num_tokens, has_updates)
    return {name: parts[name] for name in STORED if name in parts} | _pushed(machine, config, shape)


def _pushed(machine: Machine, config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """Engines fetch all weights to their machine; those of ranks have what their ranks sent."""
    whole = engine_memory.engine_weights(config, shape)
    return {LAST_PUSH: whole if machine.engine_share else -(-whole // with_ranks(config))}


def host_memory(config: ScaledRun, shape: ModelShape, num_tokens: int | None = None) -> Memory:
    """CPU memory of the machine that needs most for a global step of sequences of `num_tokens` tokens on average.

    By default that is the worst case, rollout.max_model_len. Parts of a checkpoint are those of the machine of ranks
    that has most of it (`saving`), all others those after the last update.

    Routes, features, scores and likeliest tokens are those of `records`, once on a machine, in memory that its ranks
    share; the driver has none of them. Its own copy of the sampled tokens, on its machine, is not counted.
    """
    return _largest("host", [_in_step(machine, config, shape, num_tokens) for machine in machines(config, shape)])


def _in_step(machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int | None) -> dict[str, int]:
    """A machine's bytes of a step and its checkpoint, without the weights of the last push."""
    step = _of_step(machine, config, shape, num_tokens, has_updates=True)
    return step | saving(config, shape) if machine.has_ranks else step


def _largest(where: str, found: list[dict[str, int]]) -> Memory:
    return max((Memory(where, parts) for parts in found), key=lambda memory: memory.total)


def _of_step(
    machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int | None, has_updates: bool
) -> dict[str, int]:
    """A machine's bytes after the old pass, with the answers of all updates or with none."""
    algorithm, parts = config.algorithm.build(), dict[str, int]()
    length = config.rollout.max_model_len if num_tokens is None else num_tokens
    if shape.moe_layers:
        # In every mode: engines and ranks record without being asked, and metrics compare the records.
        parts["routing records"] = records.routes(machine, config, shape, length, has_updates)
        parts["router logits that are compared"] = records.compared_logits(machine, config, shape, has_updates)
    if algorithm.passes.trains_predictor:
        parts["router features"] = records.features(machine, config, shape, length)
    if algorithm.objective.num_top > 0:
        parts["mu's likeliest tokens"] = records.likeliest_tokens(machine, config, shape, length)
    if algorithm.objective.uses_router_shift:
        parts["router scores of old and pi"] = records.router_scores(machine, config, shape, length, has_updates)
    found = {name: size for name, size in parts.items() if size > 0}
    return found | (_of_ranks(config, shape) if machine.has_ranks else {})


def _of_ranks(config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """The bytes of a step that machines of ranks alone have, besides its records."""
    parts, num_machines = dict[str, int](), with_ranks(config)
    if config.schedule.steps_off > 1:
        # Without the version that engines hold, which every run keeps in the store for an engine's replacement.
        waiting = (config.schedule.steps_off - 1) * engine_memory.engine_weights(config, shape)
        parts["weights that wait for engines"] = -(-waiting // num_machines)
    num_ranks = max(rank_numbers(config))
    # Of weights that come from a GPU or are quantised; the memory is kept from push to push.
    parts["buckets that ranks keep"] = num_ranks * engine_memory.bucket_bytes(config, shape)
    return parts | _offloaded(config, shape)


def _offloaded(config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """The optimizer states that the ranks of a machine hold in CPU memory while engines are awake."""
    if "optimizer" not in (config.training.offload or ()):
        return {}
    num_ranks = max(rank_numbers(config))
    return {"optimizer states while engines are awake": num_ranks * most_optimizer_bytes(shape, config.training)}


@dataclass(frozen=True)
class _Part:
    """Weights of a rank whose optimizer states lie in buffers of their own, with the ranks that share them.

    `is_writer`: the rank is the first of those, which writes the weights.
    """

    num_weights: int
    num_sharers: int
    is_writer: bool


def _parts_of_ranks(shape: ModelShape, training: TrainingBlock) -> list[list[_Part]]:
    """Each rank's parts: its weights, or dense ones and experts apart where EP is above 1 (Megatron's `allreduce` mark
    of a weight says so)."""
    ranks = training.num_ranks // training.pipeline_parallel
    tp, experts = training.tensor_parallel, training.expert_parallel * training.expert_tensor_parallel
    found = []
    # Stages are the slowest index of a rank's number, and TP, or ETP and then EP, the quickest.
    for stage in range(training.pipeline_parallel):
        own = rank_parameters(shape, training, stage)
        for place in range(ranks):
            if training.expert_parallel == 1:
                found.append([_Part(own.total, training.num_replicas, place < tp)])
            else:
                dense = _Part(own.dense, training.num_replicas, place < tp)
                found.append([dense, _Part(own.experts, ranks // experts, place < experts)])
    return found


def saving(config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """Bytes of one checkpoint on the machine that has most of it, by name; none where no thread writes it.

    The thread's copies: the weights in the ranks that write them, and the optimizer states in the ranks that have them,
    or in the first of those that all have the same.
    """
    training = config.training
    if not config.checkpoint.asynchronous:
        return {}
    # Weights in fp32 are their own masters where states are not sharded.
    is_apart = training.distributed_optimizer or training.precision == "bf16"
    states = STATE_BYTES if is_apart else STATE_BYTES - 4

    def copied(part: _Part) -> int:
        weights = ELEMENT_BYTES[training.precision] * part.num_weights * part.is_writer
        if training.distributed_optimizer:
            return weights + states * part.num_weights // part.num_sharers
        return weights + states * part.num_weights * part.is_writer

    ranks = [sum(map(copied, parts)) for parts in _parts_of_ranks(shape, training)]
    return {"copy of a checkpoint that is being written": _most(config, ranks)}


def loading_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """CPU memory of a machine while its ranks load a checkpoint.

    torch's reader holds two copies of the largest tensor that it reads, taken as the optimizer states of the embedding
    or the head, in the first and last stage. Masters in fp32 are compared with the weights before they are loaded.
    Ranks have made way for the engines before they load, so that offloaded states are in CPU memory, too. Engines'
    weights stay in the object store, for ranks may be replaced while engines live.
    """
    training, found = config.training, dict[str, int]()
    stages, table = training.pipeline_parallel, shape.vocab_size * shape.hidden_size // training.tensor_parallel
    copies = [2 * 4 * table * (stage in (0, stages - 1)) for stage in range(stages)]
    of_stage = training.num_ranks // stages
    found["the reader's copies of a tensor"] = _most(config, [size for size in copies for _ in range(of_stage)])
    if training.distributed_optimizer and training.precision == "fp32":
        ranks = [
            sum(4 * part.num_weights // part.num_sharers for part in parts)
            for parts in _parts_of_ranks(shape, training)
        ]
        found["masters that are compared with the weights"] = _most(config, ranks)
    found |= _offloaded(config, shape)
    every = [_pushed(one, config, shape) | (found if one.has_ranks else {}) for one in machines(config, shape)]
    return _largest("loading a checkpoint", every)


def host_pools(config: ScaledRun, shape: ModelShape) -> tuple[Memory, Memory]:
    """CPU memory of the machine that needs most: in a global step, with its checkpoint and the object store, and while
    ranks load one."""
    every = [_in_step(one, config, shape, None) | _pushed(one, config, shape) for one in machines(config, shape)]
    steps = [Memory("a step and its checkpoint", parts) for parts in every]
    return max(steps, key=lambda step: in_memory(config, step).total), loading_memory(config, shape)


def peak_host_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """The larger of both, `in_memory`."""
    return max((in_memory(config, one) for one in host_pools(config, shape)), key=lambda memory: memory.total)


def in_memory(config: ScaledRun, memory: Memory) -> Memory:
    """The memory with at most cluster.object_store_gib in the object store, as more of it spills to disk.

    The store is one part then. A cluster that runs already has a store of its own size.
    """
    stored = {name: size for name, size in memory.parts.items() if name in (*STORED, LAST_PUSH)}
    room = round(config.cluster.object_store_gib * GIB)
    if config.cluster.address is not None or sum(stored.values()) <= room:
        return memory
    rest = {name: size for name, size in memory.parts.items() if name not in stored}
    return Memory(memory.where, {"a full object store": room} | rest)


def _most(config: ScaledRun, of_ranks: list[int]) -> int:
    """The sum over the ranks of the machine where it is largest."""
    numbers = rank_numbers(config)
    return max(sum(of_ranks[end - number : end]) for number, end in zip(numbers, accumulate(numbers), strict=True))


__all__ = [
    "host_memory", "host_pools", "in_memory", "loading_memory", "most_stored_bytes", "peak_host_memory", "saving",
    "stored_bytes", "stored_on",
]  # fmt: skip
