"""The expectation of the metric `rollout_corr/drift`, to compare with the drift itself (theory/exact/expected.py).

Letters: theory/exact/tree.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from theory.drift import squared_drift
from theory.exact.batch import Batch
from theory.exact.expected import Update
from theory.objectives import AGGREGATIONS


def token_drift(update: Update) -> float:
    """The root of the expected square of `rollout_corr/drift` (theory/drift.py) on one prompt, in units of advantage.

    nan where that metric is absent, and for finite groups where a response may be rejected.
    """
    batch, on_BT = update.batch, update.batch.forest.whole.is_response_BT
    if not batch.objective.is_tokenwise or not (batch.kept_Y.all() or batch.group.num_responses is None):
        return math.nan
    total = 0.0
    for sign, square_Y in zip((1.0, -1.0), _squared_advantages(batch), strict=True):
        # At one sign the gap is linear in the advantage: its square at A = +1 or -1 is scaled by A^2 below.
        sign_Y = torch.full_like(batch.probability_Y, sign)
        x_BT, _ = squared_drift(batch.objective, update.pi_BT, batch.old_BT, batch.mu_BT, sign_Y, on_BT)
        total += float((batch.probability_Y * square_Y * x_BT.sum(1)).sum())
    num_kept = float((batch.probability_Y * torch.where(batch.kept_Y, batch.forest.lengths, 0)).sum())
    # 0 where every response is rejected: no token is left to average over.
    return math.sqrt(total / num_kept) if num_kept > 0 else math.nan


def _squared_advantages(batch: Batch) -> Float[Tensor, "2 Y"]:
    """E[A^2; A > 0] and E[A^2; A < 0] of every response."""
    G = batch.group.num_responses
    if G is None:
        centred_Y = batch.reward_Y.double()
        if batch.group.baseline == "mean":
            centred_Y = centred_Y - (batch.probability_Y * centred_Y).sum()
        return torch.stack([centred_Y.clamp(min=0), centred_Y.clamp(max=0)]).square()
    # Counted in responses the denominator is G where none is rejected: a = A / G, and a group has G of them.
    by_responses = replace(batch, objective=replace(batch.objective, aggregation=AGGREGATIONS["token_sum"]))
    # One prompt, so one entry.
    (one,) = by_responses.groups
    return G * (one.moments.square_sC / one.classes.divisor_C)[:, one.classes.index_Y]
