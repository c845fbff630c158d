"""Clues on the distribution that tokens were drawn from, which log-probabilities alone do not show."""

from __future__ import annotations

import math

import torch

from lab.doctor.view import MIN_TOKENS, View
from theory.divergences import surprise_gap


def mean_surprise(view: View) -> float | None:
    """Mean of -log old - entropy of old, nats per token: 0 in expectation for tokens drawn from old."""
    return None if view.entropy_n is None else surprise_gap(view.old_n, view.entropy_n).mean().item()


def surprise_z(view: View) -> float | None:
    """Mean surprise in standard errors of independent tokens: negative if tokens are too likely."""
    if view.entropy_n is None or len(view) < MIN_TOKENS:
        return None
    gap_n = surprise_gap(view.old_n, view.entropy_n)
    return (gap_n.mean() / (gap_n.std() / len(view) ** 0.5).clamp(min=1e-300)).item()


def collision_z(view: View) -> float | None:
    """Excess of repeats among draws from one context, in standard errors: positive if there are too many.

    For two draws y, y' from one context, E[1(y' = y) | y] = mu(y). The excess is summed over the ordered pairs of each
    context and divided by the root of the sum of squares over contexts.
    """
    _, context_n, visits = view.context_n.unique(return_inverse=True, return_counts=True)
    _, group_n, sizes = view.draw_n.unique(return_inverse=True, return_counts=True)
    # A draw has (sizes - 1) equal others among (visits - 1) others from its context.
    excess_n = (sizes[group_n] - 1) - (visits[context_n] - 1) * view.mu_n.exp()
    excess = torch.zeros(len(visits), dtype=torch.float64).index_add(0, context_n, excess_n)
    # Where every repeated context has a sure token, all excesses are 0 and the quotient would be 0 / 0.
    if int((visits > 1).sum()) < MIN_TOKENS or not bool((excess != 0).any()):
        return None
    # One square per context, not per draw: draws of a context share its counts, so their excesses are dependent.
    return (excess.sum() / excess.square().sum().sqrt()).item()


def tail_share(view: View) -> float | None:
    """Number of unlikely tokens (p < 1/2) drawn where the entropy is below 0.325 nats, over the expected number.

    Expected: sum of q with h(q) = entropy, h the entropy of two outcomes (q, 1 - q), q < 1/2; 0.325 = h(0.1). None
    without entropies, or if fewer than 5 are expected.
    """
    if view.entropy_n is None:
        return None
    # h has no inverse in closed form: it is tabulated on (0, 0.1], where it is increasing, and searched.
    q = torch.linspace(1e-9, 0.1, 20001, dtype=torch.float64)  # not from 0, where q log q is nan
    h = -(q * q.log() + (1 - q) * torch.log1p(-q))
    is_sure_n = view.entropy_n < h[-1]
    expected = q[torch.searchsorted(h, view.entropy_n[is_sure_n].contiguous()).clamp(max=len(q) - 1)].sum().item()
    return int((view.old_n[is_sure_n] < math.log(0.5)).sum()) / expected if expected >= 5 else None
