"""The mismatch ladder: how far real inference engines of falling precision depart from one training engine.

Every rung is a vLLM engine that holds the trainer's weights in its own precision and samples the same problems with the
same seeds; the trainer scores the samples. Rungs differ only in precision, so that the sandbox's simulated defects can
be compared with them. Each batch is scored twice, with the trainer's own routes and with the engine's (R3), so that
the ladder says what replay would buy before anything is trained. Papers: MiniRL (arXiv 2512.01374) Eq. 5, R3
(2510.11370) Eq. 3, 8 and sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lab.files import disk_errors
from lab.ladder import TITLES, SeedMean, seed_mean
from lab.markdown import markdown_table
from lab.records import dated_folder
from lab.tasks import TextTask
from lab.traces import Trace
from scaled.checks import ready
from scaled.config import PrecisionBlock, ScaledRun
from theory.contracts import Rollouts, Sampling, TokenScores
from theory.divergences import discrepancy_metrics
from theory.routing.measures import router_disagreement_by_layer
from theory.routing.passes import PASSES, RoutingPlan
from theory.step_metrics import old_pass_metrics
from theory.streams import derive_seed

if TYPE_CHECKING:
    from scaled.cluster.rank_group import ScoringGroup
    from scaled.cluster.ray_cluster import Cluster

RUNGS: dict[str, PrecisionBlock] = {
    "fp32": PrecisionBlock(compute="fp32"),
    "fp16": PrecisionBlock(compute="fp16"),
    "bf16": PrecisionBlock(compute="bf16"),
    "bf16, batch-invariant": PrecisionBlock(batch_invariant=True),
    "bf16, int8 weights and activations": PrecisionBlock(weights="int8"),
    "bf16, fp8 weights": PrecisionBlock(weights="fp8_block"),
    "bf16, fp8 KV cache": PrecisionBlock(kv_cache="fp8"),
    "bf16, fp8 weights and KV cache": PrecisionBlock(weights="fp8_block", kv_cache="fp8"),
}


@dataclass(frozen=True)
class Missing:
    """A rung for which this machine has no kernels, and the reason."""

    name: str
    reason: str


REPLAYED = "k3 KL under R3"
"""Column of the KL of the same samples, scored with the experts that the engine chose."""


@dataclass(frozen=True)
class ScoredDraw:
    """One batch of an engine, scored by the trainer: its sampled tokens, and metrics by registered name.

    `replayed_kl` is rollout_corr/k3_kl of the pass with mu's experts (R3 Eq. 8), in nats, None for a dense model.
    `differing_routers` is the share of rows whose sets of experts differ in the natural pass, in [0, 1], by layer.
    """

    num_tokens: int
    metrics: dict[str, float]
    replayed_kl: float | None
    differing_routers: dict[int, float]


@dataclass(frozen=True)
class Rung:
    """One engine against the trainer, over independent draws.

    `kernels` is native, or rounded where weights are on the precision's grid and arithmetic is in the compute type.
    """

    name: str
    kernels: str
    draws: tuple[ScoredDraw, ...]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all draws."""
        return sum(draw.num_tokens for draw in self.draws)

    @property
    def metrics(self) -> dict[str, SeedMean]:
        """Means over draws with 95% intervals, by registered name, and the KL under R3 as `REPLAYED`.

        Measures of routes are absent for a dense model.
        """
        means = {
            name: seed_mean([draw.metrics[name] for draw in self.draws])
            for name in TITLES
            if name in self.draws[0].metrics
        }
        replayed = [draw.replayed_kl for draw in self.draws if draw.replayed_kl is not None]
        return means | ({REPLAYED: seed_mean(replayed)} if replayed else {})

    def to_json(self) -> dict[str, Any]:
        """Plain values, with every draw."""
        return asdict(self)


def climb(
    config: ScaledRun, num_seeds: int, rungs: Sequence[str] = tuple(RUNGS), traces: Path | None = None
) -> Iterator[Rung | Missing]:
    """The rungs in order, each over `num_seeds` draws of the config's batch from the weights of `model.path`.

    The trainer has the config's layout and precision, but only scores: 2 bytes per bf16 weight. With a folder `traces`,
    a trace of every draw with natural routing is kept there, `<rung>-<draw>.safetensors`. Raises ValueError for an
    unknown rung, and the errors of `scaled.run` for a config that does not fit.
    """
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise ValueError(f"--rung: expected some of {'; '.join(RUNGS)}, got {'; '.join(unknown)}")
    _, _, task = ready(config)
    # Imported late: they need Ray, for which `ready` has just checked.
    from scaled.cluster.groups import scoring_group
    from scaled.cluster.ray_cluster import cluster
    from scaled.cluster.transfer import Meter
    from scaled.vllm_engine.quantize import choose_kernels

    logs = dated_folder(Path(config.output) / "ladder", datetime.now(UTC))
    if traces is not None:
        with disk_errors(traces, "make folder"):
            traces.mkdir(parents=True, exist_ok=True)
    with cluster(config, logs) as places:
        trainer = scoring_group(config, places, Meter())  # one trainer, so that rungs differ in the engine alone
        for name in rungs:
            try:
                kernels = choose_kernels(RUNGS[name], not places.has_gpus)
            except ValueError as error:
                yield Missing(name, str(error))
                continue
            rollout = config.rollout.model_copy(update={"precision": RUNGS[name]})
            chosen = config.model_copy(update={"rollout": rollout})
            draws = []
            for number, (rollouts, natural, replayed) in enumerate(_scored(chosen, task, places, trainer, num_seeds)):
                draws.append(_draw(rollouts, natural, replayed))
                if traces is not None:
                    rewards_B = torch.tensor(
                        [task.reward(r.prompt, r) for r in rollouts.responses], dtype=torch.float32
                    )
                    # Not the replayed scores: doctor looks for the gap that replay takes away.
                    trace = Trace.of(rollouts, natural, rewards_B, number, decode=task.tokenizer.decode)
                    trace.save(traces / f"{name.replace(', ', '-').replace(' ', '-')}-{number}.safetensors")
            yield Rung(name, kernels, tuple(draws))


def _draw(rollouts: Rollouts, natural: TokenScores, replayed: TokenScores | None) -> ScoredDraw:
    replayed_kl, by_layer = None, {}
    if replayed is not None and rollouts.experts is not None and natural.natural is not None:
        batch = rollouts.padded()
        under_r3 = discrepancy_metrics(replayed.logp_BT, batch.logp_mu_BT, batch.is_response_BT)
        replayed_kl = under_r3["rollout_corr/k3_kl"]
        by_layer = router_disagreement_by_layer(rollouts.experts, natural.natural)
    return ScoredDraw(
        num_tokens=sum(int(r.is_response.sum()) for r in rollouts.responses),
        # As under mode none, whatever the config replays: `natural` is a pass with the trainer's own routes.
        metrics=old_pass_metrics(rollouts, natural, PASSES["none"]),
        replayed_kl=replayed_kl,
        differing_routers=by_layer,
    )


def _scored(
    config: ScaledRun, task: TextTask, places: Cluster, trainer: ScoringGroup, num_seeds: int
) -> Iterator[tuple[Rollouts, TokenScores, TokenScores | None]]:
    """Every draw of the engine, and its scores: with the routes of the trainer, and with those of the engine."""
    from scaled.cluster.groups import rollout_group
    from scaled.cluster.transfer import Meter

    algorithm = config.algorithm.build()
    engine = rollout_group(config, task.tokenizer.end_ids, places, Meter())
    try:
        engine.load_weights(trainer.named_tensors(), version=0)
        for draw in range(num_seeds):
            sampling = Sampling(
                max_tokens=algorithm.max_tokens,
                num_responses=algorithm.num_responses,
                temperature=algorithm.temperature,
                seed=derive_seed(config.seed, "ladder", draw),  # by the draw alone: all rungs share the streams
            )
            rollouts = engine.generate(task.prompts(draw, algorithm.num_prompts), sampling)
            natural = trainer.score(rollouts, RoutingPlan("natural"))
            routes = rollouts.experts
            replayed = None if routes is None else trainer.score(rollouts, RoutingPlan("replay", record=routes))
            yield rollouts, natural, replayed
    finally:
        # The next rung's engine needs this one's place in the cluster.
        engine.close()


def markdown(rungs: Sequence[Rung | Missing]) -> str:
    """The rungs as a table: mean and half-width of the 95% interval over seeds; below it, missing rungs and why."""
    climbed = [rung for rung in rungs if isinstance(rung, Rung)]
    columns = TITLES | {REPLAYED: REPLAYED}
    rows = [(r.name, r.kernels, *(r.metrics.get(name, "–") for name in columns)) for r in climbed]
    table = markdown_table(("engine", "kernels", *columns.values()), rows)
    missing = [f"Not on this machine: {rung.name} ({rung.reason})." for rung in rungs if isinstance(rung, Missing)]
    return table + "".join(f"{line}\n" for line in (["", *missing] if missing else []))


__all__ = ["REPLAYED", "RUNGS", "Missing", "Rung", "ScoredDraw", "climb", "markdown"]
