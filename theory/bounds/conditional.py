"""The first-order gap, step by step: prefixes enter through mean rewards given y_<=t, suffixes through their range.

Given y_<=t, W = W_<t w_t W_>t, so that with Q(y_<=t) = E[R | y_<=t] under pi or mu, and d(s) the probability of the
prefix s = y_<t,
    gap = sum_t sum_s E_pi[g_t (d_pi(s) Q_pi - d_mu(s) Q_mu)]
        = sum_t sum_s (d_pi - d_mu)(s) E_pi[g_t Q_mu]  +  sum_t E_pi[g_t (Q_pi - Q_mu)]:
an error of the prefix and one of the suffix. The per-decision weight W_<=t leaves only the second.

Letters: theory/exact/tree.py, and as in theory/bounds/gradient.py. Papers: MiniRL (arXiv 2512.01374) Eq. 2 and 4,
MinPRO (2601.22718) for the prefix weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from theory.bounds.bound import Bound
from theory.bounds.gradient import centred, fisher_eigenvalue, gap, target
from theory.bounds.steps import after, around, conditionals, depth_kl, edge_norms
from theory.exact.problem import Problem


def prefix_gap(problem: Problem) -> Float[Tensor, " Q"]:
    """grad J_seq - E_mu[R sum_t W_<=t g_t] = sum_t E_pi[g_t (Q_pi - Q_mu)], exactly."""
    edges = problem.target.tree.zero_edges()
    for depth in _depths(problem):
        edges[depth.t] = depth.reach_pi_n[:, None] * depth.pi_nV * (depth.q_pi_nV - depth.q_mu_nV)
    return problem.target.pullback(edges)


def gap_conditional(problem: Problem) -> Bound:
    """||gap|| <= sum_t sum_s |d_pi - d_mu|(s) E_pi[||g|| |Q_mu - b(s)|] + sum_t E_pi[||g_t|| TV_>t span(R | y_<=t)].

    b(s) is the middle of Q_mu's range over the next token, TV_>t = TV(pi, mu) of the continuation of y_<=t, and span
    the range of R over all of them. Proof: the two sums of the module docstring; b(s) changes nothing, as E_pi[g_t] is
    0 given s; |Q_pi - Q_mu| is at most TV_>t times the span.
    Tight where only one step differs, as `gap_centred`; where prefix and suffix both differ it may exceed it.
    """
    total = torch.zeros((), dtype=torch.float64)
    for depth in _depths(problem):
        total = total + (depth.prefix_term() + depth.suffix_term())
    return Bound("gap_conditional", gap(problem).norm(), total)


def gap_conditional_kl(problem: Problem) -> Bound:
    """||gap|| <= sum_t G_t (D_t sqrt(KL_<t / 2) + S_t sqrt(KL_>t / 2)), KLs E_pi[KL_s(pi || mu)] summed around t.

    G_t is the longest gradient at depth t, D_t the widest range of Q_mu over the next token, S_t that of R over the
    continuations of any y_<=t. Proof: `gap_conditional`, sum_s |d_pi - d_mu| = 2 TV of prefixes, |Q_mu - b| <= D_t / 2,
    Pinsker for prefixes and, given y_<=t, for continuations, with Jensen over y_<=t.
    Tight as `gap_pinsker` where all the KL is on one side of t. If D_t = S_t = 2 H and both sides have KL, the bound is
    up to sqrt(2) above 2 H sqrt(KL_t / 2); it is below where the continuation averages the reward or adds little to it.
    """
    pi, tree = target(problem), problem.target.tree
    before_T, after_T = around(depth_kl(tree, pi, problem.logp_mu))
    total = torch.zeros((), dtype=torch.float64)
    for depth in _depths(problem):
        sides = depth.width * (before_T[depth.t] / 2).sqrt() + depth.span_nV.max() * (after_T[depth.t] / 2).sqrt()
        total = total + depth.norms_nV.max() * sides
    return Bound("gap_conditional_kl", gap(problem).norm(), total)


def gap_conditional_fisher(problem: Problem) -> Bound:
    """||gap|| <= sqrt(lambda sum_t E_mu[Var_pi(W_<t Q_pi - Q_mu | y_<t)]), lambda that of `gap_fisher`.

    Proof: as there, after averaging over the continuations of y_<=t, which turns (pi / nu_t - 1) R into W_<t Q_pi -
    Q_mu; given y_<t its mean under pi's step is a baseline. So it is never above `gap_fisher`.
    In the norm of F^-1, without lambda, it is an equality for free logits at every prefix, whose scores span everything
    with mean 0 there. Tight in the plain norm where F is lambda times a projection on the gap.
    """
    total = torch.zeros((), dtype=torch.float64)
    for depth in _depths(problem):
        # reach_mu (W_<t Q_pi - Q_mu), as W_<t = reach_pi / reach_mu: its square over reach_mu is the term under E_mu.
        mixed_nV = depth.reach_pi_n[:, None] * depth.q_pi_nV - depth.reach_mu_n[:, None] * depth.q_mu_nV
        mean_n1 = (depth.pi_nV * mixed_nV).sum(1, keepdim=True)
        variance_n = (depth.pi_nV * (mixed_nV - mean_n1).square()).sum(1)
        # Where mu has no mass, pi has none either (`target` requires it): 0 / 0 adds nothing.
        total = total + torch.where(depth.reach_mu_n > 0, variance_n / depth.reach_mu_n, 0.0).sum()
    return Bound("gap_conditional_fisher", gap(problem).norm(), (fisher_eigenvalue(problem) * total).sqrt())


def gap_prefix(problem: Problem) -> Bound:
    """||grad J_seq - E_mu[R sum_t W_<=t g_t]|| <= sum_t E_pi[||g_t|| TV_>t span(R | y_<=t)].

    Proof: E_mu[R W_<=t g_t] = E_pi[g_t Q_mu], as W_<=t turns mu into pi up to t; then as `gap_conditional`.
    Tight as there; it has no prefix term, and no term at the last step.
    """
    total = torch.stack([depth.suffix_term() for depth in _depths(problem)]).sum()
    return Bound("gap_prefix", prefix_gap(problem).norm(), total)


@dataclass(frozen=True)
class _Depth:
    """The nodes of one depth: probabilities, gradients, and the reward's means and range given the token."""

    t: int
    reach_pi_n: Tensor
    reach_mu_n: Tensor
    pi_nV: Tensor
    norms_nV: Tensor
    q_pi_nV: Tensor
    q_mu_nV: Tensor
    span_nV: Tensor
    tv_after_nV: Tensor

    @property
    def middle_n1(self) -> Tensor:
        return (self.q_mu_nV.amax(1, keepdim=True) + self.q_mu_nV.amin(1, keepdim=True)) / 2

    @property
    def width(self) -> Tensor:
        return (self.q_mu_nV.amax(1) - self.q_mu_nV.amin(1)).max()

    def prefix_term(self) -> Tensor:
        each_n = (self.pi_nV * self.norms_nV * (self.q_mu_nV - self.middle_n1).abs()).sum(1)
        return ((self.reach_pi_n - self.reach_mu_n).abs() * each_n).sum()

    def suffix_term(self) -> Tensor:
        each_n = (self.pi_nV * self.norms_nV * self.tv_after_nV * self.span_nV).sum(1)
        return (self.reach_pi_n * each_n).sum()


def _depths(problem: Problem) -> Iterator[_Depth]:
    """The depths from last to first: each one's mean rewards come from the depth below."""
    pi, mu, tree = target(problem), problem.logp_mu, problem.target.tree
    T, W = tree.max_length, tree.num_continuing
    norms, final, tails = edge_norms(problem.target), tree.zero_edges(), tree.zero_edges()
    reward_Y = centred(problem)
    # `conditionals` walks the same chunks, so that `rows` numbers the responses of `paths`.
    for (rows, _), (paths, pi_BT, mu_BT) in zip(tree.chunks(), conditionals(tree, pi, mu), strict=True):
        is_last_BT = torch.arange(T) == paths.length_B[:, None] - 1
        # `final`: rewards of the edges that end a response. `tails`: TV_>t, summed over the responses through an edge.
        tree.scatter(final, torch.where(is_last_BT, reward_Y[rows][:, None], 0.0), paths)
        tree.scatter(tails, (after(pi_BT) - after(mu_BT)).abs() / 2, paths)
    reach_pi, reach_mu = tree.reach(pi), tree.reach(mu)
    below: list[Tensor] = []
    for t in range(T - 1, -1, -1):
        # The reward given y_<=t: mean under pi, mean under mu, largest, smallest. `below` is empty at the last depth.
        q_pi_nV, q_mu_nV, high_nV, low_nV = each = [final[t].clone() for _ in range(4)]
        # Node n's children are nodes n W to n W + W - 1 of the next depth.
        for q_nV, value_n in zip(each, below, strict=False):
            # Only the continuing tokens: an end token, the last column, keeps its own reward.
            q_nV[:, :W] = value_n.view(-1, W)
        pi_nV, mu_nV = pi[t].exp(), mu[t].exp()
        below = [(pi_nV * q_pi_nV).sum(1), (mu_nV * q_mu_nV).sum(1), high_nV.amax(1), low_nV.amin(1)]
        span_nV = high_nV - low_nV
        yield _Depth(t, reach_pi[t], reach_mu[t], pi_nV, norms[t], q_pi_nV, q_mu_nV, span_nV, tails[t])
