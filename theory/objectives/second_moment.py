"""Bounds on the ratio from a budget on the mean square of log-ratios, over the tokens that move away from old.

    tau solves  (1/n) sum_j min((log r_j)^2, tau^2) = budget  over the n tokens with A log r > 0,
    eps_low' = max(eps_low, 1 - exp(-tau)),  eps_high' = max(eps_high, exp(tau) - 1),

and no bound at all where their mean is within the budget. The tokens are those of a whole mini-batch, before its
gradient pass: bounds per micro-batch would make the gradient depend on how the batch is split. Where tokens have
weights, sum and n are weighted: with probabilities tau is that of an infinite mini-batch.

Source: M2PO (arXiv 2510.01161), by its authors' code (Infini-AI-Lab/M2PO, `compute_m2po_policy_loss`), whose least
widths are 0.3 and 0.5; equation numbers were not available. Differs from source: (1) tau is the mini-batch's, where the
code takes each micro-batch's; (2) tau is the solution, where the code takes the largest |log r| below it.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.fields import About

Budget = Annotated[
    float, About("mean (log pi/old)^2, over tokens that move away, that sets the bounds (M2PO); 0: none", ge=0)
]


def clip_level(
    log_ratio_BT: Float[Tensor, "B T"],
    advantages_B1: Float[Tensor, "B _T"],
    kept_BT: Bool[Tensor, "B T"],
    budget: float,
    weights_B1: Float[Tensor, "B _T"] | None = None,
) -> float:
    """tau, nats, in (0, inf]: the |log r| at which capping brings the mean second moment down to the budget.

    The mean is over tokens, each weighing `weights_B1` >= 0, by default 1.
    """
    away_BT = kept_BT & (advantages_B1 * log_ratio_BT > 0)
    weight_BT = torch.ones_like(log_ratio_BT) if weights_B1 is None else weights_B1.expand_as(log_ratio_BT)
    away_BT = away_BT & (weight_BT > 0)  # weight 0 times an infinite square would be nan
    # In float64, as the cumulative sums below run over every token of a mini-batch.
    square_n, order_n = log_ratio_BT.detach()[away_BT].double().square().sort()
    weight_n = weight_BT[away_BT].double()[order_n]
    target = budget * float(weight_n.sum())
    moment_n = weight_n * square_n
    if float(moment_n.sum()) <= target:
        return math.inf
    # In ascending order: with the tokens before j uncapped, tau^2 solves before_j + left_j tau^2 = target; the right j
    # is the first whose own square reaches the target.
    before_n, lighter_n = _before(moment_n), _before(weight_n)
    left_n = weight_n.sum() - lighter_n
    reaches_n = before_n + left_n * square_n >= target
    if not reaches_n.any():  # the mean is above the budget by the rounding of its sum alone
        return math.inf
    first = int(reaches_n.nonzero()[0, 0])
    return math.sqrt(max(target - float(before_n[first]), 0.0) / float(left_n[first]))  # cumsum may round above it


def _before(x_n: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The sum of all that comes before each, in order."""
    # Not a cumulative sum less its own term: inf - inf is nan, and 1e18 - 1e18 has lost all that came before.
    return torch.cat([torch.zeros_like(x_n[:1]), x_n.cumsum(0)[:-1]])
