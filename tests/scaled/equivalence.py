"""The agreement of sandbox and cluster, measured: one checkpoint, one batch, fp32, in the sandbox and in every layout.

`python -m tests.scaled.equivalence` prints the table of docs/equivalence.md; test_equivalence.py bounds it. Where there
are GPUs the ranks are on them, and the sandbox on the CPU.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.markdown import markdown_table
from scaled.config import ModelBlock, TrainingBlock
from tests.scaled.megatron_world import free_ports, in_turn, spawn
from tests.scaled.rank_world import (
    LAYOUTS,
    algorithm,
    batch,
    gradient_bytes,
    layers,
    merged,
    minibatches,
    on_host,
    passes,
    sandbox_engine,
    sandbox_gradients,
    training,
    with_top,
    write_model,
)
from theory.contracts import MiniBatch, Rollouts, TokenScores
from theory.objectives import PRESETS, Objective, preset
from theory.routing.passes import RoutingPlan

# A rate of zero: every objective meets the same weights. Nothing is clipped, so gradients are the objective's own.
STILL = algorithm("R3", optimizer={"learning_rate": 0.0, "max_grad_norm": 1e9})
MOVING = algorithm("Pr2")
# A rank has a GPU of its own where there are any: NCCL refuses two on one.
MOST_RANKS = torch.cuda.device_count() if torch.cuda.is_available() else 2
BY_TOKENS: dict[str, Any] = {"max_tokens_per_micro_batch": 24}
ON_TWO = {
    **LAYOUTS,
    "EP2, micro-batches by tokens": {**LAYOUTS["EP2"], **BY_TOKENS},
    "TP2+EP2, micro-batches by tokens": {**LAYOUTS["TP2+EP2"], **BY_TOKENS},
    "PP2, micro-batches by tokens": {**LAYOUTS["PP2"], **BY_TOKENS},
    "EP2, gradients offloaded": {**LAYOUTS["EP2"], "offload": ("gradients",)},
}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (n, f)
    for name, (n, f) in {"1 rank": (1, {}), **{k: (2, f) for k, f in ON_TWO.items()}}.items()
    if n <= MOST_RANKS
}


OBJECTIVES: dict[str, Objective] = {name: preset(name) for name in PRESETS} | {
    "minirl, top_k": preset("minirl", centering="top_k", centering_k=5),
    "ppo, full": preset("ppo", centering="full"),
}
"""Every preset, and two that take off the mean under mu: by its five likeliest tokens, and by all of it."""


def asked_of(layout: str, share: int) -> list[str]:
    """The objectives that a layout is measured with: on one rank all, else every `share`-th, another for the next
    layout, so that each objective meets a `share`-th of the layouts."""
    offset = list(WORLDS).index(layout)
    return [key for i, key in enumerate(OBJECTIVES) if layout == "1 rank" or (i + offset) % share == 0]


def recorded() -> dict[int, Rollouts]:
    """The batch with as many of mu's likeliest tokens as an objective asks for; none for 0."""
    return {num: with_top(batch(), num) if num else batch() for num in {one.num_top for one in OBJECTIVES.values()}}


def first(rollouts: Rollouts, old: TokenScores, routing: RoutingPlan) -> tuple[MiniBatch, RoutingPlan]:
    """The first mini-batch of these rollouts."""
    return minibatches(rollouts, old, routing)[0]


@dataclass(frozen=True)
class Row:
    """One layout against the sandbox: the largest difference of each kind."""

    layout: str
    logp: float
    routes: int
    value: float
    gradient: float
    weights: float


def measure_rank(
    rank: int,
    folder: Path,
    olds: dict[int, TokenScores],
    worlds: dict[str, dict[str, Any]],
    ports: list[int],
    share: int,
) -> dict[str, Any]:
    """On one rank, by layout: scores of every pass, value and gradient of its objectives, weights after updates."""
    from scaled.megatron_engine.rank import MegatronRank

    found = recorded()
    rollouts, old = found[0], olds[0]
    routings = passes(rollouts, layers())
    replay = routings["replay"]
    first_of = {num: first(one, olds[num], replay) for num, one in found.items()}

    class Offloading(MegatronRank):
        """Gives way to engines before every pass, as a run's ranks do; without `training.offload` nothing moves."""

        def score(self, *given: Any) -> Any:
            self.give_way()
            held = gradient_bytes(self)
            assert (held == 0) == bool(self.training.offload), held
            return super().score(*given)

        def update(self, *given: Any) -> Any:
            self.give_way()
            return super().update(*given)

    def act(name: str, layout: TrainingBlock) -> dict[str, Any]:
        engine = Offloading(ModelBlock(path=str(folder)), layout, STILL)
        result: dict[str, Any] = {"scores": {key: engine.score(rollouts, r) for key, r in routings.items()}}
        result["tops"] = {num: engine.score(one, replay) for num, one in found.items() if num}
        result["objectives"] = {
            key: (engine.update(first_of[one.num_top][0], one, first_of[one.num_top][1]), on_host(engine.gradients()))
            for key, one in ((key, OBJECTIVES[key]) for key in asked_of(name, share))
        }
        engine = Offloading(ModelBlock(path=str(folder)), layout, MOVING)
        for minibatch, routing in minibatches(rollouts, old, replay):
            engine.update(minibatch, MOVING.objective, routing)
        return result | {"weights": on_host(engine.export())}

    return in_turn(rank, {name: training(WORLDS[name][0], **fields) for name, fields in worlds.items()}, ports, act)


def reference(folder: Path) -> dict[str, Any]:
    """The same of the sandbox's engine."""
    found = recorded()
    rollouts = found[0]
    engine = sandbox_engine(folder, STILL)
    routings = passes(rollouts, layers())
    scores = {key: engine.score(rollouts, routing) for key, routing in routings.items()}
    olds = {num: engine.score(one, routings["replay"]) for num, one in found.items()}
    made = minibatches(rollouts, olds[0], routings["replay"])
    first_of = {num: first(one, olds[num], routings["replay"]) for num, one in found.items()}
    objectives = {}
    for key, one in OBJECTIVES.items():
        minibatch, routing = first_of[one.num_top]
        value = engine.update(minibatch, one, routing).metrics["actor/objective"]
        objectives[key] = (value, sandbox_gradients(engine))
    moving = sandbox_engine(folder, MOVING)
    for minibatch, routing in made:
        moving.update(minibatch, MOVING.objective, routing)
    return {"scores": scores, "olds": olds, "objectives": objectives, "weights": dict(moving.named_tensors())}


def compare(name: str, ranks: list[dict[str, Any]], theirs: dict[str, Any]) -> Row:
    """The row of a layout. A gradient's difference is relative to that objective's whole gradient norm."""
    from scaled.megatron_engine.parts import assemble_scores, assemble_stats

    parts = [rank[name] for rank in ranks if name in rank]
    logp, routes, value, gradient = 0.0, 0, 0.0, 0.0
    for key, b in theirs["scores"].items():
        a = assemble_scores([part["scores"][key] for part in parts])
        assert a.experts is not None and a.natural is not None
        logp = max(logp, (a.logp_BT - b.logp_BT).abs().max().item())
        routes += int((a.experts.experts != b.experts.experts).sum() + (a.natural.experts != b.natural.experts).sum())
    for num, b in theirs["olds"].items():
        if num:
            a = assemble_scores([part["tops"][num] for part in parts])
            assert a.logp_top is not None and b.logp_top is not None
            logp = max(logp, (a.logp_top.values - b.logp_top.values).abs().max().item())
    for key in parts[0]["objectives"]:
        expected, gradients = theirs["objectives"][key]
        got = assemble_stats([part["objectives"][key][0] for part in parts]).metrics["actor/objective"]
        value = max(value, abs(got - expected))
        ours = merged([part["objectives"][key][1] for part in parts])
        assert ours.keys() == gradients.keys()
        norm = sum(g.double().square().sum() for g in gradients.values()) ** 0.5
        assert norm > 1e-3, key
        off = sum((ours[n].double() - g.double()).square().sum() for n, g in gradients.items()) ** 0.5
        gradient = max(gradient, float(off / norm))
    weights = merged([part["weights"] for part in parts])
    farthest = max((weights[n] - w).abs().max().item() for n, w in theirs["weights"].items())
    return Row(name, logp, routes, value, gradient, farthest)


def measure(folder: Path, share: int = 1) -> list[Row]:
    """The table: every layout against the sandbox, with the objectives of `asked_of`."""
    write_model(folder)
    theirs = reference(folder)
    rows = []
    for num_ranks in sorted({n for n, _ in WORLDS.values()}):
        worlds = {name: fields for name, (n, fields) in WORLDS.items() if n == num_ranks}
        ports = free_ports(len(worlds))
        ranks = spawn(num_ranks, measure_rank, folder, theirs["olds"], worlds, ports, share, limit_s=400)
        rows += [compare(name, ranks, theirs) for name in worlds]
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    titles = (
        "Megatron-core layout", "log pi, nats", "expert ids that differ", "objective", "gradient / its norm", "weights",
    )  # fmt: skip
    return markdown_table(
        titles,
        [
            (r.layout, f"{r.logp:.1e}", r.routes, f"{r.value:.1e}", f"{r.gradient:.1e}", f"{r.weights:.1e}")
            for r in rows
        ],
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write(markdown(measure(Path(scratch) / "model")))
