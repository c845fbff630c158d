"""Seconds that a run on a cluster stands still for a checkpoint, written synchronously and asynchronously.

`python -m tests.scaled.save_bench [ROUNDS] [--replicated]`: two Megatron-core ranks in Ray actors train a random model
of 0.1 billion weights in bf16; both ways take turns, after a round that is not counted. Ranks share the optimizer
states, and each writes its own; with `--replicated` each has all of them, and the first writes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from lab.markdown import markdown_table
from lab.records import RunFolder
from scaled.cluster import ray_cluster
from scaled.cluster.groups import training_group
from scaled.cluster.saving import Checkpoints
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import Meter
from scaled.config import ScaledRun
from tests.scaled.megatron_world import tiny_folder
from tests.scaled.rank_world import batch, minibatches
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

WIDE = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64,
    "num_experts": 16, "moe_intermediate_size": 512,
}  # fmt: skip
NATURAL, OBJECTIVE = RoutingPlan("natural"), preset("reinforce")
WAYS = ("synchronous", "asynchronous")


def config(folder: Path, replicated: bool) -> ScaledRun:
    """Two ranks, without engines."""
    raw = {
        "name": "saves", "num_steps": 1, "task": {"kind": "arithmetic"}, "model": {"path": str(folder)},
        "training": {"num_ranks": 2, "micro_batch_size": 4, "distributed_optimizer": not replicated},
        "cluster": {"object_store_gib": 0.5},
        "algorithm": {"objective": {"preset": "reinforce"}, "batch": {"num_prompts": 4, "num_responses": 2}},
    }  # fmt: skip
    return ScaledRun.model_validate(raw)


class Bench:
    """The group of ranks, and what it does between two saves: updates, timed."""

    def __init__(self, ranks: TrainingGroup, folder: Path):
        self.ranks = ranks
        rollouts = batch()
        self.made = minibatches(rollouts, ranks.score(rollouts, NATURAL), NATURAL)
        self.ways = {way: Checkpoints(RunFolder(folder), ranks, 1, way == "asynchronous") for way in WAYS}

    def update(self) -> float:
        """The seconds of one optimizer step."""
        start = time.perf_counter()
        self.ranks.update(self.made[0][0], OBJECTIVE, NATURAL)
        return time.perf_counter() - start

    def round(self, step: int) -> dict[str, float]:
        """The seconds of a save either way, of updates without and beside one, and until all is written."""
        seconds = {"an update": self.update()}
        start = time.perf_counter()
        self.ways["synchronous"].save(step)
        seconds["a synchronous save"] = time.perf_counter() - start
        checkpoints, beside = self.ways["asynchronous"], []
        start = time.perf_counter()
        checkpoints.save(step + 1)
        still = time.perf_counter() - start
        while checkpoints.is_writing:
            beside.append(self.update())
            poll = time.perf_counter()
            checkpoints.poll()
            still += time.perf_counter() - poll
        seconds["an asynchronous save"] = still
        seconds["an update beside it"] = median(beside)
        seconds["until it is there"] = time.perf_counter() - start
        return seconds


def main(rounds: int = 3, replicated: bool = False) -> str:
    """The table: median, least and most over the rounds."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        made = config(tiny_folder(root / "model", **WIDE), replicated)
        (root / "run").mkdir()
        with ray_cluster.cluster(made, root) as places:
            ranks = training_group(made, places, Meter())
            bench = Bench(ranks, root / "run")
            found = [bench.round(2 * number) for number in range(1, rounds + 2)][1:]
            ranks.close()
        (last,) = (root / "run" / "checkpoints").iterdir()
        size = sum(path.stat().st_size for path in last.iterdir())
    lines = []
    for part in found[0]:
        values = [seconds[part] for seconds in found]
        lines.append((part, *(f"{value:.2f}" for value in (median(values), min(values), max(values)))))
    return markdown_table((f"a checkpoint of {size / 1e9:.2f} GB", "s", "least", "most"), lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="save_bench")
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--replicated", action="store_true")
    print(main(**vars(parser.parse_args())))
