"""The token behind the norm of an update's gradient: one may outweigh a thousand others.

Where a ratio pi/old has no upper bound (PPO's clip with A < 0), a token that old found unlikely and pi does not has a
coefficient without bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sandbox.training.engine import SandboxTrainingEngine
from theory.contracts import MiniBatch
from theory.objectives.objective import Objective
from theory.routing.passes import RoutingPlan


@dataclass(frozen=True)
class LargestToken:
    """The token with the largest |dJ/dlog pi| (1 - pi) of a mini-batch, and the gradient with and without it.

    norm, norm_without: L2 norms of the gradient of J and of J without this token's term, before clipping, in units of J
    per weight. 1 - pi is the derivative of log pi in the token's own logit. logp_*: its log-probabilities, in nats.
    """

    norm: float
    norm_without: float
    advantage: float
    logp_mu: float
    logp_old: float
    logp_pi: float


def largest_token(
    trainer: SandboxTrainingEngine, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan
) -> LargestToken:
    """The largest token of the update that `trainer.update` would make now; nothing is changed.

    ValueError where the objective needs mu's likeliest tokens (centering).
    """
    forward, _ = trainer.differentiable(minibatch.rollouts, plan)
    batch, width = minibatch.rollouts.padded(), forward.logp_BT.shape[1]
    old_BT = minibatch.logp_old_BT[:, :width]
    shift_BT, gains_BT, ref_BT = (
        None if x_BT is None else x_BT[:, :width]
        for x_BT in (minibatch.router_shift_BT, minibatch.advantages_BT, minibatch.logp_ref_BT)
    )
    logp_pi_BT = forward.logp_BT.detach().requires_grad_()
    output = objective(
        logp_pi_BT, old_BT, batch.logp_mu_BT, minibatch.advantages_B, batch.is_response_BT,
        logp_ref_BT=ref_BT, router_shift_BT=shift_BT, advantages_BT=gains_BT, has_metrics=False,
    )  # fmt: skip
    (weight_BT,) = torch.autograd.grad(output.objective, logp_pi_BT)
    size_BT = torch.where(batch.is_response_BT, weight_BT.abs() * (1 - logp_pi_BT.detach().exp()), -1.0)
    b, t = divmod(int(size_BT.argmax()), width)
    whole = trainer.gradient((weight_BT * forward.logp_BT).sum())
    alone = trainer.gradient(weight_BT[b, t] * forward.logp_BT[b, t])
    gain = minibatch.advantages_B[b] if gains_BT is None else gains_BT[b, t]
    logps = (x_BT[b, t].item() for x_BT in (batch.logp_mu_BT, old_BT, logp_pi_BT))
    return LargestToken(whole.norm().item(), (whole - alone).norm().item(), gain.item(), *logps)


__all__ = ["LargestToken", "largest_token"]
