"""The weight of every token: the correction's, times the mask of a further rejection, over its mean if normalised.

    w_t = correction(t) [rejection(t)] / mean of correction over the mini-batch's kept responses

All of it is constant. The mean is that of the whole mini-batch, known before the gradient pass, so that micro-batches
add up. A token that a rejection gives the weight 0 stays in its response, and in the mean.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.objectives.corrections import Correction
from theory.objectives.factors import Factor


def token_weights(
    correction: Correction,
    rejection: Correction,
    log_gap_BT: Float[Tensor, "B T"],
    log_rho_BT: Float[Tensor, "B T"],
    kept_BT: Bool[Tensor, "B T"],
    is_response_BT: Bool[Tensor, "B T"],
    log_mean_weight: float,
) -> Factor:
    """The weight on kept tokens, and 0 elsewhere: the weight of a rejected response may be inf."""
    # Neither from the other: the value meets its cap to the bit, the logarithm is right where the value overflows.
    value_BT = correction.weight(log_gap_BT, is_response_BT)
    log_BT = correction.log_weight(log_gap_BT, is_response_BT)
    if rejection.name != "none":
        # A rejection of single tokens: weight 0, and still in every denominator.
        passes_BT = ~rejection.truncated(log_rho_BT, is_response_BT)
        value_BT, log_BT = torch.where(passes_BT, value_BT, 0.0), torch.where(passes_BT, log_BT, -math.inf)
    if log_mean_weight != 0:
        # In logarithms: a weight that overflows may be finite over its mean.
        log_BT = log_BT - log_mean_weight
        value_BT = log_BT.exp()
    return Factor(torch.where(kept_BT, value_BT, 0.0), torch.where(kept_BT, log_BT, -math.inf))


def log_mean_weight(
    correction: Correction,
    log_rho_BT: Float[Tensor, "B T"],
    kept_BT: Bool[Tensor, "B T"],
    count_B: Float[Tensor, " B"] | None = None,
) -> float:
    """log of the mean weight over kept tokens, nats; over responses where a response has one weight.

    `count_B` is how often each response occurs in the batch, by default once; with probabilities the mean is that of an
    infinite one. It is 0 (no division) where there is no token or every weight is 0.
    Source: verl's rollout_is_batch_normalize. Differs from source: (1) verl's mean is over the global batch, this one
    over the mini-batch; (2) it is never clamped; (3) verl's mean counts rejected responses, whose weights it truncates.
    """
    log_BT = correction.log_weight(log_rho_BT, kept_BT).double()
    count_BT = (torch.ones_like(log_BT[:, 0]) if count_B is None else count_B.double())[:, None].expand_as(log_BT)
    is_counted_BT = kept_BT & (count_BT > 0)
    if correction.per_response:
        # Every token of a response carries its weight; the first one counts for all.
        is_counted_BT = is_counted_BT & (kept_BT.long().cumsum(1) == 1)
    log_N, count_N = log_BT[is_counted_BT], count_BT[is_counted_BT]
    if log_N.numel() == 0 or bool((log_N == -math.inf).all()):
        return 0.0
    # In logarithms, as a single weight may overflow.
    return float((log_N + count_N.log()).logsumexp(0) - count_N.sum().log())
