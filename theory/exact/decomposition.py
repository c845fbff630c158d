"""A weight's bias, pair by pair of positions: the effect of token s's ratio on token t's gradient.

With delta_s = pi_s/mu_s - 1 and g_t = grad log pi_t, the bias of a weight w_t is E_mu[A sum_t (w_t - W) g_t], and to
first order in delta W - w_t is the sum of delta_s over the positions that the weight leaves out:

    no weight: every s;   token weight: s != t;   prefix weight: s > t;   sequence weight: none.

Three facts follow, the first two exact at any distance (tests/theory/test_exact_decomposition.py):
 1. E_mu[w_t g_t | prefix] = E_pi[g_t | prefix] = 0, so the mean of the token-, prefix- or sequence-weighted gradient
    does not depend on the baseline. A baseline lowers their variance alone.
 2. Without a weight it does: a baseline b adds b grad KL(mu || pi). Unweighted REINFORCE at reward R is that at R - b
    plus a pull of pi towards mu's samples, of strength b. A group's mean removes that pull.
 3. So with a baseline the token weight removes T of the T x T pairs, the covariances of the reward with delta_t g_t;
    the prefix weight also removes half of the others; the remainder grows with T.

Letters: theory/exact/tree.py; s and t are positions. Paper: MiniRL (arXiv 2512.01374) Eq. 2 and 4.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.exact.problem import Problem


def pair_terms(problem: Problem, baseline: float) -> Float[Tensor, "T T Q"]:
    """E_mu[(R - b) delta_s g_t] for every pair (s, t), in units of reward per parameter."""
    tree, logp_pi = problem.target.tree, problem.target.logp()
    T = tree.max_length
    edges = [[tree.zero_edges() for _ in range(T)] for _ in range(T)]
    for rows, paths in tree.chunks():
        mu_BT, pi_BT = tree.gather(problem.logp_mu, paths), tree.gather(logp_pi, paths)
        each_B1 = (mu_BT.sum(1).exp() * (problem.reward_Y[rows] - baseline))[:, None]
        # After the end both are 0, and so is the step's delta.
        delta_BT = (pi_BT - mu_BT).expm1()  # expm1: pi/mu - 1 would lose the digits of a small step
        for s in range(T):
            weighted_BT = each_B1 * delta_BT[:, s, None]
            for t in range(T):
                only_t_BT = torch.zeros_like(mu_BT)
                only_t_BT[:, t] = weighted_BT[:, 0]
                tree.scatter(edges[s][t], only_t_BT, paths)
    terms = [[problem.target.pullback(edges[s][t]) for t in range(T)] for s in range(T)]
    return torch.stack([torch.stack(row) for row in terms])


def left_out(weight: str, T: int) -> Bool[Tensor, "T T"]:
    """The pairs (s, t) whose delta_s a weight leaves out of token t's term: none, token_is, prefix_tis or seq_tis.

    Raises ValueError for another name.
    """
    s, t = torch.arange(T)[:, None], torch.arange(T)[None, :]
    pairs = {
        "none": torch.ones(T, T, dtype=torch.bool),
        "token_is": s != t,
        "prefix_tis": s > t,
        "seq_tis": torch.zeros(T, T, dtype=torch.bool),
    }
    if weight not in pairs:
        raise ValueError(f"expected one of {', '.join(pairs)}, got {weight!r}")
    return pairs[weight]


def first_order_bias(terms_TTQ: Float[Tensor, "T T Q"], weight: str) -> Float[Tensor, " Q"]:
    """The leading term of E_mu[estimator] - grad J_seq: minus the sum of the pairs that the weight leaves out."""
    return -(terms_TTQ * left_out(weight, len(terms_TTQ))[:, :, None]).sum((0, 1))
