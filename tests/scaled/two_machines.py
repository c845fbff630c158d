"""The object stores of two machines that Ray simulates: engines and the driver on the first, ranks on the second.

`python -m tests.scaled.two_machines` prints what is in each store: routing records, in records of a batch, and the
weights of a push that the driver has passed on, in sets.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from scaled.cluster.buckets import Bucket, buckets
from scaled.cluster.rank_group import ScoringGroup
from scaled.cluster.storing import KINDS, pack_apart, unpack_apart
from scaled.cluster.transfer import pack, unpack
from scaled.config import LimitsBlock
from scaled.model_shape import load_shape
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord

QWEN = load_shape("-", "qwen3-30b-a3b")
RESPONSES, TOKENS = 8, 4096
STORE = 512 * 2**20
WEIGHTS, WEIGHT_BYTES = 8, 8 * 2**20


def record() -> RoutingRecord:
    """The record of a batch, in Qwen3-30B's size: 12.6 MB."""
    layers, num = QWEN.moe_layers, RESPONSES * TOKENS
    ids_RLK = torch.arange(QWEN.experts_per_token, dtype=torch.int8).expand(num, len(layers), -1).contiguous()
    return RoutingRecord(ids_RLK, offsets_of([TOKENS] * RESPONSES), tuple(layers), QWEN.num_experts)


class Maker:
    """An engine or a rank: it makes records, and reads those of others."""

    def make(self) -> Any:
        """A record whose ids stay in this machine's store."""
        return pack_apart({"record": record()})

    def read(self, parcel: Any) -> int:
        """The rows of that record, fetched to this machine."""
        return len(unpack(parcel, shared=True).experts)

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


def made(maker: Any) -> Any:
    """A record of that actor's, as the driver holds it."""
    parcel, *stored = maker.make.options(num_returns=1 + KINDS).remote()
    return unpack_apart(ray.get(parcel), stored, Alone(), 0)["record"]


def used(node: dict[str, Any]) -> int:
    """Bytes in a machine's store; the least in three seconds, since Ray frees up to a second late."""
    found = []
    for _ in range(15):
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        found.append(stats.store_stats.object_store_bytes_used)
        time.sleep(0.2)
    return min(found)


def measured() -> dict[str, float]:
    """Records in each machine's store: engines have sampled two batches, one of them ahead; ranks have read one and
    made two of their own. Then the weights of a push, which the driver passes on and no engine has fetched."""
    sizes = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=sizes | {"resources": {"engines": 1}})
    try:
        cluster.add_node(**sizes, resources={"ranks": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        actor = ray.remote(Maker)
        engine, rank = (actor.options(num_cpus=0, resources={name: 1}).remote() for name in ("engines", "ranks"))
        batches = [made(engine), made(engine)]
        assert ray.get(rank.read.remote(pack(batches[0]))) == RESPONSES * TOKENS
        own = [made(rank), made(rank)]
        ray.get([one.read.remote(pack(part)) for one, part in ((engine, batches[1]), (rank, own[0]))])
        nodes = {name: node for node in ray.nodes() for name in ("engines", "ranks") if name in node["Resources"]}
        found = {name: used(node) for name, node in nodes.items()}
        pushed = list(Ranks(rank).named_tensors().stored(None))
        assert sum(size for _, size in pushed) == WEIGHTS * WEIGHT_BYTES
        moved = {f"push, {name}": (used(nodes[name]) - found[name]) / (WEIGHTS * WEIGHT_BYTES) for name in found}
        return {name: size / batches[0].nbytes for name, size in found.items()} | moved
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback, for seconds
    print(json.dumps(measured()))
