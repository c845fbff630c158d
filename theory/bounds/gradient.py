"""The first-order gap, grad J_seq - grad J_token = E_mu[R sum_t (W - w_t) g_t], bounded with its constants.

W = pi(y) / mu(y), w_t = pi_t / mu_t, g_t = grad log pi_t (0 after the end), G = max over tokens of ||g||. Each bound
names what it gives up; theory/bounds/steps.py has the distances, docs/bounds.md how tight each is on random policies.

A baseline changes nothing here: given y_<t, w_t turns mu's step t into pi's, so E_mu[w_t g_t | y_<t] = E_pi[g_t] = 0,
as it is with W or W_<=t in its place. So any b(y_<t) may be subtracted from R, and H = (max R - min R) / 2 may replace
max |R|. Other weights v_t do not allow it: b adds b sum_t E_mu[v_t g_t], which is -b E_mu[sum_t (w_t - C)^+ g_t] for
min(w_t, C), and b E_mu[sum_t g_t] for no weight at all.

Letters: theory/exact/tree.py. Papers: MiniRL (arXiv 2512.01374) Eq. 1 to 5, MinPRO (2601.22718) for the prefix weight.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from theory.bounds.bound import Bound
from theory.bounds.steps import (
    conditionals,
    edge_norms,
    longest_score,
    others,
    relative_square,
    require_cover,
    step_kl,
    step_parts,
    step_tv,
    tv_from_kl,
    whole_tv,
)
from theory.exact.levels import Edges
from theory.exact.problem import Problem
from theory.streams import stream


def gap(problem: Problem) -> Float[Tensor, " Q"]:
    """grad J_seq - grad J_token = E_mu[R sum_t (W - w_t) g_t], exactly (MiniRL Eq. 2 less Eq. 4)."""
    pi = target(problem)
    return _difference(problem, pi, problem.logp_mu)


def gap_parts(problem: Problem) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """(staleness, discrepancy), whose sum is the gap: E[R sum_t (pi - o_t) g_t] and E[R sum_t (o_t - nu_t) g_t].

    Step t is pi's, the others pi's, old's, or mu's.
    """
    pi, old = target(problem), problem.logp_old
    return _difference(problem, pi, old), _difference(problem, old, problem.logp_mu)


# ---- the chain of the first-order gap --------------------------------------------------------------------------------


def gap_triangle(problem: Problem) -> Bound:
    """||gap|| <= E_mu[|R - c| sum_t |W - w_t| ||g_t||], c = (max R + min R) / 2.

    Proof: the triangle inequality, after a baseline that changes nothing (module docstring).
    Tight where (R - c) (W - w_t) g_t has one direction on all responses and steps. Loose otherwise: gradients of
    different prefixes are nearly orthogonal, which is the larger part of the slack in all the bounds below.
    """
    pi, mu, tree = target(problem), problem.logp_mu, problem.target.tree
    norms, total = edge_norms(problem.target), torch.zeros((), dtype=torch.float64)
    centred_Y = centred(problem)
    for (rows, _), (paths, pi_BT, mu_BT) in zip(tree.chunks(), conditionals(tree, pi, mu), strict=True):
        # mu |W - w_t| without a division: mu W is pi, and mu w_t is pi_t times the product of mu's other steps.
        each_BT = pi_BT * (others(pi_BT) - others(mu_BT)).abs() * tree.gather(norms, paths)
        total += (centred_Y[rows].abs()[:, None] * each_BT).sum()
    return Bound("gap_triangle", gap(problem).norm(), total)


def gap_tv(problem: Problem) -> Bound:
    """||gap|| <= 2 R_max G sum_t TV(pi, nu_t), R_max = max |R|, nu_t = mu with step t replaced by pi.

    Proof: the triangle inequality, |R| <= R_max, ||g_t|| <= G, and E_mu|W - w_t| <= 2 TV (`step_weights`).
    Tight for two steps of two equally likely tokens under pi where mu differs at the second step, and R = +-1 follows
    the sign of (W - w_1) g_1. Loose by R_max / H for a reward that is not centred (`gap_centred`): 2 for 0/1 rewards.
    """
    pi, tree = target(problem), problem.target.tree
    distances = whole_tv(tree, pi, pi, problem.logp_mu).sum()
    scale = 2 * problem.reward_Y.abs().max() * longest_score(problem.target)
    return Bound("gap_tv", gap(problem).norm(), scale * distances)


def gap_pinsker(problem: Problem) -> Bound:
    """||gap|| <= 2 R_max G sum_t sqrt(KL(pi || nu_t) / 2), KL(pi || nu_t) = sum_(s != t) E_pi[KL_s(pi || mu)].

    Proof: `gap_tv` and `step_pinsker`. With T steps of KL k each the right side is R_max G T sqrt(2 (T - 1) k): it
    grows as T^1.5 and with the square root of the KL, hence of first order in the step.
    Tight as `gap_tv` for a small move. Also loose as `step_pinsker`.
    """
    pi, tree = target(problem), problem.target.tree
    roots = (step_kl(tree, pi, problem.logp_mu) / 2).sqrt().sum()
    scale = 2 * problem.reward_Y.abs().max() * longest_score(problem.target)
    return Bound("gap_pinsker", gap(problem).norm(), scale * roots)


def gap_centred(problem: Problem) -> Bound:
    """||gap|| <= 2 H G sum_t (1/2) sum |pi - nu_t|, H = (max R - min R) / 2, over responses that reach t.

    Proof: `gap_tv` after subtracting (max R + min R) / 2, and without the responses that have no gradient at t.
    Tight as `gap_tv`; zero, as the gap is, for a constant reward. Never above `gap_tv`.
    """
    pi, tree = target(problem), problem.target.tree
    rhs = 2 * _half_range(problem) * longest_score(problem.target) * step_tv(tree, pi, pi, problem.logp_mu).sum()
    return Bound("gap_centred", gap(problem).norm(), rhs)


def gap_centred_kl(problem: Problem) -> Bound:
    """||gap|| <= 2 H G sum_t min(sqrt(KL_t / 2), sqrt(1 - exp(-KL_t))), KL_t = KL(pi || nu_t).

    Proof: `gap_centred` and `step_bretagnolle_huber`. Tight as `gap_pinsker`, whose right side is larger by R_max / H,
    and by more past KL_t = 1.59; at most 2 H G T, however far apart the policies are.
    """
    pi, tree = target(problem), problem.target.tree
    largest = tv_from_kl(step_kl(tree, pi, problem.logp_mu)).sum()
    scale = 2 * _half_range(problem) * longest_score(problem.target)
    return Bound("gap_centred_kl", gap(problem).norm(), scale * largest)


def gap_cauchy_schwarz(problem: Problem) -> Bound:
    """||gap|| <= sum_t sqrt(chi2_t E_nu_t[(R - b_t)^2 ||g_t||^2]), chi2_t = sum (pi - nu_t)^2 / nu_t, where t exists.

    b_t = E[R ||g_t||^2] / E[||g_t||^2] under nu_t, the best constant. Proof: the gap is sum_t E_nu_t[(pi / nu_t - 1)
    (R - b_t) g_t]; Cauchy-Schwarz. Reward and gradient enter by their mean squares, not by their maxima: a reward that
    is 1 with probability p counts sqrt(p (1 - p)) in place of 1/2.
    Tight where (R - b_t) g_t is a vector times pi / nu_t - 1. Loose, and finally vacuous, as pi leaves mu's support.
    """
    pi, mu, tree = target(problem), problem.logp_mu, problem.target.tree
    norms, T = edge_norms(problem.target), tree.max_length
    chi2_T = torch.zeros(T, dtype=torch.float64)
    moments_3T = torch.zeros(3, T, dtype=torch.float64)
    centred_Y = centred(problem)
    for (rows, _), (paths, pi_BT, mu_BT) in zip(tree.chunks(), conditionals(tree, pi, mu), strict=True):
        chi2_BT = pi_BT * relative_square(others(pi_BT), others(mu_BT))
        chi2_T += torch.where(paths.is_response_BT, chi2_BT, 0.0).sum(0)
        # 0 after the end, where `gather` gives norms of 0.
        squares_BT = pi_BT * others(mu_BT) * tree.gather(norms, paths).square()
        R_B1 = centred_Y[rows][:, None]
        moments_3T += torch.stack([(squares_BT * R_B1**k).sum(0) for k in range(3)])
    return Bound("gap_cauchy_schwarz", gap(problem).norm(), (chi2_T * spread(moments_3T)).sqrt().sum())


def gap_fisher(problem: Problem) -> Bound:
    """||gap|| <= sqrt(lambda sum_t E_nu_t[(pi / nu_t - 1)^2 (R - b_t)^2]) <= H sqrt(lambda sum_t chi2_t).

    lambda is the largest eigenvalue of F = sum_t E_nu_t[g_t g_t^T], pi's Fisher information over mu's prefixes; b_t is
    the best constant; chi2_t as in `gap_cauchy_schwarz`. Proof: for a unit vector u, <u, gap> is
    sum_t E_nu_t[(pi / nu_t - 1) (R - b_t) <u, g_t>]; Cauchy-Schwarz over responses and steps together; u F u <= lambda.
    The same with F^-1 in the norm has no lambda: the natural gradient's gap is at most H sqrt(sum_t chi2_t).
    With T steps of KL k each it grows as T where lambda does not grow, not as T^1.5: gradients at different prefixes do
    not add up. Tight as `gap_cauchy_schwarz` and where one direction u carries F. Shared parameters make lambda grow.
    """
    pi, mu, tree = target(problem), problem.logp_mu, problem.target.tree
    moments_3T = torch.zeros(3, tree.max_length, dtype=torch.float64)
    centred_Y = centred(problem)
    for (rows, _), (paths, pi_BT, mu_BT) in zip(tree.chunks(), conditionals(tree, pi, mu), strict=True):
        chi2_BT = pi_BT * relative_square(others(pi_BT), others(mu_BT))
        chi2_BT = torch.where(paths.is_response_BT, chi2_BT, 0.0)
        moments_3T += torch.stack([(chi2_BT * centred_Y[rows][:, None] ** k).sum(0) for k in range(3)])
    rhs = (fisher_eigenvalue(problem) * spread(moments_3T).sum()).sqrt()
    return Bound("gap_fisher", gap(problem).norm(), rhs)


def fisher_eigenvalue(problem: Problem) -> Float[Tensor, ""]:
    """The largest eigenvalue of F = sum_t E_nu_t[g_t g_t^T], nu_t's prefixes being mu's and its step t pi's; >= 0.

    Computed by Lanczos iteration. `pullback` is linear in its cotangents, so its derivative gives <u, g> on every edge.
    """
    policy, tree = problem.target, problem.target.tree
    reach = tree.reach(problem.logp_mu)
    weights = [r_n[:, None] * x_nV.exp() for r_n, x_nV in zip(reach, policy.logp(), strict=True)]
    # Zeros serve: only the derivative of the pullback is used, and it is the same everywhere.
    cotangents = [torch.zeros_like(w_nV, requires_grad=True) for w_nV in weights]
    # It must keep its graph to the cotangents, as in theory/exact/policies.py; `NetworkPolicy`'s pullback does not.
    pulled_Q = policy.pullback(cotangents)
    Q = len(pulled_Q)

    def apply(u: NDArray[np.float64]) -> NDArray[np.float64]:
        # F u without F: <u, g> on every edge, weighed, and pulled back.
        # The graph is kept, as Lanczos iteration calls this once per step.
        along = torch.autograd.grad(pulled_Q, cotangents, torch.from_numpy(u).reshape(Q), retain_graph=True)
        return policy.pullback([w_nV * x_nV for w_nV, x_nV in zip(weights, along, strict=True)]).numpy()

    if Q < 8:
        # `eigsh` needs more rows than eigenvalues, and so few are as cheap dense.
        dense = np.stack([apply(row) for row in np.eye(Q)])
        return torch.linalg.eigvalsh(torch.from_numpy(dense)).max()
    # A fixed, generic start: a vector of ones is orthogonal to every score, whose logit gradients sum to 0.
    start = torch.rand(Q, generator=stream(0, "fisher_eigenvalue"), dtype=torch.float64).numpy()
    # ARPACK fails on F = 0; F is 0 where it takes a generic vector to 0.
    if not apply(start).any():
        return torch.zeros((), dtype=torch.float64)
    # scipy's stubs confuse this constructor with a subclass's.
    operator = LinearOperator((Q, Q), matvec=apply, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    # eigsh returns the largest in magnitude, here the largest, as none is negative.
    return torch.tensor(eigsh(operator, k=1, v0=start, return_eigenvectors=False)[0], dtype=torch.float64)


def spread(moments_3T: Float[Tensor, "3 T"]) -> Float[Tensor, " T"]:
    """min over b of E[m (R - b)^2], from E[m], E[m R] and E[m R^2] of a weight m >= 0."""
    mean_T = torch.where(moments_3T[0] > 0, moments_3T[1] / moments_3T[0], 0.0)
    # Rounding may put this sum of squares below 0 where R is constant.
    return (moments_3T[2] - mean_T * moments_3T[1]).clamp(min=0)


def gap_split(problem: Problem) -> Bound:
    """||gap part|| <= 2 H G sum_t of its distance, for the parts (staleness, discrepancy) of MiniRL Eq. 5.

    The parts (`gap_parts`) add up to the gap, and their distances (`step_split`) bound the gap's. Proof: `gap_centred`
    with (pi, o_t) and with (o_t, nu_t) for (pi, nu_t); the baseline changes neither, as all have pi at step t.
    Tight as `gap_centred`, part by part; a part is 0 where old is pi, or mu.
    """
    lhs_2 = torch.stack([part_Q.norm() for part_Q in gap_parts(problem)])
    distance_2 = torch.stack([x_T.sum() for x_T in step_parts(problem)])
    return Bound("gap_split", lhs_2, 2 * _half_range(problem) * longest_score(problem.target) * distance_2)


def _difference(problem: Problem, logp_p: Edges, logp_q: Edges) -> Float[Tensor, " Q"]:
    """E[R sum_t (p - q) g_t], both with pi at step t; centring R does not change the sum and saves digits."""
    tree, pi, edges = problem.target.tree, problem.target.logp(), problem.target.tree.zero_edges()
    centred_Y, chunks = centred(problem), conditionals(tree, pi, logp_p, logp_q)
    for (rows, _), (paths, pi_BT, p_BT, q_BT) in zip(tree.chunks(), chunks, strict=True):
        tree.scatter(edges, centred_Y[rows][:, None] * pi_BT * (others(p_BT) - others(q_BT)), paths)
    return problem.target.pullback(edges)


def target(problem: Problem) -> Edges:
    """log pi of every edge.

    Raises ValueError for a policy trained beside the target, and where mu never samples what pi takes.
    """
    if problem.trained is not None:
        raise ValueError("expected a problem without a `trained` policy: the gap is about the target's own gradients")
    pi = problem.target.logp()
    require_cover(pi, problem.logp_mu)
    return pi


def centred(problem: Problem) -> Float[Tensor, " Y"]:
    """R - (max R + min R) / 2, in [-H, H]."""
    # The middle of the range, not the mean: it is the constant with the least max |R - c|.
    return problem.reward_Y - (problem.reward_Y.max() + problem.reward_Y.min()) / 2


def _half_range(problem: Problem) -> Tensor:
    return (problem.reward_Y.max() - problem.reward_Y.min()) / 2
