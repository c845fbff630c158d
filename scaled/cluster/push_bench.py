"""GB/s of a push of weights on this machine: from ranks to engines, and the same bytes through the driver's process.

`python -m scaled.cluster.push_bench [GIB [ROUNDS]]`: two ranks in Ray actors hold GIB (default 1) of bf16 tensors of
16 MiB between them, and two engines copy them into memory of their own; both ways take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.markdown import markdown_table
from scaled.cluster import ray_cluster
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.training_group import Assembly, TrainingGroup
from scaled.config import ScaledRun
from theory.contracts import NamedTensors

NUM = 2
"""Ranks, and engines."""

TENSOR_BYTES = 16 * 2**20
"""One weight: an expert's matrix of Qwen3-30B-A3B has 3 MiB, its attention's widest 16."""

BUCKET_BYTES = 256 * 2**20
NO_PARTS: Any = Assembly(*(lambda parts: parts[0] for _ in range(3)))


class HoldingRank:
    """A rank that holds its part of the weights and nothing else."""

    def __init__(self, rank: int, num_bytes: int):
        num = num_bytes // NUM // TENSOR_BYTES
        self.weights = {f"{rank}.{i}": torch.full((TENSOR_BYTES // 2,), i, dtype=torch.bfloat16) for i in range(num)}

    def export(self, folded: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class CopyingEngine:
    """An engine that copies the weights into memory of its own, allocated at the first push."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        for name, tensor in named_tensors:
            self.weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def build_rank(rank: int, num_ranks: int, store: object, num_bytes: int) -> Any:
    """The builder of a rank's actor."""
    return HoldingRank(rank, num_bytes)


def build_engine() -> Any:
    """The builder of an engine's actor."""
    return CopyingEngine()


def config(gib: float) -> ScaledRun:
    """A cluster of our own whose object store holds the weights twice."""
    raw = {
        "name": "push", "num_steps": 1, "task": {"kind": "arithmetic"}, "model": {"path": "none"},
        "training": {"num_ranks": NUM}, "rollout": {"num_engines": NUM}, "cluster": {"object_store_gib": 2.5 * gib},
        "algorithm": {"objective": {"preset": "minirl"}},
    }  # fmt: skip
    return ScaledRun.model_validate(raw)


def main(gib: float = 1.0, rounds: int = 5) -> str:
    """A table of GB/s by the way that the bytes take: median, least and most over the rounds, after one unmeasured."""
    num_bytes = int(gib * 2**30)
    rates: dict[str, list[float]] = {"from ranks to engines": [], "through the driver": []}
    with tempfile.TemporaryDirectory() as folder, ray_cluster.cluster(config(gib), Path(folder)) as made:
        build = partial(build_rank, num_bytes=num_bytes)
        ranks = TrainingGroup(made, build, NUM, NO_PARTS, bucket_bytes=BUCKET_BYTES)
        engines = RolloutGroup(made, build_engine, NUM, timeout_s=600.0, max_restarts=0, bucket_bytes=BUCKET_BYTES)
        for number in range(rounds + 1):
            for way, found in rates.items():
                tensors = ranks.named_tensors()
                start = time.perf_counter()
                engines.load_weights(iter(tensors) if way == "through the driver" else tensors, number)
                sent = engines.meter.take()["transfer/weights_bytes"]
                if number:
                    found.append(sent / (time.perf_counter() - start) / 1e9)
        engines.close()
        ranks.close()
    lines = [(way, *(f"{x:.2f}" for x in (median(found), min(found), max(found)))) for way, found in rates.items()]
    return markdown_table((f"{gib:g} GiB, {NUM} ranks, {NUM} engines", "GB/s", "least", "most"), lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="push_bench")
    parser.add_argument("gib", nargs="?", type=float, default=1.0)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    print(main(**vars(parser.parse_args())))
