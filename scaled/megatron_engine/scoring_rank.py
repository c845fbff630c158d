"""A rank of the Megatron engine that scores and exports its weights, and never trains.

It holds 2 bytes per bf16 weight: no gradients, no masters, no optimiser states. So a model whose training takes a
cluster can be measured beside an inference engine on one node (`firstorder ladder`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scaled.config import ModelBlock, TrainingBlock
from scaled.megatron_engine import parallel
from scaled.megatron_engine.micro_batches import MicroBatch, split
from scaled.megatron_engine.parts import BatchSizes, ScorePart
from scaled.megatron_engine.policy import Policy
from scaled.megatron_engine.replay import check_routing
from scaled.megatron_engine.weights import export_hf
from scaled.model_shape import load_shape
from theory.contracts import Rollouts
from theory.routing.passes import RoutingPlan


class ScoringRank:
    """A rank of the old pass, in a process where `parallel.initialize` has run; `trained` is for the subclass.

    Every method but `give_way` is a collective: all ranks must call it, with the same arguments.
    """

    def __init__(
        self, model: ModelBlock, training: TrainingBlock, *, trained: bool = False, freeze_router: bool = True
    ) -> None:
        self.training = training
        self.shape = load_shape(model.path, model.shape)
        self.layout = parallel.layout(training, self.shape.num_layers)
        self.policy = Policy(
            self.shape, training, self.layout, model.path, trained=trained, freeze_router=freeze_router
        )

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> ScorePart:
        """This rank's share of the old pass, without gradients: log pi_old of response tokens, entropies and routes."""
        sizes = self._sizes(rollouts, plan)
        result = self.policy.run(self._micro_batches(rollouts), plan)
        return ScorePart(sizes, tuple(result.tokens), tuple(result.routes))

    def give_way(self) -> None:
        """Frees torch's cached GPU memory for engines; weights stay."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def export(self, folded: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights, whole and under Hugging Face names; exactly one rank yields each tensor.

        `folded` changes nothing: there is no predictor to add to the gates.
        """
        return export_hf(self.policy.chunks, self.shape, self.layout)

    def _sizes(self, rollouts: Rollouts, plan: RoutingPlan) -> BatchSizes:
        num_rows_B = tuple(response.num_tokens - 1 for response in rollouts.responses)
        check_routing(plan, num_rows_B, self.shape.moe_layers)
        return BatchSizes(num_rows_B, max(len(response.tokens) for response in rollouts.responses))

    def _micro_batches(self, rollouts: Rollouts) -> list[MicroBatch]:
        return split(rollouts.padded(), self.layout, self.training, self.policy.device)


__all__ = ["ScoringRank"]
