"""Clues of what tokens were drawn from, held against what was scored: the link that log-probabilities alone hide."""

from __future__ import annotations

import math

import torch

from lab.doctor.view import MIN_TOKENS, View
from theory.divergences import surprise_gap


def mean_surprise(view: View) -> float | None:
    """Mean of -log old - entropy of old, nats per token: 0 in expectation if tokens are drawn from old."""
    return None if view.entropy_n is None else surprise_gap(view.old_n, view.entropy_n).mean().item()


def surprise_z(view: View) -> float | None:
    """The same in standard errors of independent tokens: negative if they are too likely."""
    if view.entropy_n is None or len(view) < MIN_TOKENS:
        return None
    gap_n = surprise_gap(view.old_n, view.entropy_n)
    return (gap_n.mean() / (gap_n.std() / len(view) ** 0.5).clamp(min=1e-300)).item()


def collision_z(view: View) -> float | None:
    """Repeats among draws from one context, over what they should be, in standard errors: positive if too many.

    Of two draws y, y' from one context, E[1(y' = y) | y] = mu(y). Summed over the ordered pairs of each context, and
    divided by the root of the sum of squares over contexts.
    """
    _, context_n, visits = view.context_n.unique(return_inverse=True, return_counts=True)
    _, group_n, sizes = view.draw_n.unique(return_inverse=True, return_counts=True)
    excess_n = (sizes[group_n] - 1) - (visits[context_n] - 1) * view.mu_n.exp()
    excess = torch.zeros(len(visits), dtype=torch.float64).index_add(0, context_n, excess_n)
    if int((visits > 1).sum()) < MIN_TOKENS or not bool((excess != 0).any()):
        return None
    return (excess.sum() / excess.square().sum().sqrt()).item()


def tail_share(view: View) -> float | None:
    """Unlikely tokens (p < 1/2) that were drawn where entropy is below 0.325, over how many there should be.

    Expected: sum of q with h(q) = entropy, h the entropy of two outcomes (q, 1 - q), q < 1/2; 0.325 = h(0.1). Absent
    without entropies, or where fewer than 5 are expected.
    """
    if view.entropy_n is None:
        return None
    q = torch.linspace(1e-9, 0.1, 20001, dtype=torch.float64)
    h = -(q * q.log() + (1 - q) * torch.log1p(-q))
    is_sure_n = view.entropy_n < h[-1]
    expected = q[torch.searchsorted(h, view.entropy_n[is_sure_n].contiguous()).clamp(max=len(q) - 1)].sum().item()
    return int((view.old_n[is_sure_n] < math.log(0.5)).sum()) / expected if expected >= 5 else None
