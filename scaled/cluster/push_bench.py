"""GB/s of a push of weights on this machine, from ranks to engines, by the path of the bytes and by format.

`python -m scaled.cluster.push_bench [GIB [ROUNDS]] [--store GIB]`: each of two ranks in Ray actors holds GIB (default
1) of bf16 matrices of 16 MiB and sends half of them, or one sends all, and two engines copy them into memory of their
own. Every round times each row once; GB are those of the bf16 weights, also where fewer are sent. The first WARM_UP
rounds do not count: until every process has touched all of the store, most of a push's time is the system's, which
finds the pages.
The last row is a bound: a push copies each byte into the store and into both engines, and this is a third of the rate
at which both ranks at once copy memory of their own.

With `--store` the object store has that size, and only the first row and the last are measured: in one that is too
small for all weights Ray writes some of them to disk and reads them again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.markdown import markdown_table
from scaled.cluster import ray_cluster
from scaled.cluster.copy_bench import SHAPE, copy_seconds
from scaled.cluster.rank_group import Assembly
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.weights import Convert, StoredTensors, tensors_of, unchanged
from scaled.config import PrecisionBlock, ScaledRun
from scaled.vllm_engine.quantize import quantised
from theory.contracts import NamedTensors
from theory.streams import stream

NUM = 2
"""Ranks, and engines."""

WARM_UP = 3
"""Rounds that do not count."""

BUCKET_BYTES = 256 * 2**20
# Never called: the bench neither scores nor updates.
NO_PARTS: Any = Assembly(*(lambda parts: parts[0] for _ in range(3)))
FP8: Convert = partial(quantised, precision=PrecisionBlock(weights="fp8_block"))


@dataclass(frozen=True)
class Way:
    """A row: the number of ranks that send weights, and who converts them: their rank, or each engine."""

    senders: int = NUM
    rank: Convert = unchanged
    engine: Convert = unchanged
    through_driver: bool = False

    def sent(self, ranks: TrainingGroup) -> NamedTensors:
        """The tensors to push: in the store, or in this process."""
        tensors = ranks.named_tensors(folded=self.senders == 1)
        return self._here(tensors) if self.through_driver else StoredTensors(lambda _: tensors.stored(self.rank))

    def _here(self, tensors: StoredTensors) -> NamedTensors:
        for reference, _ in tensors.stored(self.rank):
            yield from tensors_of([reference])


WAYS = {
    "bf16, from ranks to engines": Way(),
    "bf16, through the driver": Way(through_driver=True),
    "fp8 blocks, quantised in two ranks": Way(rank=FP8),
    "fp8 blocks, quantised in one rank": Way(senders=1, rank=FP8),
    "fp8 blocks, quantised in each engine": Way(engine=FP8),
}


class HoldingRank:
    """A rank that only holds weights."""

    def __init__(self, rank: int, num_ranks: int, store: object, num_bytes: int):
        draw = torch.randn(SHAPE, generator=stream(rank, "push-bench")).bfloat16()
        self.rank = rank
        self.weights = {f"{rank}.{i}.up_proj.weight": draw.clone() for i in range(num_bytes // draw.nbytes)}

    def export(self, folded: bool) -> Iterator[tuple[str, Tensor]]:
        # There is no predictor to fold: `folded` says here that rank 0 alone sends.
        share = list(self.weights.items())[:: 1 if folded else NUM]
        yield from share if self.rank == 0 or not folded else []


class CopyingEngine:
    """An engine that converts the weights as its row says and copies them into memory that it keeps between pushes."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        convert = list(WAYS.values())[version % len(WAYS)].engine
        for name, tensor in convert(named_tensors):
            kept = f"{name} {tensor.dtype}"
            self.weights.setdefault(kept, torch.empty_like(tensor)).copy_(tensor)


BOUND = "bf16, its copies alone"
"""The row of a push's copies in memory, without Ray."""


def config(gib: float, store_gib: float | None = None) -> ScaledRun:
    """A cluster of our own with room for three copies of the weights below the 80% at which Ray spills to disk, or with
    a store of that size."""
    room = 4 * gib if store_gib is None else store_gib
    raw = {
        "name": "push", "num_steps": 1, "task": {"kind": "arithmetic"}, "model": {"path": "none"},
        "training": {"num_ranks": NUM}, "rollout": {"num_engines": NUM}, "cluster": {"object_store_gib": room},
        "algorithm": {"objective": {"preset": "minirl"}},
    }  # fmt: skip
    return ScaledRun.model_validate(raw)


def main(gib: float = 1.0, rounds: int = 5, store: float | None = None) -> str:
    """A table of GB/s by row: median, least and most over the rounds after those of the warm-up, and the GB sent."""
    num_bytes = int(gib * 2**30)
    ways = list(WAYS.items())[: None if store is None else 1]
    rates: dict[str, list[float]] = {name: [] for name in (*dict(ways), BOUND)}
    travelled: dict[str, float] = {BOUND: 0.0}
    with tempfile.TemporaryDirectory() as folder, ray_cluster.cluster(config(gib, store), Path(folder)) as made:
        # Any: the bench calls few of a rank's and of an engine's methods, and these two have no others.
        build_rank: Any = partial(HoldingRank, num_bytes=num_bytes)
        build_engine: Any = CopyingEngine
        ranks = TrainingGroup(made, build_rank, NUM, NO_PARTS, bucket_bytes=BUCKET_BYTES)
        engines = RolloutGroup(
            made, build_engine, NUM, max_num_seqs=1, timeout_s=600.0, max_restarts=0, bucket_bytes=BUCKET_BYTES
        )
        for number in range(rounds + WARM_UP):
            for place, (name, way) in enumerate(ways):
                tensors = way.sent(ranks)
                # Ranks export and convert only as the push asks for tensors, so the clock has that, too.
                start = time.perf_counter()
                engines.load_weights(tensors, number * len(WAYS) + place)  # an engine reads its row off the version
                seconds = time.perf_counter() - start
                travelled[name] = engines.meter.take()["transfer/weights_bytes"] / 1e9
                if number >= WARM_UP:
                    rates[name].append(num_bytes / seconds / 1e9)
            if number >= WARM_UP:
                copied = NUM * num_bytes / max(ranks.ask(copy_seconds, num_bytes))
                rates[BOUND].append(copied / (1 + NUM) / 1e9)  # into the store, and into each engine
        engines.close()
        ranks.close()
    lines = [
        (name, *(f"{x:.2f}" for x in (median(found), min(found), max(found), travelled[name])))
        for name, found in rates.items()
    ]
    return markdown_table((f"{gib:g} GiB, {NUM} engines", "GB/s", "least", "most", "GB sent"), lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="push_bench")
    parser.add_argument("gib", nargs="?", type=float, default=1.0)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--store", type=float)
    print(main(**vars(parser.parse_args())))
