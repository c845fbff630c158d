"""One rank of the Megatron training engine: scores sampled tokens with `old`, and takes gradient steps with `pi`.

Every rank gets the whole batch, works on its own share of responses, positions and layers, and returns parts. Scoring
and training run the same forward, so that pi equals old bit for bit on a mini-batch that was scored as it is trained.

Papers: MiniRL (arXiv 2512.01374) Eq. 5, R3 (2510.11370) Eq. 8 and 9, Pr2 (2606.00395) Eq. 4-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from scaled.config import ModelBlock, TrainingBlock
from scaled.megatron_engine import checkpoints
from scaled.megatron_engine.micro_batches import MicroBatch
from scaled.megatron_engine.optimizer import RankOptimizer
from scaled.megatron_engine.parts import ScorePart, UpdatePart
from scaled.megatron_engine.policy import Policy
from scaled.megatron_engine.predictor import StagePredictor
from scaled.megatron_engine.scoring_rank import ScoringRank
from scaled.megatron_engine.weights import export_hf
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Rollouts
from theory.objectives import Objective, Top
from theory.objectives.aggregations import Totals
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import fold


class MegatronRank(ScoringRank):
    """A rank of theory's TrainingEngine, in a process where `parallel.initialize` has run.

    Every method but `give_way`, `predictor_weights` and `has_saved` is a collective: all ranks must call it, with the
    same arguments. `algorithm` says how to optimise, whether the router is frozen, and whether a predictor is trained.
    """

    def __init__(
        self, model: ModelBlock, training: TrainingBlock, algorithm: Algorithm, keep_reference: bool = False
    ) -> None:
        super().__init__(model, training, trained=True, freeze_router=algorithm.freeze_router)
        shape, layout = self.shape, self.layout
        self.num_updates = 0
        self.saver = checkpoints.Saver()
        self.reference = None
        if keep_reference:
            self.reference = Policy(shape, training, layout, model.path, trained=False, freeze_router=True)
        # After the weights are loaded: under bf16 the optimiser's fp32 masters are copies of them.
        self.optimizer = RankOptimizer(self.policy.wrapped, algorithm.optimizer, training)
        self.trains_predictor = algorithm.passes.trains_predictor
        self.predictor: StagePredictor | None = None  # a stage without routers has none
        layers = sorted(n for replay in self.policy.replays for n in replay.layer_numbers)
        if self.trains_predictor and layers:
            self.predictor = StagePredictor(
                layers, shape.hidden_size, shape.num_experts, algorithm.predictor, layout.pp_rank, self.policy.device
            )

    def score_reference(self, rollouts: Rollouts) -> ScorePart:
        """This rank's share of log pi_ref: the model folder's weights, naturally routed, and no routes reported."""
        if self.reference is None:
            raise ValueError("score_reference: expected an engine that keeps a reference, got keep_reference=False")
        plan = RoutingPlan("natural")
        sizes = self._sizes(rollouts, plan)
        # A KL penalty reads the sampled tokens alone, so mu's likeliest ones need no scores.
        result = self.reference.run(self._micro_batches(replace(rollouts, top=None)), plan)
        return ScorePart(sizes, tuple(result.tokens), ())

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdatePart:
        """One clipped AdamW step up the objective, then one predictor step if the mini-batch carries features.

        Raises NonFiniteError on every rank, before any weight changes, where the gradient is not finite.
        """
        rollouts = minibatch.rollouts
        sizes = self._sizes(rollouts, plan)
        loss = _ObjectiveLoss(minibatch, objective)
        self.optimizer.take_back()  # before zero_grad, which writes into the buffers that this brings back
        self.optimizer.zero_grad()
        result = self.policy.run(self._micro_batches(rollouts), plan, loss)
        step_metrics = self.optimizer.step(self.num_updates)
        self.num_updates += 1
        predictor = None
        if minibatch.features is not None and self.predictor is not None:
            if plan.feature_rows is None:
                raise ValueError("expected feature rows in the plan of a mini-batch with cached features, got none")
            # The routes have the logits of the pass above: pi's, from before this step.
            predictor = self.predictor.step(minibatch.features, sizes, result.routes, step_metrics["actor/lr"])
        # The ranks of TP and CP compute the same loss: if each reported it, it would be summed once per rank.
        is_reporter = self.layout.is_last_stage and self.layout.is_reporter
        return UpdatePart(
            sizes=sizes,
            tokens=tuple(result.tokens),
            routes=tuple(result.routes),
            micro_metrics=tuple(loss.metrics) if is_reporter else (),
            objectives=tuple(loss.values) if is_reporter else (),
            step_metrics=step_metrics,
            predictor=predictor,
        )

    def give_way(self) -> None:
        """Frees GPU memory for engines until the next update, as `training.offload` says; weights stay."""
        self.optimizer.give_way()

    def export(self, folded: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The current weights, whole and under Hugging Face names; exactly one rank yields each tensor.

        `folded` adds the predictor to the gates: the rank that yields a gate has its predictor.
        """
        tensors = super().export()
        # `_shared_out` (weights.py) gives every gate to the first replica, so that one rank of a stage folds.
        yields_gates = self.layout.replica_rank == 0 and self.layout.tp_rank == 0
        if not folded or self.predictor is None or not yields_gates:
            return tensors
        return fold(tensors, self.predictor.trainer.weights(), self.shape.gates)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradient of the loss (minus the objective) in the last update, before clipping, under `export`'s names.

        Bit-equal to the reduced gradient if nothing was clipped, else equal up to rounding. Raises ValueError with a
        distributed optimizer, whose ranks hold the reduced gradient in shards, and before the first update.
        """
        if self.training.distributed_optimizer:
            raise ValueError("training.distributed_optimizer: expected false for whole gradients, got true")
        if self.num_updates == 0:
            raise ValueError("gradients: expected at least 1 update before this call, got 0")
        clipping = self.optimizer.clipping  # main_grad was scaled by it in place: dividing undoes that
        return export_hf(
            self.policy.chunks,
            self.shape,
            self.layout,
            tensors=lambda p: p.main_grad / clipping,  # type: ignore[attr-defined]
        )

    def predictor_weights(self) -> dict[int, Float[Tensor, "D E"]]:
        """W_p of this rank's layers by number, the same on every rank of the stage; empty without a predictor."""
        if self.predictor is None:
            return {}
        return {number: weight.cpu() for number, weight in self.predictor.trainer.weights().items()}

    def save(self, folder: str | Path) -> None:
        """Weights, optimiser states, number of updates and predictor, for `load` in this layout or another."""
        checkpoints.save(self, Path(folder))

    def begin_save(self, folder: str | Path) -> None:
        """`save` in a thread, with the current values: this returns once they are copied."""
        self.saver.begin(self, Path(folder))

    def has_saved(self, wait: bool) -> bool:
        """Whether the last `begin_save` has written its files; `wait` blocks until it has."""
        return self.saver.is_done(wait)

    def load(self, folder: str | Path) -> None:
        """The inverse of `save`: in the same layout, training continues with the same bits."""
        checkpoints.load(self, Path(folder))


class _ObjectiveLoss:
    """Minus a micro-batch's share of the objective, with the denominators of the whole mini-batch."""

    def __init__(self, minibatch: MiniBatch, objective: Objective) -> None:
        self.metrics: list[tuple[int, dict[str, Tensor]]] = []
        self.values: list[Tensor] = []
        self._minibatch, self._objective = minibatch, objective
        self._batch = whole = minibatch.rollouts.padded()
        self._totals: Totals = objective.totals(minibatch.logp_old_BT, whole.logp_mu_BT, whole.is_response_BT)

    def __call__(self, micro: MicroBatch, logp_bT: Tensor, logp_top_bTK: Tensor | None) -> Tensor:
        def own(x_BT: Tensor) -> Tensor:
            return x_BT[list(micro.indices), : micro.num_positions].to(logp_bT.device)

        m = self._minibatch
        is_response_bT = own(self._batch.is_response_BT)
        output = self._objective(
            logp_bT,
            own(m.logp_old_BT),
            own(self._batch.logp_mu_BT),
            m.advantages_B[list(micro.indices)].to(logp_bT.device),
            is_response_bT,
            logp_ref_BT=None if m.logp_ref_BT is None else own(m.logp_ref_BT),
            top=None if logp_top_bTK is None else self._top(logp_top_bTK, micro),
            router_shift_BT=None if m.router_shift_BT is None else own(m.router_shift_BT),
            advantages_BT=None if m.advantages_BT is None else own(m.advantages_BT),
            totals=self._totals,
        )
        self.metrics.append((int(is_response_bT.sum()), {k: v.cpu() for k, v in output.metrics.items()}))
        self.values.append(output.objective.detach().cpu())
        return -output.objective

    def _top(self, logp_top_bTK: Tensor, micro: MicroBatch) -> Top:
        """Log-probs of mu's likeliest tokens of a micro-batch under pi, old and mu."""
        record, old = self._minibatch.rollouts.top, self._minibatch.logp_old_top
        if record is None or old is None:
            raise ValueError(
                "expected log pi_old of mu's likeliest tokens in a mini-batch whose rollouts have them, got none"
            )
        old_bTK, mu_bTK = (
            rows.select(micro.indices).padded(micro.num_positions).to(logp_top_bTK.device)
            for rows in (old, record.logp_rows)
        )
        return Top(logp_top_bTK, old_bTK, mu_bTK, record.is_complete)


__all__ = ["MegatronRank"]
