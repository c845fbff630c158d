"""The distance of pi from nu_t, which is mu with step t replaced by pi: the parts of the first-order gap.

The token-level weight w_t corrects step t alone, so weighted samples are distributed as nu_t. A response that ended
before t has no step t: there nu_t is mu, and the gap has no term, as there is no gradient at t.

Letters: theory/exact/tree.py. Papers: MiniRL (arXiv 2512.01374) Eq. 1 to 5; Bretagnolle and Huber (1979).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from theory.bounds.bound import Bound
from theory.divergences import kl_of_terms
from theory.exact.levels import Edges
from theory.exact.policies import TreePolicy
from theory.exact.problem import Problem
from theory.exact.tree import Paths, PrefixTree

# ---- quantities ------------------------------------------------------------------------------------------------------


def step_tv(tree: PrefixTree, logp_step: Edges, logp_p: Edges, logp_q: Edges) -> Float[Tensor, " T"]:
    """(1/2) sum over responses that reach t of |p - q|, both with step t replaced by `logp_step`; in [0, 1].

    With (pi, pi, mu) it is the part of TV(pi, nu_t) on responses that have a step t, and all of it where none ends
    before t.
    """
    total_T = torch.zeros(tree.max_length, dtype=torch.float64)
    for paths, step_BT, p_BT, q_BT in conditionals(tree, logp_step, logp_p, logp_q):
        gap_BT = step_BT * (others(p_BT) - others(q_BT)).abs()
        total_T += torch.where(paths.is_response_BT, gap_BT, 0.0).sum(0)
    return total_T / 2


def whole_tv(tree: PrefixTree, logp_step: Edges, logp_p: Edges, logp_q: Edges) -> Float[Tensor, " T"]:
    """TV(p, q) of whole responses, both with step t replaced where there is one; in [0, 1], at least `step_tv`."""
    total_T = torch.zeros(tree.max_length, dtype=torch.float64)
    for _, step_BT, p_BT, q_BT in conditionals(tree, logp_step, logp_p, logp_q):
        # Not masked: after the end a step is 1, and the product of the others is the whole response's probability.
        total_T += (step_BT * (others(p_BT) - others(q_BT)).abs()).sum(0)
    return total_T / 2


def depth_kl(tree: PrefixTree, logp_p: Edges, logp_q: Edges) -> Float[Tensor, " T"]:
    """E_p[KL_s(p || q)] of each step s, nats, in [0, inf]; ended responses add 0. The sum is KL(p || q)."""
    terms = [(r * kl_of_terms(p, q)).sum() for r, p, q in zip(tree.reach(logp_p), logp_p, logp_q, strict=True)]
    return torch.stack(terms)


def step_kl(tree: PrefixTree, logp_pi: Edges, logp_mu: Edges) -> Float[Tensor, " T"]:
    """KL(pi || nu_t) = sum_(s != t) E_pi[KL_s(pi || mu)], nats: the chain rule, in which step t adds 0."""
    kl_T = depth_kl(tree, logp_pi, logp_mu)
    # Not the total less step t: with an infinite KL that would be inf - inf.
    before_T, after_T = around(kl_T)
    return before_T + after_T


def step_chi2(tree: PrefixTree, logp_pi: Edges, logp_mu: Edges) -> Float[Tensor, " T"]:
    """sum over responses that reach t of (pi - nu_t)^2 / nu_t, in [0, inf]: at most chi2(pi || nu_t)."""
    total_T = torch.zeros(tree.max_length, dtype=torch.float64)
    for paths, pi_BT, _, mu_BT in conditionals(tree, logp_pi, logp_pi, logp_mu):
        # pi and nu_t share the factor pi_t: (pi - nu_t)^2 has it twice, nu_t once.
        total_T += torch.where(paths.is_response_BT, pi_BT * relative_square(others(pi_BT), others(mu_BT)), 0.0).sum(0)
    return total_T


def reached(tree: PrefixTree, logp: Edges) -> Float[Tensor, " T"]:
    """The probability that a response has a step t, in [0, 1]."""
    return torch.stack([r_n.sum() for r_n in tree.reach(logp)])


def edge_norms(policy: TreePolicy) -> list[Float[Tensor, "n V"]]:
    """||grad log pi|| of every edge; 0 on tokens that pi never takes, which enter no expectation."""
    tree, norms = policy.tree, []
    for t, logp_nV in enumerate(policy.logp()):
        n, V = logp_nV.shape
        # One path per edge, with step t alone, so that `squared_norms` gives the norm of each edge.
        nodes_BT = torch.zeros(n * V, tree.max_length, dtype=torch.int64)
        tokens_BT, here_BT = torch.zeros_like(nodes_BT), torch.zeros_like(nodes_BT, dtype=torch.bool)
        nodes_BT[:, t], tokens_BT[:, t] = torch.arange(n).repeat_interleave(V), torch.arange(V).repeat(n)
        here_BT[:, t] = True
        squares_B = policy.squared_norms(here_BT.double(), Paths(nodes_BT, tokens_BT, here_BT))
        norms.append(torch.where(logp_nV > -math.inf, squares_B.view(n, V).sqrt(), 0.0))
    return norms


def longest_score(policy: TreePolicy) -> Float[Tensor, ""]:
    """G, the largest of `edge_norms`."""
    return torch.stack([x_nV.max() for x_nV in edge_norms(policy)]).max()


def conditionals(tree: PrefixTree, *policies: Edges) -> Iterator[tuple[Paths, *tuple[Float[Tensor, "B T"], ...]]]:
    """Each chunk of responses with every policy's probabilities of its tokens; 1 after the end."""
    for _, paths in tree.chunks():
        yield paths, *(tree.gather(logp, paths).exp() for logp in policies)


def others(p_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The product over all steps but t."""
    # By prefix and suffix products: a quotient would fail where p_t is 0.
    one_B1 = torch.ones_like(p_BT[:, :1])
    return torch.cat([one_B1, p_BT[:, :-1]], dim=1).cumprod(1) * after(p_BT)


def after(p_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The product over the steps after t."""
    one_B1 = torch.ones_like(p_BT[:, :1])
    return torch.cat([p_BT[:, 1:], one_B1], dim=1).flip(1).cumprod(1).flip(1)


def around(x_T: Float[Tensor, " T"]) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Sums over the steps before t and over those after t, without taking a difference."""
    zero = torch.zeros_like(x_T[:1])
    before_T = torch.cat([zero, x_T[:-1]]).cumsum(0)
    after_T = torch.cat([x_T[1:], zero]).flip(0).cumsum(0).flip(0)
    return before_T, after_T


def relative_square(p: Float[Tensor, "*batch"], q: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """(p - q)^2 / q, 0 where both are 0."""
    # 0 / 0 alone is replaced: with q = 0 and p > 0 a chi-square is infinite.
    return torch.where(p == q, 0.0, (p - q).square() / q)


def require_cover(logp_pi: Edges, logp_mu: Edges) -> None:
    """Raises ValueError where mu never samples a token that pi takes: no weight on mu's samples makes up for it."""
    for t, (pi_nV, mu_nV) in enumerate(zip(logp_pi, logp_mu, strict=True)):
        bare = (pi_nV > -math.inf) & (mu_nV == -math.inf)
        if bare.any():
            n, v = bare.nonzero()[0].tolist()
            raise ValueError(f"expected mu > 0 wherever pi > 0, got mu = 0 at depth {t}, node {n}, token {v}")


# ---- bounds per step -------------------------------------------------------------------------------------------------


def step_weights(problem: Problem) -> Bound:
    """E_mu[|W - w_t| on responses that reach t] <= 2 TV(pi, nu_t), for each t; W = prod_s w_s, w = pi/mu.

    Proof: mu w_t is nu_t on these responses and mu W is pi, so the left side is their part of sum_y |pi - nu_t|.
    Tight: equal for every t that no response ends before, so always without an end token. With one, the left side lacks
    |pi - mu| on the responses that ended before t. Source: MiniRL Eq. 2 and 4.
    Raises ValueError where mu never samples what pi takes.
    """
    tree, pi, mu = _policies(problem)
    lhs_T = torch.zeros(tree.max_length, dtype=torch.float64)
    for _, paths in tree.chunks():
        log_mu_BT, log_pi_BT = tree.gather(mu, paths), tree.gather(pi, paths)
        # Tokens that both forbid have no weight, and their responses no probability.
        w_BT = torch.where(log_mu_BT > -math.inf, log_pi_BT - log_mu_BT, 0.0).exp()
        each_BT = log_mu_BT.sum(1, keepdim=True).exp() * (w_BT.prod(1, keepdim=True) - w_BT).abs()
        lhs_T += torch.where(paths.is_response_BT, each_BT, 0.0).sum(0)
    return Bound("step_weights", lhs_T, 2 * whole_tv(tree, pi, pi, mu))


def step_pinsker(problem: Problem) -> Bound:
    """TV(pi, nu_t) <= sqrt(KL(pi || nu_t) / 2) for each t, with KL(pi || nu_t) = sum_(s != t) E_pi[KL_s(pi || mu)].

    Proof: Pinsker (theory/bounds/routing.py) and the chain rule, in which step t, where both are pi, adds 0.
    Tight for two steps, the other one a small move from two equally likely tokens; loose as steps add up, since the
    signs of independent steps cancel in TV: sqrt(2 / pi) = 0.80 for many small balanced ones; vacuous past KL = 2.
    """
    tree, pi, mu = _policies(problem)
    return Bound("step_pinsker", whole_tv(tree, pi, pi, mu), (step_kl(tree, pi, mu) / 2).sqrt())


def step_bretagnolle_huber(problem: Problem) -> Bound:
    """TV(pi, nu_t) <= min(sqrt(KL / 2), sqrt(1 - exp(-KL))), KL = KL(pi || nu_t), for each t; never above 1.

    Proof of the second: (1 - TV)(1 + TV) = sum min(p, q) sum max(p, q) >= (sum sqrt(p q))^2 by Cauchy-Schwarz, which
    is exp(2 log E_p sqrt(q / p)) >= exp(-KL) by Jensen.
    Tight as `step_pinsker` for small KL, where the second is sqrt(2) above the first; it is the smaller one past
    KL = 1.59, and below 1 for any finite KL. Source: Bretagnolle and Huber (1979).
    """
    tree, pi, mu = _policies(problem)
    return Bound("step_bretagnolle_huber", whole_tv(tree, pi, pi, mu), tv_from_kl(step_kl(tree, pi, mu)))


def step_cauchy_schwarz(problem: Problem) -> Bound:
    """(1/2) sum |pi - nu_t| <= (1/2) sqrt(P sum (pi - nu_t)^2 / nu_t), sums over responses that reach t, P = nu_t's.

    Proof: the left side is (1/2) E_nu_t |pi / nu_t - 1| there; Cauchy-Schwarz with the indicator of reaching t.
    Tight where |pi / nu_t - 1| is one number, as for two tokens that mu has equally likely. Where no response ends
    before t, chi2 is at least exp(KL) - 1 (as in `weight_variance_kl`), so Pinsker is better where KL is large, and
    equal to first order where it is small.
    """
    tree, pi, mu = _policies(problem)
    # nu_t reaches step t as mu does: before t the two are the same.
    rhs_T = (reached(tree, mu) * step_chi2(tree, pi, mu)).sqrt() / 2
    return Bound("step_cauchy_schwarz", step_tv(tree, pi, pi, mu), rhs_T)


def step_split(problem: Problem) -> Bound:
    """(1/2) sum |pi - nu_t| <= staleness_t + discrepancy_t over responses that reach t: MiniRL Eq. 5, for distances.

    With o_t = old with step t replaced by pi: staleness_t is (1/2) sum |pi - o_t|, 0 where pi is old, and
    discrepancy_t is (1/2) sum |o_t - nu_t|, 0 where old is mu. Proof: the triangle inequality.
    Tight where either part is 0, and where no response is moved up by one and down by the other. Loose where the
    update undoes the engine's error: pi = mu has the left side 0. (KL has no such split.)
    Source: MiniRL Eq. 5.
    """
    tree, pi, mu = _policies(problem)
    staleness_T, discrepancy_T = step_parts(problem)
    return Bound("step_split", step_tv(tree, pi, pi, mu), staleness_T + discrepancy_T)


def step_parts(problem: Problem) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(staleness_t, discrepancy_t) of `step_split`, each in [0, 1]."""
    tree, pi, mu = _policies(problem)
    old = problem.logp_old
    return step_tv(tree, pi, pi, old), step_tv(tree, pi, old, mu)


def tv_from_kl(kl_T: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The largest TV that a KL allows by Pinsker and by Bretagnolle and Huber, in [0, 1]."""
    # 1 - exp(-KL) by expm1, which keeps the digits of a small KL.
    return torch.minimum((kl_T / 2).sqrt(), (-(-kl_T).expm1()).sqrt())


def _policies(problem: Problem) -> tuple[PrefixTree, Sequence[Tensor], Sequence[Tensor]]:
    pi = problem.target.logp()
    require_cover(pi, problem.logp_mu)
    return problem.target.tree, pi, problem.logp_mu
