"""Clues for misplaced or missing values: shifted by a token, filled with zeros, or cut off at the end."""

from __future__ import annotations

import math

import torch

from lab.doctor.view import MIN_TOKENS, View

VISIBLE = 1e-4
"""A log-probability below -VISIBLE, in nats, is too far from 0 to be a rounded 0."""


def shift(view: View) -> tuple[int, float] | None:
    """s in {-1, 1} that minimises mean |log mu_t - log old_{t+s}| within responses, and the gain from it.

    The gain is mean |log mu_t - log old_t| / mean |log mu_t - log old_{t+s}|; above 1: misaligned.
    """
    # Responses are packed one after the other: a pair of neighbours counts only within one response.
    is_inner = view.response_n[1:] == view.response_n[:-1]
    if int(is_inner.sum()) < MIN_TOKENS:
        return None
    # As many pairs as the shifted gaps below have.
    here = view.d_n[1:][is_inner].abs().mean()
    gaps = {
        1: (view.mu_n[:-1] - view.old_n[1:])[is_inner].abs().mean(),
        -1: (view.mu_n[1:] - view.old_n[:-1])[is_inner].abs().mean(),
    }
    s = min(gaps, key=lambda at: gaps[at].item())
    # The clamp: a shift that fits to the bit leaves a gap of 0.
    return s, (here / gaps[s].clamp(min=1e-9)).item()


def _zeros(view: View, at_last: bool, below: float) -> float | None:
    shares = []
    # Either side may be the one that was padded. A sure token's log-probability rounds to 0 too, so only tokens below
    # 0 on the other side are asked.
    for one, other in ((view.mu_n, view.old_n), (view.old_n, view.mu_n)):
        is_asked_n = (other < below) & (view.is_last_n == at_last)
        if bool(is_asked_n.any()):
            shares.append((one[is_asked_n] == 0).double().mean().item())
    return max(shares, default=None)


def zero_share(view: View) -> float | None:
    """Share, in [0, 1], of log-probabilities exactly 0 on one side among non-last tokens with p < 1/2 on the other."""
    return _zeros(view, at_last=False, below=math.log(0.5))


def zero_sure_share(view: View) -> float | None:
    """Share, in [0, 1], of 0 on one side among non-last tokens visibly below 0 on the other, likely tokens included.

    A distribution cut to its likeliest token has log-probability 0 as well.
    """
    return _zeros(view, at_last=False, below=-VISIBLE)


def zero_last_share(view: View) -> float | None:
    """Share, in [0, 1], of 0 on one side among last tokens visibly below 0 on the other."""
    return _zeros(view, at_last=True, below=-VISIBLE)


def end_share(view: View) -> float | None:
    """Share, in [0, 1], of the responses below the largest length and the largest total that end on an end token.

    The total counts the prompt; an end token is one that occurs only at ends. None with fewer than MIN_TOKENS such
    responses, or with observations. Responses that are masked as a whole do not count.
    """
    # An observation starts another turn: a turn's own end token then also stands inside the response.
    sampled_B = torch.bincount(view.response_n, minlength=len(view.trace))
    lengths_B = view.trace.offsets.diff() - view.trace.num_prompt
    if bool(((sampled_B > 0) & (sampled_B < lengths_B)).any()):
        return None
    last = view.token_n[view.is_last_n]
    lengths_B = view.position_n[view.is_last_n]
    totals_B = view.trace.offsets.diff()[view.response_n[view.is_last_n]]
    # The others may have been cut, which leaves no end token either: by a bound on the response (max_tokens), or on
    # prompt and response together (vLLM's max_model_len, prime-rl's seq_len).
    is_short_B = (lengths_B < lengths_B.max()) & (totals_B < totals_B.max())
    if int(is_short_B.sum()) < MIN_TOKENS:
        return None
    inside = set(view.token_n[~view.is_last_n].tolist())
    return sum(token not in inside for token in last[is_short_B].tolist()) / int(is_short_B.sum())
