"""Forward passes of the sandbox's training engine: log-probs and entropies of a micro-batch, and its routing.

Extra letters: n, the valid response tokens of a micro-batch, packed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sandbox.kernels.numerics import Numerics
from sandbox.model import MoE, Routing
from sandbox.training.head import head_scores
from theory.contracts import Response, Rollouts, TokenBatch
from theory.routing.features import RouterFeatures
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.routing.replay import ReplayContext


@dataclass
class Forward:
    """The forward pass of one micro-batch; log-probs carry the graph if gradients are on.

    `entropy_BT` and `sum_squares_BT` of the whole distributions are there if the pass was asked for them.
    """

    batch: TokenBatch
    logp_BT: Float[Tensor, "B T"]
    logp_top_BTK: Float[Tensor, "B T K"] | None = None
    entropy_BT: Float[Tensor, "B T"] | None = None
    sum_squares_BT: Float[Tensor, "B T"] | None = None


@dataclass
class BatchRoutes:
    """The routing of several micro-batches, in order."""

    used: list[RoutingRecord] = field(default_factory=list)
    natural: list[RoutingRecord] = field(default_factory=list)
    features: list[RouterFeatures] = field(default_factory=list)
    scores: list[RouterFeatures] = field(default_factory=list)

    def extend(self, others: BatchRoutes) -> None:
        """Adds those of later micro-batches."""
        self.used += others.used
        self.natural += others.natural
        self.features += others.features
        self.scores += others.scores

    def add(self, context: ReplayContext) -> None:
        """Adds the records of a finished pass; a dense model has none."""
        natural, features, scores = context.natural, context.features, context.scores
        # Under natural routing `context.used` would build an equal record again.
        used = natural if context.plan.source == "natural" else context.used
        if used is not None and natural is not None:
            self.used.append(used)
            self.natural.append(natural)
        if features is not None:
            self.features.append(features)
        if scores is not None:
            self.scores.append(scores)


@dataclass
class Kept:
    """An old pass whose graph is kept for the update on the same responses; `source` is its plan's."""

    responses: tuple[Response, ...]
    forward: Forward
    source: str
    routes: BatchRoutes

    def serves(self, rollouts: Rollouts, plan: RoutingPlan) -> bool:
        """Whether a new pass would equal this one: the same responses, both natural, or a replay of its experts."""
        if self.responses is not rollouts.responses:
            return False
        if plan.record is None:
            return plan.source == self.source == "natural"
        used = self.routes.used
        return len(used) == 1 and bool((plan.record.experts == used[0].experts).all())


def forward_pass(
    model: MoE, batch: TokenBatch, routing: Routing, numerics: Numerics, has_entropy: bool = False
) -> Forward:
    """Log-probs (with graph) of the response tokens at the batch's temperature; with `has_entropy` also entropies.

    Logits are computed for those rows only.
    """
    hidden_BSD = model.forward_hidden(batch.tokens_BS[:, :-1], routing, numerics=numerics)
    T = batch.is_response_BT.shape[1]
    # Observations are scored too; objectives and metrics mask them.
    exists_BT = torch.arange(T) < (batch.num_tokens_B - batch.num_prompt_B)[:, None]
    b_n, t_n = exists_BT.nonzero(as_tuple=True)
    rows_n = batch.predicting_row_BT[b_n, t_n]
    scores = head_scores(
        model,
        hidden_BSD[b_n, rows_n],
        batch.tokens_BS[b_n, rows_n + 1],  # row s predicts token s + 1
        # The rows are those of the packed tokens, in their order.
        None if batch.top is None else batch.top.ids.long(),
        numerics=numerics,
        temperature=batch.temperature,
        has_entropy=has_entropy,
    )

    def placed(values_n: Tensor) -> Tensor:
        return values_n.new_zeros(*exists_BT.shape, *values_n.shape[1:]).index_put((b_n, t_n), values_n)

    found = Forward(batch, placed(scores.logp_n))
    if scores.entropy_n is not None and scores.sum_squares_n is not None:
        found.entropy_BT, found.sum_squares_BT = placed(scores.entropy_n), placed(scores.sum_squares_n)
    if scores.logp_nK is not None:
        found.logp_top_BTK = placed(scores.logp_nK)
    return found


def concat_routes(seen: BatchRoutes) -> tuple[RoutingRecord | None, RoutingRecord | None, RouterFeatures | None]:
    """The experts used, the natural ones and the features, each None where no pass has them."""
    return (
        RoutingRecord.concat(seen.used) if seen.used else None,
        RoutingRecord.concat(seen.natural) if seen.natural else None,
        RouterFeatures.concat(seen.features) if seen.features else None,
    )
