"""The object stores of three machines that Ray simulates: engines and the driver on one, ranks on the two others.

`python -m tests.scaled.three_machines` prints what is in each store: routing records, in records of a batch, and the
weights of a push that the driver has passed on, in sets.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from scaled.cluster.buckets import Bucket, buckets
from scaled.cluster.rank_group import ScoringGroup
from scaled.cluster.storing import pack_apart, unpack_apart
from scaled.cluster.transfer import pack, unpack
from scaled.config import LimitsBlock, TrainingBlock
from scaled.megatron_engine.parts import RoutePart
from scaled.model_shape import load_shape
from scaled.objects import OF_ENGINE, OF_RANK
from scaled.stages import layer_sets
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord

QWEN = load_shape("-", "qwen3-30b-a3b")
Layers = tuple[int, ...]
LAYERS: Layers = tuple(QWEN.moe_layers)
RESPONSES, TOKENS = 8, 4096
DEALT = {"old": ((0, 2, 4, 6), (1, 3, 5, 7)), "update": ((0, 1, 2, 3), (4, 5, 6, 7))}
"""The responses of each rank: a mini-batch is dealt anew, so half of them are another rank's than in the old pass."""
STAGED = {"num_ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}
"""The fields of a layout whose two stages are on a machine each, with two runs of layers each."""
STORE = 512 * 2**20
WEIGHTS, WEIGHT_BYTES = 8, 8 * 2**20


def record() -> RoutingRecord:
    """The record of a batch, in Qwen3-30B's size: 12.6 MB."""
    ids_K = torch.arange(QWEN.experts_per_token, dtype=torch.int8)
    ids_RLK = ids_K.expand(RESPONSES * TOKENS, len(LAYERS), -1).contiguous()
    return RoutingRecord(ids_RLK, offsets_of([TOKENS] * RESPONSES), LAYERS, QWEN.num_experts)


class Maker:
    """An engine or a rank: it makes records, and reads those of others."""

    def sample(self, sets: Sequence[Layers] = ()) -> Any:
        """A record whose ids stay in this machine's store, cut by these sets of layers."""
        return pack_apart({"record": record()}, OF_ENGINE, layer_sets=sets)

    def score(self, own: Sequence[int], layers: Layers = LAYERS) -> Any:
        """The experts that old used on these responses, and those that it would have chosen, in the same way."""
        used, natural = (record().part(responses=own, layers=layers) for _ in range(2))
        return pack_apart(RoutePart(tuple(own), 0, layers, used, natural), OF_RANK)

    def read(self, parcel: Any, own: Sequence[int], layers: Layers = LAYERS) -> int:
        """The number of rows of these responses, fetched to this machine at these layers."""
        return len(unpack(parcel, shared=True).part(responses=own, layers=layers).experts)

    def export(self, bucket_bytes: int, folded: bool, convert: Any) -> Iterator[Bucket | int]:
        """Weights as a rank sends them, a bucket each."""
        named = ((str(i), torch.full((WEIGHT_BYTES,), i, dtype=torch.int8)) for i in range(WEIGHTS))
        for bucket in buckets(named, bucket_bytes):
            yield bucket
            yield bucket.num_bytes


class Ranks(ScoringGroup):
    """The group of one rank that only exports."""

    def __init__(self, rank: Any):
        self.actors, self.bucket_bytes, self.limits = [rank], WEIGHT_BYTES, LimitsBlock()


class Alone:
    """The group of one actor, which nobody asks."""

    def ask(self, work: Any, *arguments: Any) -> list[Any]:
        raise NotImplementedError


def answer(call: Any, num: int, *arguments: Any) -> Any:
    """An actor's answer, as the driver holds it."""
    parcel, *stored = call.options(num_returns=1 + num).remote(*arguments)
    return unpack_apart(ray.get(parcel), stored, Alone(), 0)


def read(
    ranks: Sequence[Any],
    records: Sequence[RoutingRecord],
    dealt: Sequence[Sequence[int]],
    layers: Sequence[Layers] = (LAYERS, LAYERS),
) -> None:
    """Each rank reads its responses of its record, at its layers."""
    calls = [rank.read.remote(pack(one), *own) for rank, one, *own in zip(ranks, records, dealt, layers, strict=True)]
    assert ray.get(calls) == [len(own) * TOKENS for own in dealt]


def used(nodes: dict[str, Any]) -> dict[str, int]:
    """Bytes in each machine's store; the least in three seconds, since Ray frees up to a second late."""
    found: dict[str, list[int]] = {name: [] for name in nodes}
    for _ in range(15):
        for name, node in nodes.items():
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            found[name].append(stats.store_stats.object_store_bytes_used)
        time.sleep(0.2)
    return {name: min(sizes) for name, sizes in found.items()}


def passes(engine: Any, ranks: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The passes of a step, each with what the driver holds after it."""
    # Engines have sampled two batches, one of them ahead.
    batches = [answer(engine.sample, OF_ENGINE)["record"] for _ in range(2)]
    read(ranks, [batches[0]] * 2, DEALT["old"])
    old = [answer(rank.score, OF_RANK, own) for rank, own in zip(ranks, DEALT["old"], strict=True)]
    yield "old", (batches, old)
    # Its ranks replay mu's routes, as in R3.
    read(ranks, [batches[0]] * 2, DEALT["update"])
    yield "R3", (batches, old)
    # Or, as in R2, those that old used: of each rank's responses half are another's.
    whole = RoutingRecord.assembled([(part.used, part.indices, 0) for part in old], batches[0].num_rows_B)
    read(ranks, [whole] * 2, DEALT["update"])
    yield "R2", (batches, old)


def stages(engine: Any, ranks: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same for two stages of one replica: each rank computes its layers of all responses."""
    training, every = TrainingBlock.model_validate(STAGED), tuple(range(RESPONSES))
    sets = layer_sets(training, QWEN.num_layers, range(len(ranks)))
    batches = [answer(engine.sample, OF_ENGINE, sets)["record"] for _ in range(2)]
    for done in ("PP2 old", "PP2 R3"):
        read(ranks, [batches[0]] * 2, [every] * 2, sets)
        if done == "PP2 old":
            old = [answer(rank.score, OF_RANK, every, own) for rank, own in zip(ranks, sets, strict=True)]
        yield done, (batches, old)


def measured() -> dict[str, float]:
    """Records in each machine's store after each of these passes. Then the weights of a push, which the driver passes
    on and no engine has fetched."""
    sizes = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=sizes | {"resources": {"engines": 1}})
    try:
        for i in range(2):
            cluster.add_node(**sizes, resources={f"ranks {i}": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        names, actor = ("engines", "ranks 0", "ranks 1"), ray.remote(Maker)
        engine, *ranks = (actor.options(num_cpus=0, resources={name: 1}).remote() for name in names)
        nodes = {name: node for node in ray.nodes() for name in names if name in node["Resources"]}
        found, before = {}, used(nodes)
        for kind in (stages, passes):
            held: Any = None  # what the passes before held is freed
            for done, held in kind(engine, ranks):  # noqa: B007  # its objects live as long as it does
                before = used(nodes)
                found |= {f"{done}, {name}": size / record().nbytes for name, size in before.items()}
        pushed = list(Ranks(ranks[0]).named_tensors().stored(None))
        assert sum(size for _, size in pushed) == WEIGHTS * WEIGHT_BYTES
        moved = {name: size - before[name] for name, size in used(nodes).items()}
        return found | {f"push, {name}": size / (WEIGHTS * WEIGHT_BYTES) for name, size in moved.items()}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback, for seconds
    print(json.dumps(measured()))
