"""Drift: the mean under mu of an objective's gradient at a position, whichever token is drawn.

A sampled token adds c(y) grad log pi(y), c = d term / d log pi at its advantage A. In the logits of its context the
mean of this under mu is sum_v mu(v) c(v) (e_v - pi): 0 where c = A pi/mu, and A (mu - pi) without a weight. At the mean
advantage of the prefix it is the drift (theory/exact/expected.py has it exactly, in the parameters). A sampled token
gives an estimate of its squared length:

    x = mu(y) (c(y) - A rho(y))^2, rho = pi/mu;    E_mu[x] = A^2 ||mu c/A - pi||^2.

That is the squared length of the mean where E_mu[c] = A, as without a weight and under an unbounded token weight;
else the two lengths differ by at most |E_mu[c] - A|. As the mean of A^2 is at least the square of the prefix's mean
advantage, and other tokens' parts may cancel, sqrt(mean x) bounds the drift of a context from above, in its logits; it
is not a norm in the parameters.

Letters: theory/contracts.py. Sources: score centering (arXiv 2609.20807) for the mean; the estimator is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.contracts import MiniBatch, UpdateStats
from theory.objectives import AGGREGATIONS, Objective, Totals
from theory.objectives.factors import wide


def squared_drift(
    objective: Objective,
    logp_pi_BT: Float[Tensor, "B T"],
    logp_old_BT: Float[Tensor, "B T"],
    logp_mu_BT: Float[Tensor, "B T"],
    advantages_B: Float[Tensor, " B"],
    is_response_BT: Bool[Tensor, "B T"],
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """x of every token that the objective keeps, in squared units of advantage, 0 elsewhere; and the mask of these.

    c comes from the objective itself, clips and weights included, without centering, penalty and denominators. Raises
    ValueError for an objective whose tokens depend on each other.
    """
    if not objective.is_tokenwise:
        raise ValueError(
            f"{objective.name}: expected an objective whose tokens add up one by one (Objective.is_tokenwise)"
        )
    # Without centering, penalty and denominators the gradient in log pi is c alone.
    bare = replace(objective, centering="none", kl_coefficient=0.0, aggregation=AGGREGATIONS["token_sum"])
    # A leaf of its own: the derivative stops here, and needs neither the caller's graph nor its grad mode.
    leaf_BT = wide(logp_pi_BT.detach()).requires_grad_()
    with torch.enable_grad():
        given = (logp_old_BT, logp_mu_BT, advantages_B, is_response_BT)
        output = bare(leaf_BT, *given, totals=Totals(1, 1), has_metrics=False)
        (c_BT,) = torch.autograd.grad(output.objective, leaf_BT)
    kept_BT = objective.kept(logp_old_BT, logp_mu_BT, is_response_BT)
    pi_BT, mu_BT = (torch.where(kept_BT, wide(x_BT.detach()), 0.0) for x_BT in (logp_pi_BT, logp_mu_BT))
    # mu (c - A pi/mu)^2 = (sqrt(mu) c - A pi / sqrt(mu))^2, without a ratio that overflows where mu is tiny.
    gap_BT = (mu_BT / 2).exp() * c_BT - wide(advantages_B)[:, None] * (pi_BT - mu_BT / 2).exp()
    # In float64: the square of a ratio above 2e19 is no number of float32.
    return torch.where(kept_BT, gap_BT.double().square(), 0.0), kept_BT


def drift_metrics(objective: Objective, updates: Sequence[tuple[MiniBatch, UpdateStats]]) -> dict[str, float]:
    """`rollout_corr/drift` and its standard error, over the tokens of all updates, at pi before each of them.

    drift = sqrt(m), m = sum x / n over n kept tokens; its standard error is that of a ratio of sums over responses, by
    the delta method: sqrt(B / (B - 1) sum_b (x_b - m n_b)^2) / n / (2 drift). Absent for an objective whose tokens
    depend on each other, and where no token is kept; the error is also absent for fewer than two responses or no drift.
    """
    if not objective.is_tokenwise:
        return {}
    sums: list[tuple[Tensor, Tensor]] = []
    for minibatch, stats in updates:
        batch = minibatch.rollouts.padded()
        x_BT, kept_BT = squared_drift(
            objective, stats.logp_pi_BT, minibatch.logp_old_BT, batch.logp_mu_BT, minibatch.advantages_B,
            batch.is_response_BT,
        )  # fmt: skip
        # Per response, the unit of the standard error: tokens of a response share its advantage and its context.
        sums.append((x_BT.sum(1), kept_BT.double().sum(1)))
    x_B, num_B = (torch.cat(parts) for parts in zip(*sums, strict=True))
    num, B = float(num_B.sum()), len(x_B)
    if num == 0:
        return {}
    mean = float(x_B.sum()) / num
    found = {"rollout_corr/drift": mean**0.5}
    if B > 1 and mean > 0:
        spread = float((x_B - mean * num_B).square().sum()) * B / (B - 1)
        found["rollout_corr/drift_se"] = spread**0.5 / num / (2 * mean**0.5)
    return found
