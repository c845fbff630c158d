"""The inputs of an update besides the old pass: advantages, and facts about pi before its gradient pass.

Papers: MiniRL (arXiv 2512.01374) sec. 4.2, RSPO (2510.23027), M2PO (2510.01161), optimal token baseline (2602.07078).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from theory.advantages import ADVANTAGES, advantages_of, noisy_labels, overlong_penalty
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Rollouts, TokenScores, TrainingEngine
from theory.objectives import Objective
from theory.routing.passes import ModePlan, RoutingPlan
from theory.routing.shift import router_shift


def given_advantages(
    algorithm: Algorithm,
    rollouts: Rollouts,
    rewards_PG: Float[Tensor, "P G"],
    scores: TokenScores,
    noise: torch.Generator,
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B T"] | None]:
    """The advantages of responses, and those of tokens where the objective has them (theory/advantages.py).

    They see the rewards with label noise, drawn from `noise`, and with the length penalty. Raises ValueError where
    those of tokens need sums of squares that the training engine did not report.
    """
    labels_PG, advantage = noisy_labels(rewards_PG, algorithm.label_noise, noise), algorithm.objective.advantage
    if algorithm.overlong_buffer:
        # The penalty counts observations too; the lengths below count sampled tokens only.
        whole_PG = torch.tensor([len(r.is_response) for r in rollouts.responses]).view_as(labels_PG)
        buffer, factor = algorithm.overlong_buffer, algorithm.overlong_factor
        labels_PG = labels_PG + overlong_penalty(whole_PG, algorithm.max_tokens, buffer, factor)
    if not algorithm.objective.has_token_advantages:
        lengths_PG = torch.tensor(rollouts.padded().num_sampled_B).view_as(labels_PG)
        return advantages_of(advantage, labels_PG, lengths_PG).reshape(-1), None
    if scores.sum_squares_BT is None:
        raise ValueError(f"advantage {advantage} needs sum_v old(v)^2 from the training engine, got none")
    is_response_BT = rollouts.padded().is_response_BT
    tokens_BT = ADVANTAGES[advantage](labels_PG, scores.logp_BT, scores.sum_squares_BT, is_response_BT)
    return advantages_of("group_mean", labels_PG).reshape(-1), tokens_BT


def prepared(
    objective: Objective,
    passes: ModePlan,
    learner: TrainingEngine,
    minibatch: MiniBatch,
    old: TokenScores,
    plan: RoutingPlan,
    chosen: Sequence[int],
) -> tuple[MiniBatch, Objective]:
    """The mini-batch and objective of the update of these responses, with facts about pi before its gradient pass.

    They are the shift of its routers (RSPO) and the width of its bounds (M2PO), for objectives that have them. They
    come from a scoring pass of the mini-batch, routed like its gradient pass, so that they do not depend on the
    trainer's micro-batches. The first mini-batch needs none: pi is old there, unless old's gates were predicted.
    """
    if not objective.looks_ahead:
        return minibatch, objective
    now, experts = None, old.experts
    if minibatch.index > 0 or passes.old == "predicted":
        # Old's experts, whatever pi would choose: the shift compares both routers on the same ones.
        scored = experts.select(chosen) if objective.uses_router_shift and experts is not None else None
        # Only log-probabilities and the scores of old's experts: neither features nor mu's likeliest tokens.
        asked = replace(plan, feature_rows=None, scored=scored)
        now = learner.score(replace(minibatch.rollouts, top=None), asked)
    if objective.uses_router_shift:
        minibatch = replace(minibatch, router_shift_BT=_shift(minibatch, old, now, chosen))
    if objective.m2_budget:
        batch = minibatch.rollouts.padded()
        objective = objective.within_budget(
            # Without a pass pi is old: no token has moved away, and the budget sets no bound.
            minibatch.logp_old_BT if now is None else now.logp_BT,
            minibatch.logp_old_BT,
            batch.logp_mu_BT,
            minibatch.advantages_B[:, None] if minibatch.advantages_BT is None else minibatch.advantages_BT,
            batch.is_response_BT,
        )
    return minibatch, objective


def _shift(
    minibatch: MiniBatch, old: TokenScores, now: TokenScores | None, chosen: Sequence[int]
) -> Float[Tensor, "B T"]:
    """The shift of pi's routers from old's at every response token, nats; 0 without a pass of pi."""
    if now is None:
        return torch.zeros_like(minibatch.logp_old_BT)
    assert old.router_scores is not None, "old_pass requires them"
    assert now.router_scores is not None, "the same trainer reported them in the old pass"
    batch = minibatch.rollouts.padded()
    exists_BT = torch.arange(batch.is_response_BT.shape[1]) < (batch.num_tokens_B - batch.num_prompt_B)[:, None]
    # The old pass has rows of the whole batch; `now` has those of the chosen responses, in their order.
    return router_shift(old.router_scores.select(chosen), now.router_scores, batch.predicting_row_BT, exists_BT)
