"""The table of engine defects: the effect of each dial on a trained model's policy and routes, and the broken links.

Every engine has the trainer's weights (a stale one: earlier weights of the same run), samples the same
problems with the same seeds, and is scored by the training engine, as on the ladder of real engines.
Papers: MiniRL (arXiv 2512.01374) Eq. 5, R3 (2510.11370) Eq. 3, sec. 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.ladder import SeedMean, seed_mean
from lab.tasks import TextTask
from sandbox.config import SandboxRun, TrainingBlock
from sandbox.engines import KINDS, PartialWeights, ReductionOrder
from sandbox.engines.defect import LINKS, Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.run import build_engine, check_shape, initial_model, open_task
from sandbox.training.engine import SandboxTrainingEngine
from sandbox.training.numerics import training_numerics
from theory.contracts import Rollouts, Sampling
from theory.divergences import discrepancy_metrics, masked_mean, surprise_gap
from theory.loop import global_step
from theory.routing.measures import routing_metrics
from theory.routing.passes import PASSES, RoutingPlan
from theory.step_metrics import old_pass_metrics
from theory.streams import derive_seed
from theory.turns import roll_out

RUNGS: dict[str, Defect | None] = {"exact": None} | {
    name: defect for kind in KINDS for name, defect in kind.rungs().items()
}
"""The engines of the table, by name: the defect, or None for the exact engine."""

REPEATED: dict[str, TrainingBlock] = {
    "fp32, fixed order": TrainingBlock(),
    "fp32, 8 units": TrainingBlock(reduction_order=ReductionOrder(units=8)),
    "bf16, fixed order": TrainingBlock(precision="bf16"),
    "bf16, 8 units": TrainingBlock(precision="bf16", reduction_order=ReductionOrder(units=8)),
    "bf16, 8 units, partial sums in bf16": TrainingBlock(
        precision="bf16", reduction_order=ReductionOrder(units=8, partials="bf16")
    ),
}
"""Training numerics under which the same responses are scored twice, in micro-batches of two sizes."""

METRICS = {
    "rollout_corr/k3_kl": "k3 KL(mu, old)",
    "rollout_corr/extreme_frac_tau2": "F(2)",
    "routing/router_disagreement": "routers that differ",
    "surprise_gap": "surprise - entropy",
}
"""Registered metrics, and the mean over tokens of (-log old(y_t) - entropy of old): 0 on average if y_t ~ old."""

# Global steps taken first: enough to pass a warm-up, so that versions are a full step apart.
NUM_STEPS = 8


@dataclass(frozen=True)
class DefectRow:
    """One engine against the trainer, over draws of `num_tokens` tokens in all; metrics by the names of METRICS."""

    name: str
    defect: Defect | None
    num_tokens: int
    metrics: dict[str, SeedMean]

    @property
    def breaks(self) -> str:
        """The broken links in the chain's order, as words."""
        words = {"batch": "alone == in a batch", "prefill": "prefill == decode", "trainer": "trainer == engine"}
        words["sampler"] = "sampler == scorer"
        broken = () if self.defect is None else self.defect.breaks
        return ", ".join(words[link] for link in LINKS if link in broken) or "none"


class Bench:
    """A trained model of some versions, its trainer, and the batches that every engine samples."""

    def __init__(self, config: SandboxRun, num_steps: int = NUM_STEPS):
        """Builds the config's starting model (cold start from its cache), then takes steps with an exact engine."""
        # Batch invariance was measured with one thread (docs/decisions/0002-batch-invariant-kernels.md).
        torch.set_num_threads(1)
        config = config.settled()
        self.config, self.algorithm = config, config.algorithm.build()
        self.task: TextTask = open_task(config)
        check_shape(config, self.task)
        self.trainer = self.build_trainer(
            initial_model(config, self.task, "none").compute_with(config.kernels()), config.training
        )
        # `named_tensors` gives copies: later updates leave a version unchanged.
        self.versions: list[list[tuple[str, Tensor]]] = [list(self.trainer.named_tensors())]
        rollout = self.engine()
        natural = replace(self.algorithm, mode="none")  # the table measures engines, not remedies
        for step in range(num_steps):
            global_step(step, natural, rollout, self.trainer, self.task, config.seed)
            self.versions.append(list(self.trainer.named_tensors()))

    @property
    def words(self) -> str:
        """The model in words, without a full stop."""
        model = self.trainer.model.config
        experts = (
            f"{model.num_experts} experts, {model.experts_per_token} per token" if model.moe_layers else "no experts"
        )
        taught = "" if self.config.cold_start is None else "taught its task, then "
        return (
            f"The model: {model.num_layers} layers, width {model.hidden_size}, {experts}, {taught}trained for "
            f"{len(self.versions) - 1} global steps"
        )

    def build_trainer(
        self, model: MoE, block: TrainingBlock, micro_batch_size: int | None = None
    ) -> SandboxTrainingEngine:
        """A training engine of this model with the block's arithmetic."""
        return SandboxTrainingEngine(
            model,
            self.algorithm.optimizer,
            freeze_router=self.algorithm.freeze_router,
            micro_batch_size=micro_batch_size or block.micro_batch_size,
            keep_reference=self.algorithm.objective.kl_coefficient > 0,
            numerics=training_numerics(block.precision, block.reduction_order, block.products),
        )

    def engine(self, *defects: Defect) -> SandboxEngine:
        """The engine with these defects, given every version that it can remember, the newest last."""
        engine = build_engine(self.config, self.trainer.model.config, self.task, defects)
        newest = len(self.versions) - 1
        is_partial = any(isinstance(defect, PartialWeights) for defect in defects)
        # Partial weights keep those of the first hand-over, so they need the whole history.
        num_older = newest if is_partial else engine.stale.versions if engine.stale else 0
        for version in range(max(0, newest - num_older), newest + 1):
            engine.load_weights(self.versions[version], version)
        return engine

    def sample(self, engine: SandboxEngine, draw: int) -> Rollouts:
        """The engine's responses to the draw's problems, in as many turns as a run's."""
        sampling = Sampling(
            max_tokens=self.algorithm.max_tokens,
            num_responses=self.algorithm.num_responses,
            temperature=self.algorithm.temperature,
            seed=derive_seed(self.config.seed, "defects", draw),
        )
        # Beyond the numbers that NUM_STEPS training steps take.
        first = NUM_STEPS * self.algorithm.dynamic_sampling_rounds
        prompts = self.task.prompts(first + draw, self.algorithm.num_prompts)
        if engine.prefixes is not None:
            engine.prefixes.clear()  # draws are independent, like the steps of a run
        return roll_out(engine, self.task, prompts, sampling, self.algorithm.max_turns)

    def rung(self, name: str, num_seeds: int) -> DefectRow:
        """The engine of that name against the trainer."""
        defect, rows, num_tokens = RUNGS[name], [], 0
        engine = self.engine() if defect is None else self.engine(defect)
        for draw in range(num_seeds):
            rollouts = self.sample(engine, draw)
            scores = self.trainer.score(rollouts, RoutingPlan("natural"))
            metrics = old_pass_metrics(rollouts, scores, PASSES["none"])
            gap_BT = surprise_gap(scores.logp_BT, scores.entropy_BT)
            gap = masked_mean(gap_BT, rollouts.padded().is_response_BT).item()
            rows.append({**metrics, "surprise_gap": gap})
            num_tokens += sum(int(r.is_response.sum()) for r in rollouts.responses)
        return DefectRow(name, defect, num_tokens, _means(rows))

    def repeated(self, name: str, num_seeds: int) -> DefectRow:
        """Two old passes over the same responses under these training numerics, in micro-batches of two sizes.

        R3 sec. 3.3: the first pass is used as mu, the second as old.
        """
        block, exact, rows, num_tokens = REPEATED[name], self.engine(), [], 0
        # Both trainers hold one model, whose weights no score changes.
        passes = [self.build_trainer(self.trainer.model, block, size) for size in (64, 24)]
        for draw in range(num_seeds):
            rollouts = self.sample(exact, draw)
            first, second = (trainer.score(rollouts, RoutingPlan("natural")) for trainer in passes)
            metrics = discrepancy_metrics(second.logp_BT, first.logp_BT, rollouts.padded().is_response_BT)
            if first.natural is not None and second.natural is not None:
                metrics |= routing_metrics(first.natural, second.natural)
            rows.append(metrics)
            num_tokens += sum(int(r.is_response.sum()) for r in rollouts.responses)
        return DefectRow(name, None, num_tokens, _means(rows))


def _means(rows: Sequence[dict[str, float]]) -> dict[str, SeedMean]:
    return {name: seed_mean([row[name] for row in rows]) for name in METRICS if name in rows[0]}


def check_rungs(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is not in RUNGS."""
    unknown = [name for name in names if name not in RUNGS]
    if unknown:
        raise ValueError(f"--rung: expected some of {'; '.join(RUNGS)}, got {'; '.join(unknown)}")
