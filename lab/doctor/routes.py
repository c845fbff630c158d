"""Clues from the routes of both engines: how often they differ relative to the log-probabilities, and where.

An error of the hidden states moves logits and router logits alike; an error of the routers alone shows in the ratio.
Papers: R3 (arXiv 2510.11370) sec. 3.2 and App. H.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lab.doctor import gap
from lab.doctor.view import View
from theory.routing.record import MISSING


def num_flips(view: View) -> float | None:
    """Number of (row, layer) pairs whose sets of experts differ."""
    return None if view.difference_RL is None else float((view.difference_RL > 0).sum())


def _flip_rate(view: View) -> float | None:
    """(flips + 1) / rows and layers: the added one keeps a rate from few flips from being small by chance."""
    if view.difference_RL is None:
        return None
    num_compared = int((view.difference_RL != MISSING).sum())
    return ((view.difference_RL > 0).sum().item() + 1) / num_compared if num_compared else None


def flips_per_size(view: View) -> float | None:
    """Differing routers per unit of logit deviation: ((flips + 1) / rows and layers) / median of |d| / (1 - p)."""
    rate, usual = _flip_rate(view), gap.size(view)
    return rate / usual if rate is not None and usual else None


def kl_per_flip(view: View) -> float | None:
    """k3 of KL(mu || old) per token without its largest 0.5 %, / ((flips + 1) / rows and layers), nats.

    One token in a thousand may carry most of the KL and would dominate the ratio.
    """
    rate = _flip_rate(view)
    return None if rate is None else most(view.k3_n) / rate


def most(k3_n: Float[Tensor, " n"]) -> float:
    """The mean without the largest 0.5 %."""
    # Rounded up: one token is left at least, and below 200 tokens none is left out.
    return k3_n.sort().values[: math.ceil(0.995 * len(k3_n))].mean().item()


def flip_share_of_kl(view: View) -> float | None:
    """Share of the sum of k3, in [0, 1], on tokens whose own row has other experts at some layer."""
    if view.differs_n is None or view.k3_n.sum() <= 0:
        return None
    return (view.k3_n[view.differs_n].sum() / view.k3_n.sum()).item()


def flip_token_share(view: View) -> float | None:
    """Share of sampled tokens, in [0, 1], whose own row has other experts at some layer."""
    return None if view.differs_n is None else view.differs_n.double().mean().item()


NOWHERE = -1
"""Stands for no layer: tokens whose own row has the same experts everywhere."""


def kl_by_first_layer(view: View) -> dict[int, float] | None:
    """k3 of KL(mu || old), nats per token, split by the first layer at which the token's own row has other experts.

    The parts sum to the k3 KL; NOWHERE has the tokens without such a layer. None without both records.
    """
    record = view.trace.record_mu
    if view.difference_RL is None or record is None:
        return None
    differs_nL = (view.difference_RL > 0)[view.row_n]  # > 0, not != 0: -1, unknown, is no difference
    k3_n = view.k3_n / len(view)
    # argmax of a boolean row is its first True, but 0 for a row without any.
    first_n = torch.where(differs_nL.any(1), differs_nL.long().argmax(1), NOWHERE)
    return {
        NOWHERE if i == NOWHERE else record.layer_numbers[i]: k3_n[first_n == i].sum().item()
        for i in first_n.unique().tolist()
    }


def row_shift_gain(view: View) -> float | None:
    """Equal (row, layer) pairs of mu's row s and old's row s + 1 or s - 1, over those of row s; above 1: misplaced.

    Within responses, the better of both directions. Rows that one side lacks count as unequal.
    """
    mu, old = view.trace.record_mu, view.trace.record_old
    if mu is None or old is None or len(mu.experts) < 2:
        return None
    response_R = torch.repeat_interleave(torch.arange(len(mu)), mu.offsets.diff())
    is_inner = response_R[1:] == response_R[:-1]
    here = (mu.experts == old.experts).all(-1)[1:][is_inner].double().mean().item()
    later = (mu.experts[:-1] == old.experts[1:]).all(-1)[is_inner].double().mean().item()
    earlier = (mu.experts[1:] == old.experts[:-1]).all(-1)[is_inner].double().mean().item()
    return max(later, earlier) / max(here, 1e-9)


def unrecorded_share(view: View) -> float | None:
    """Share of old's (row, layer) pairs that mu lacks, in [0, 1]."""
    mu, old = view.trace.record_mu, view.trace.record_old
    if mu is None or old is None or not bool(old.is_recorded.any()):
        return None
    return (~mu.is_recorded & old.is_recorded).sum().item() / int(old.is_recorded.sum())
