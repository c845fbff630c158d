"""Score centering: each position's part of the gradient, less its expectation under mu.

A sampled token y_t adds c(y_t) grad log pi(y_t) to the gradient, c = d term / d log pi at its advantage. The mean of
this under mu, E_mu[c(a) grad log pi(a)], is not 0 where mu is not pi: times the mean advantage of the prefix it is
drift, which no choice of token earned. Centering subtracts it on every kept token,

    - sum_a mu(a) c(a) grad log pi(a),

with all of mu, or with its K likeliest tokens H and everything else as one more token, "the tail", whose probabilities
are what H leaves of mu, old and pi. As grad log(1 - sum_H pi) = -sum_H pi(v) grad log pi(v) / (1 - sum_H pi), the tail
of mu is taken to be pi's rescaled by m/p, m and p their masses: the remaining drift is at most
max_v |grad log pi(v)| times the sum over the tail of |mu(v) c(v) - (m/p) pi(v) c(tail)|, which is 0 for K = V. A mask
on a divergence of probabilities (dppo_tv, dppo_kl) judges the tail by its mass, which is above each of its tokens'.

Source: score centering (arXiv 2609.20807), by its abstract and the public guide to NeMo-RL's implementation, whose C is
this with c = A w; the paper's own text was not available. Differs from the source: c is the objective's own, clips and
weights included, where NeMo-RL's clip acts on the sampled token alone.
Extra letter: J the K tokens of H, and the tail where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.objectives.factors import linear, times, wide

CENTERINGS = ("none", "full", "top_k")
WHOLE_VOCABULARY = 2**31 - 1
"""More tokens than any vocabulary has: the number that `full` has an engine record."""
SMALLEST_TAIL = 1e-6
"""The least probability of a tail of pi or old: float32 sums of probabilities are exact to 1e-7."""

Coefficients = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(log pi, log old, log mu, mask), each (B, T J), to c of these tokens, in units of the advantage."""


@dataclass(frozen=True)
class Top:
    """Log-probabilities of mu's likeliest tokens at every position: under pi with its gradient, under old and mu.

    -inf under mu where there is no token. `is_complete`: they are the whole vocabulary.
    """

    logp_pi_BTK: Float[Tensor, "B T K"]
    logp_old_BTK: Float[Tensor, "B T K"]
    logp_mu_BTK: Float[Tensor, "B T K"]
    is_complete: bool


def centering_term(top: Top, kept_BT: Bool[Tensor, "B T"], coefficients: Coefficients) -> Float[Tensor, "B T"]:
    """-sum_v C(v) log pi(v) of every kept token, 0 elsewhere: its gradient is the centering, its value means nothing.

    C(v) = mu(v) c(v) - (m/p) c(tail) pi(v), a constant; without the second part where `top` is complete.
    """
    pi_BTK, old_BTK, mu_BTK = (wide(x_BTK) for x_BTK in (top.logp_pi_BTK, top.logp_old_BTK, top.logp_mu_BTK))
    off_BT1 = ~kept_BT[..., None]
    # C is a constant: the gradient comes from log pi in the last line alone.
    given = [pi_BTK.detach(), old_BTK.detach(), mu_BTK.detach()]
    # Nothing off the mask may enter, nan included; a token of probability 0 under mu has no part in the expectation.
    given = [x_BTK.masked_fill(off_BT1, -torch.inf) for x_BTK in given]
    if not top.is_complete:
        given = [torch.cat([x_BTK, _tail(x_BTK, least)], -1) for x_BTK, least in zip(given, TAILS, strict=True)]
    pi_BTJ, _, mu_BTJ = given
    there_BTJ = kept_BT[..., None] & (mu_BTJ > -torch.inf)
    # The objective's own code sees one row of T J tokens, each of which stands for itself.
    pi, old, mu = (torch.where(there_BTJ, x_BTJ, 0.0).flatten(1) for x_BTJ in given)
    # Advantages (B, 1) broadcast over T J tokens; those per token, (B, T), would not (composition.py refuses them).
    c_BTJ = coefficients(pi, old, mu, there_BTJ.flatten(1)).view(there_BTJ.shape)
    each_BTJ = torch.where(there_BTJ, times(mu_BTJ.exp(), c_BTJ), 0.0)
    C_BTK = each_BTJ[..., : pi_BTK.shape[2]]
    if not top.is_complete:
        # (m/p) c(tail) pi(v): one quotient pi(v)/p by logarithms, and p is at least SMALLEST_TAIL.
        # Off the mask H has no mass and the tail is log 1: the difference is -inf - 0, never nan.
        C_BTK = C_BTK - each_BTJ[..., -1:] * (pi_BTJ[..., :-1] - pi_BTJ[..., -1:]).exp()
    logp_BTK = torch.where(there_BTJ[..., : pi_BTK.shape[2]], pi_BTK, 0.0)
    return -linear(C_BTK, logp_BTK).sum(-1)


TAILS = (SMALLEST_TAIL, SMALLEST_TAIL, 0.0)
"""The least tails of pi, old and mu: mu's may be 0, as nothing divides by it."""


def _tail(logp_BTK: Float[Tensor, "B T K"], least: float) -> Float[Tensor, "B T 1"]:
    """log of the probability of all other tokens, which counts as at least `least`."""
    return (1 - logp_BTK.exp().sum(-1, keepdim=True)).clamp(min=least).log()
