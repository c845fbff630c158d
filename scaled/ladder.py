"""The mismatch ladder: how far real inference engines of falling precision depart from one training engine.

Every rung is a vLLM engine that holds the trainer's weights in its own precision and samples the same problems with the
same seeds; the trainer scores the samples. Rungs differ only in precision, so that the sandbox's simulated defects can
be compared with them. Papers: MiniRL (arXiv 2512.01374) Eq. 5, R3 (2510.11370) Eq. 3 and sec. 3.
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
from lab.tasks import TextTask
from lab.traces import Trace
from scaled.checks import check_config, open_task
from scaled.config import PrecisionBlock, ScaledRun
from theory.contracts import Rollouts, Sampling, TokenScores
from theory.routing.passes import PASSES, RoutingPlan
from theory.step_metrics import old_pass_metrics
from theory.streams import derive_seed

if TYPE_CHECKING:
    from scaled.cluster.ray_cluster import Cluster
    from scaled.cluster.training_group import TrainingGroup

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


@dataclass(frozen=True)
class Rung:
    """One engine against the trainer: metrics by registered name, over draws of `num_tokens` tokens in all.

    `kernels` is native, or rounded where weights are on the precision's grid and arithmetic is in the compute type.
    """

    name: str
    kernels: str
    num_seeds: int
    num_tokens: int
    metrics: dict[str, SeedMean]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def climb(
    config: ScaledRun, num_seeds: int, rungs: Sequence[str] = tuple(RUNGS), traces: Path | None = None
) -> Iterator[Rung | Missing]:
    """The rungs in order, each over `num_seeds` draws of the config's batch from the weights of `model.path`.

    The trainer is the config's `training`; its old pass routes naturally. With a folder `traces`, a trace of every
    draw is kept there, `<rung>-<draw>.safetensors`. Raises ValueError for an unknown rung, and
    the errors of `scaled.run` for a config that does not fit.
    """
    from scaled.cluster.groups import training_group
    from scaled.cluster.ray_cluster import cluster
    from scaled.cluster.transfer import Meter
    from scaled.vllm_engine.quantize import choose_kernels

    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise ValueError(f"--rung: expected some of {'; '.join(RUNGS)}, got {'; '.join(unknown)}")
    check_config(config)
    logs = Path(config.output) / "ladder" / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    logs.mkdir(parents=True)
    if traces is not None:
        with disk_errors(traces, "make folder"):
            traces.mkdir(parents=True, exist_ok=True)
    task = open_task(config)
    with cluster(config, logs) as places:
        training = training_group(config, places, Meter())  # one trainer, so that rungs differ in the engine alone
        for name in rungs:
            try:
                kernels = choose_kernels(RUNGS[name], not places.has_gpus)
            except ValueError as error:
                yield Missing(name, str(error))
                continue
            rollout = config.rollout.model_copy(update={"precision": RUNGS[name]})
            rows, num_tokens = [], 0
            chosen = config.model_copy(update={"rollout": rollout})
            for draw, (rollouts, scores) in enumerate(_draws(chosen, task, places, training, num_seeds)):
                rows.append(old_pass_metrics(rollouts, scores, PASSES["none"]))
                num_tokens += sum(int(r.is_response.sum()) for r in rollouts.responses)
                if traces is not None:
                    rewards_B = torch.tensor(
                        [task.reward(r.prompt, r) for r in rollouts.responses], dtype=torch.float32
                    )
                    trace = Trace.of(rollouts, scores, rewards_B, draw, decode=task.tokenizer.decode)
                    trace.save(traces / f"{name.replace(', ', '-').replace(' ', '-')}-{draw}.safetensors")
            metrics = {m: seed_mean([row[m] for row in rows]) for m in TITLES}
            yield Rung(name, kernels, num_seeds, num_tokens, metrics)


def _draws(
    config: ScaledRun, task: TextTask, places: Cluster, training: TrainingGroup, num_seeds: int
) -> Iterator[tuple[Rollouts, TokenScores]]:
    """Every draw from the config's engine, with the trainer's scores."""
    from scaled.cluster.groups import rollout_group
    from scaled.cluster.transfer import Meter

    algorithm = config.algorithm.build()
    engine = rollout_group(config, task.tokenizer.eos_id, places, Meter())
    try:
        engine.load_weights(training.named_tensors(), version=0)
        for draw in range(num_seeds):
            sampling = Sampling(
                max_tokens=algorithm.max_tokens,
                num_responses=algorithm.num_responses,
                temperature=algorithm.temperature,
                seed=derive_seed(config.seed, "ladder", draw),  # by the draw alone: all rungs share the streams
            )
            rollouts = engine.generate(task.prompts(draw, algorithm.num_prompts), sampling)
            yield rollouts, training.score(rollouts, RoutingPlan("natural"))
    finally:
        engine.close()


def markdown(rungs: Sequence[Rung | Missing]) -> str:
    """The rungs as a table: mean and half-width of the 95% interval over seeds; below it, missing rungs and why."""
    climbed = [rung for rung in rungs if isinstance(rung, Rung)]
    table = markdown_table(
        ("engine", "kernels", *TITLES.values()), [(r.name, r.kernels, *(r.metrics[m] for m in TITLES)) for r in climbed]
    )
    missing = [f"Not on this machine: {rung.name} ({rung.reason})." for rung in rungs if isinstance(rung, Missing)]
    return table + "".join(f"{line}\n" for line in (["", *missing] if missing else []))


__all__ = ["RUNGS", "Missing", "Rung", "climb", "markdown"]
