"""The tails of importance weights: the mass beyond a cap, chi-square, variance, effective sample size.

The mass that a cap C cuts off a weight p/q is E_q[(p/q - C)^+] = sum (p - C q)^+, the hockey-stick divergence: at most
TV(p, q) for C >= 1, and bounded by the weight's variance, a chi-square.

Letters: theory/exact/tree.py. Papers: Scarf (1958) and Lo (1987) for the largest excess at a given mean and variance;
the names of the cuts as in theory/objectives/corrections.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from theory.bounds.bound import Bound
from theory.bounds.steps import depth_kl, relative_square
from theory.exact.levels import Edges
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree

# ---- tails, exactly --------------------------------------------------------------------------------------------------


def token_excess(problem: Problem, cap: float) -> Float[Tensor, " T"]:
    """E_mu[(w_t - C)^+] on responses that reach t, w_t = pi_t/mu_t; 0 where no weight exceeds the cap."""
    tree, pi, mu = policies(problem)
    reach = tree.reach(mu)
    terms = [(r[:, None] * (p.exp() - cap * q.exp()).clamp(min=0)).sum() for r, p, q in zip(reach, pi, mu, strict=True)]
    return torch.stack(terms)


def prefix_excess(problem: Problem, cap: float) -> Float[Tensor, " T"]:
    """E_mu[(W_<=t - C)^+] on responses that reach t, W_<=t = prod_(s <= t) w_s."""
    tree, pi, mu = policies(problem)
    terms = []
    for a_n, b_n, p_nV, q_nV in zip(tree.reach(pi), tree.reach(mu), pi, mu, strict=True):
        terms.append((a_n[:, None] * p_nV.exp() - cap * b_n[:, None] * q_nV.exp()).clamp(min=0).sum())
    return torch.stack(terms)


def sequence_excess(problem: Problem, cap: float) -> Float[Tensor, " T"]:
    """E_mu[(W - C)^+] on responses that reach t, W = prod_s w_s."""
    tree, pi, mu = policies(problem)
    excess_Y = (tree.log_probabilities(pi).exp() - cap * tree.log_probabilities(mu).exp()).clamp(min=0)
    # The whole excess at each step of a response: the sum over t is E_mu[|y| (W - C)^+], the mass in `seq_tis_bias`.
    return torch.stack([excess_Y[tree.lengths > t].sum() for t in range(tree.max_length)])


def outside(problem: Problem, lo: float, hi: float) -> Float[Tensor, " T"]:
    """E_mu[w_t 1(w_t outside [lo, hi])] = P(w_t outside) with step t drawn from pi, on responses that reach t."""
    tree, pi, mu = policies(problem)
    terms = []
    for r_n, p_nV, q_nV in zip(tree.reach(mu), pi, mu, strict=True):
        w_nV = (p_nV - q_nV).exp()
        # The band is closed, as IcePop's.
        cut_nV = (w_nV < lo) | (w_nV > hi)
        terms.append((r_n[:, None] * torch.where(cut_nV, p_nV.exp(), 0.0)).sum())
    return torch.stack(terms)


def stopped(problem: Problem, eps_low: float, eps_high: float, cap: float | None) -> Float[Tensor, " T"]:
    """E_mu[v_t |R| 1(R > 0 and r_t > 1 + eps_high, or R < 0 and r_t < 1 - eps_low)], r_t = pi_t/old_t.

    v_t is the ratio r_t itself, or with a cap min(w_t, C). It is the weight, times |R|, of the gradients that stop.
    """
    tree, pi, mu = policies(problem)
    log_mu_Y, total_T = tree.log_probabilities(mu), torch.zeros(tree.max_length, dtype=torch.float64)
    for rows, paths in tree.chunks():
        pi_BT, mu_BT, old_BT = (tree.gather(x, paths) for x in (pi, mu, problem.logp_old))
        R_B1, ratio_BT = problem.reward_Y[rows][:, None], (pi_BT - old_BT).exp()
        weight_BT = ratio_BT if cap is None else (pi_BT - mu_BT).exp().clamp(max=cap)
        # R stands for the advantage: these estimators have no baseline (theory/bounds/corrections.py).
        far_BT = ((R_B1 > 0) & (ratio_BT > 1 + eps_high)) | ((R_B1 < 0) & (ratio_BT < 1 - eps_low))
        each_BT = log_mu_Y[rows].exp()[:, None] * weight_BT * R_B1.abs()
        total_T += torch.where(far_BT & paths.is_response_BT, each_BT, 0.0).sum(0)
    return total_T


# ---- chi-square ------------------------------------------------------------------------------------------------------


def token_chi2(problem: Problem) -> Float[Tensor, " T"]:
    """E_mu[(w_t - 1)^2] given that a response reaches t: the mean of chi2(pi || mu) over mu's prefixes."""
    tree, pi, mu = policies(problem)
    terms = [(r_n * _node_chi2(p, q)).sum() / r_n.sum() for r_n, p, q in zip(tree.reach(mu), pi, mu, strict=True)]
    return torch.stack(terms)


def prefix_chi2(problem: Problem) -> Float[Tensor, " T"]:
    """chi2(pi || mu) of the first t tokens (fewer where the response ends), t = 1 .. T, so the last is the response's.

    W_<=t is a martingale under mu, so its variance is sum_(s <= t) E_mu[W_<s^2 chi2(pi_s || mu_s)], without a
    difference. Where every prefix of s has the same chi2_s it is prod_(s <= t) (1 + chi2_s) - 1.
    """
    tree, pi, mu = policies(problem)
    square_n, steps = torch.ones(1, dtype=torch.float64), []
    for p_nV, q_nV in zip(pi, mu, strict=True):
        steps.append((square_n * _node_chi2(p_nV, q_nV)).sum())
        # Each step multiplies mu(prefix) W^2 by mu w^2 = pi^2 / mu.
        onward_nV = square_n[:, None] * (2 * p_nV - q_nV).exp()
        square_n = onward_nV[:, : tree.num_continuing].reshape(-1)
    return torch.stack(steps).cumsum(0)


def largest_excess(chi2: Float[Tensor, "*batch"], cap: float) -> Float[Tensor, "*batch"]:
    """The largest E[(X - C)^+] of any X >= 0 with mean 1 and variance chi2; in [0, 1]. Concave and increasing in chi2.

    (sqrt(chi2 + (C - 1)^2) - (C - 1)) / 2 where 2 C >= 1 + chi2 (Scarf: two values, C - and + the root), otherwise
    1 - C / (1 + chi2) (Lo: 0 and 1 + chi2). For C > 1 it is at most chi2 / (4 (C - 1)).
    """
    a = cap - 1
    root = (chi2 + a * a).sqrt()
    # The same number as (root - a) / 2, without the cancellation of two large numbers.
    scarf = chi2 / (2 * (root + a)) if a > 0 else (root - a) / 2
    return torch.where(2 * cap >= 1 + chi2, scarf, 1 - cap / (1 + chi2))


# ---- bounds ----------------------------------------------------------------------------------------------------------


def weight_variance(problem: Problem) -> Bound:
    """Var_mu(W) = chi2(pi || mu) <= prod_t (1 + max over prefixes of chi2(pi_t || mu_t)) - 1.

    Proof: E_mu[W_<=t^2 | y_<t] = W_<t^2 (1 + chi2 of the node), and 1 for a response that has ended.
    Tight where the chi2 of a step is the same at every prefix: then Var = prod_t (1 + chi2_t) - 1, exponential in T.
    """
    tree, pi, mu = policies(problem)
    log_mu_Y = tree.log_probabilities(mu)
    # (W - 1)^2 by expm1, which keeps the digits of W near 1.
    variance = (log_mu_Y.exp() * (tree.log_probabilities(pi) - log_mu_Y).expm1().square()).sum()
    largest_T = torch.stack([_node_chi2(p, q).max() for p, q in zip(pi, mu, strict=True)])
    return Bound("weight_variance", variance, largest_T.log1p().sum().expm1())


def weight_variance_kl(problem: Problem) -> Bound:
    """exp(KL(pi || mu)) - 1 <= Var_mu(W): a variance that is at least exponential in the KL of a whole response.

    Proof: 1 + chi2 = E_pi[W] = E_pi[exp(log W)] >= exp(E_pi[log W]) by Jensen.
    Tight where W is constant on pi's support, as for pi = mu conditioned on an event. For pi near mu the left side is
    half of the right.
    """
    tree, pi, mu = policies(problem)
    return Bound("weight_variance_kl", depth_kl(tree, pi, mu).sum().expm1(), prefix_chi2(problem)[-1])


def effective_sample_size(problem: Problem) -> Bound:
    """1 / (1 + chi2(pi || mu)) <= exp(-KL(pi || mu)): the share of n samples that count, as n grows.

    ESS / n = (sum W)^2 / (n sum W^2) tends to (E_mu W)^2 / E_mu W^2. Proof: `weight_variance_kl`. Tight as there.
    """
    tree, pi, mu = policies(problem)
    return Bound("effective_sample_size", 1 / (1 + prefix_chi2(problem)[-1]), (-depth_kl(tree, pi, mu).sum()).exp())


def _node_chi2(logp_nV: Tensor, logq_nV: Tensor) -> Tensor:
    return relative_square(logp_nV.exp(), logq_nV.exp()).sum(1)


def policies(problem: Problem) -> tuple[PrefixTree, Edges, Edges]:
    """The tree, log pi of the policy that is trained, and log mu.

    Raises ValueError where a log-probability is not finite, as its weights would not be either.
    """
    tree, pi = problem.target.tree, problem.policy.logp()
    for name, edges in (("pi", pi), ("mu", problem.logp_mu), ("old", problem.logp_old)):
        for t, x_nV in enumerate(edges):
            if not x_nV.isfinite().all():
                worst = float(x_nV[~x_nV.isfinite()][0])
                raise ValueError(f"log {name}: expected finite values, got {worst} at depth {t}")
    return tree, pi, problem.logp_mu
