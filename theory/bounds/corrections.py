"""Cost and benefit of truncating weights: bias bounded by the mass that is cut off, variance by the cap.

Each left side is the production objective's own expectation, with and without the cut (theory/exact/estimator.py, for
single responses whose advantage is their reward). R is the factor that the estimator uses, less its baseline: under a
cut a baseline is no longer free (theory/bounds/gradient.py). R_max = max |R|, G = max over tokens of
||grad log pi||; tails are in theory/bounds/weights.py.

Letters: theory/exact/tree.py. Papers: TIS (F. Yao et al., 2025), IcePop (X. Zhao et al., 2025), MiniRL (arXiv
2512.01374) Eq. 7 and sec. 4.2, PPO (1707.06347) for min-clip.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from theory.bounds.bound import Bound
from theory.bounds.steps import longest_score, reached
from theory.bounds.weights import (
    largest_excess,
    outside,
    policies,
    prefix_chi2,
    prefix_excess,
    sequence_excess,
    stopped,
    token_chi2,
    token_excess,
)
from theory.exact.estimator import Estimate, estimate
from theory.exact.groups import Group
from theory.exact.problem import Problem
from theory.objectives import Objective, ratios
from theory.objectives.aggregations import token_sum
from theory.objectives.corrections import Correction, IcePop, NoCorrection, PrefixTIS, SeqTIS, TokenIS, TokenTIS
from theory.objectives.trust_regions import MinClip, MiniRLMask, NoRegion, TrustRegion

# ---- bias ------------------------------------------------------------------------------------------------------------


def token_tis_bias(problem: Problem, cap: float) -> Bound:
    """||E[R sum_t min(w_t, C) g_t] - E[R sum_t w_t g_t]|| <= R_max G sum_t E_mu[(w_t - C)^+].

    Proof: the difference is E_mu[R sum_t (w_t - C)^+ g_t]; the triangle inequality. The first-order gap comes on top.
    Tight where one token is cut and |R| is the same wherever it occurs. Loose where many are cut: their gradients
    differ, and the mean reward cancels, as E_pi[g_t] = 0, where all tokens of a prefix are cut alike.
    """
    excess_T = token_excess(problem, cap)
    return _bias("token_tis_bias", problem, _score(TokenTIS("pi", cap)), _score(TokenIS("pi")), excess_T)


def token_tis_bias_chi2(problem: Problem, cap: float) -> Bound:
    """The same left side <= R_max G sum_t P_mu(reaches t) e(chi2_t, C), e the largest excess that chi2_t allows.

    chi2_t is E_mu[(w_t - 1)^2] given that t is reached, which a run can estimate without seeing any tail; e <=
    chi2_t / (4 (C - 1)) for C > 1 (`largest_excess`). Proof: w_t then has mean 1 and variance chi2_t.
    Tight as `token_tis_bias` where w_t takes two values, C - s and C + s. Very loose where no weight reaches the cap.
    """
    mass_T = reached(problem.target.tree, problem.logp_mu) * largest_excess(token_chi2(problem), cap)
    return _bias("token_tis_bias_chi2", problem, _score(TokenTIS("pi", cap)), _score(TokenIS("pi")), mass_T)


def prefix_tis_bias(problem: Problem, cap: float) -> Bound:
    """||E[R sum_t min(W_<=t, C) g_t] - E[R sum_t W_<=t g_t]|| <= R_max G sum_t E_mu[(W_<=t - C)^+].

    Proof, and where it is Tight, as `token_tis_bias`; it comes on top of the suffix's gap (`gap_prefix`).
    """
    whole = _score(PrefixTIS("pi", math.inf))
    return _bias("prefix_tis_bias", problem, _score(PrefixTIS("pi", cap)), whole, prefix_excess(problem, cap))


def prefix_tis_bias_chi2(problem: Problem, cap: float) -> Bound:
    """The same left side <= R_max G sum_t e(chi2_<=t, C), chi2_<=t = Var_mu(W_<=t) (`prefix_chi2`).

    Proof: W_<=t has mean 1 and this variance over all responses; the left side has only those that reach t.
    Tight as `token_tis_bias_chi2`; loose as chi2_<=t grows, until e is nearly 1 and the cap has no effect.
    """
    mass_T = largest_excess(prefix_chi2(problem), cap)
    whole = _score(PrefixTIS("pi", math.inf))
    return _bias("prefix_tis_bias_chi2", problem, _score(PrefixTIS("pi", cap)), whole, mass_T)


def seq_tis_bias(problem: Problem, cap: float) -> Bound:
    """||E[R sum_t min(W, C) g_t] - grad J_seq|| <= R_max G E_mu[|y| (W - C)^+]: the whole bias of Seq-TIS.

    Proof: as `token_tis_bias`, with one weight for all |y| tokens; without the cut it is MiniRL Eq. 2.
    Tight where one response is cut, whose gradients are parallel; loose by sqrt(|y|) where they are orthogonal.
    """
    whole = _score(SeqTIS("pi", math.inf))
    return _bias("seq_tis_bias", problem, _score(SeqTIS("pi", cap)), whole, sequence_excess(problem, cap))


def seq_tis_bias_chi2(problem: Problem, cap: float) -> Bound:
    """The same left side <= R_max G T e(chi2(pi || mu), C). Proof, and where it is Tight, as `prefix_tis_bias_chi2`."""
    T = problem.target.tree.max_length
    mass_T = largest_excess(prefix_chi2(problem)[-1], cap).expand(T)
    return _bias("seq_tis_bias_chi2", problem, _score(SeqTIS("pi", cap)), _score(SeqTIS("pi", math.inf)), mass_T)


def icepop_bias(problem: Problem, lo: float, hi: float) -> Bound:
    """||E[R sum_t w_t 1(lo <= w_t <= hi) g_t] - E[R sum_t w_t g_t]|| <= R_max G sum_t E_mu[w_t 1(w_t outside)].

    The mass is the probability under nu_t (mu with step t drawn from pi) that the weight is out of the band. The whole
    weight is dropped, not its excess, so a cap at hi alone never cuts more. Proof as `token_tis_bias`. Tight as there.
    """
    return _bias("icepop_bias", problem, _score(IcePop("pi", lo, hi)), _score(TokenIS("pi")), outside(problem, lo, hi))


def icepop_bias_chi2(problem: Problem, lo: float, hi: float) -> Bound:
    """The same left side <= R_max G max(hi / (hi - 1)^2, lo / (1 - lo)^2) sum_t E_mu[(w_t - 1)^2], for lo < 1 < hi.

    Proof: w <= (w - 1)^2 hi / (hi - 1)^2 for w >= hi, as w / (w - 1)^2 falls above 1; below 1 it rises, hence lo.
    Tight where every weight that is not 1 is just outside the band.
    Raises ValueError unless lo < 1 < hi.
    """
    constant = _chebyshev(lo, hi)
    mass_T = constant * reached(problem.target.tree, problem.logp_mu) * token_chi2(problem)
    return _bias("icepop_bias_chi2", problem, _score(IcePop("pi", lo, hi)), _score(TokenIS("pi")), mass_T)


def min_clip_bias(problem: Problem, eps_low: float, eps_high: float) -> Bound:
    """||E[sum_t grad min(r R, clip(r) R)] - E[R sum_t r_t g_t]|| <= G sum_t E_mu[|R| r_t 1(stopped)], r = pi/old.

    Stopped: R > 0 and r_t > 1 + eps_high, or R < 0 and r_t < 1 - eps_low. Proof: the clipped term is constant there,
    and elsewhere the clip is inactive; the triangle inequality. Tight as `token_tis_bias`, at any |R|.
    """
    # Bounds [0, inf) never bind; `scale` is 1, as |R| is already in the stopped mass.
    cut, whole = _clip(eps_low, eps_high), _clip(1.0, math.inf)
    return _bias("min_clip_bias", problem, cut, whole, stopped(problem, eps_low, eps_high, None), scale=1.0)


def minirl_mask_bias(problem: Problem, eps_low: float, eps_high: float, cap: float) -> Bound:
    """||E[R sum_t M_t min(w_t, C) g_t] - E[R sum_t min(w_t, C) g_t]|| <= G sum_t E_mu[|R| min(w_t, C) 1(M_t = 0)].

    M_t is MiniRL's gradient stop (Eq. 7), decided by r = pi/old, while the weight is pi/mu. Proof: where M_t is 1 the
    two are the same. Tight as `min_clip_bias`.
    """
    regions = MiniRLMask(eps_low, eps_high), MiniRLMask(1.0, math.inf)
    cut, whole = (_objective(ratios.token, region, TokenTIS("pi", cap)) for region in regions)
    return _bias("minirl_mask_bias", problem, cut, whole, stopped(problem, eps_low, eps_high, cap), scale=1.0)


# ---- variance --------------------------------------------------------------------------------------------------------


def token_tis_variance(problem: Problem, cap: float) -> Bound:
    """tr Cov of one response's R sum_t min(w_t, C) g_t <= (R_max G)^2 T sum_t P_mu(reaches t) min(C, 1 + chi2_t).

    Proof: the square of a sum of T terms is at most T times that of their squares, and min(w, C)^2 is at most C w and
    at most w^2. Each step's chi2 enters with the factor T, and no product of a response's weights enters.
    Tight for one token, a constant |R|, gradients of one length, and mean 0, as for a constant reward. Loose by T where
    the gradients of a response are orthogonal.
    """
    tree = problem.target.tree
    second_T = reached(tree, problem.logp_mu) * (1 + token_chi2(problem)).clamp(max=cap)
    return _variance("token_tis_variance", problem, TokenTIS("pi", cap), second_T)


def prefix_tis_variance(problem: Problem, cap: float) -> Bound:
    """tr Cov of one response's R sum_t min(W_<=t, C) g_t <= (R_max G)^2 T sum_t min(C, 1 + chi2_<=t).

    Proof, and where it is Tight, as `token_tis_variance`, chi2_<=t being Var_mu(W_<=t): without a cap exponential in t.
    """
    second_T = (1 + prefix_chi2(problem)).clamp(max=cap)
    return _variance("prefix_tis_variance", problem, PrefixTIS("pi", cap), second_T)


def seq_tis_variance(problem: Problem, cap: float) -> Bound:
    """tr Cov of one response's R sum_t min(W, C) g_t <= (R_max G T)^2 min(C, 1 + chi2(pi || mu)).

    Proof as `token_tis_variance`: without a cap exponential in T. Tight as there; loose by another T for orthogonal
    gradients.
    """
    T = problem.target.tree.max_length
    # One number per step: `_variance` then has T twice, from their count and from their sum.
    second_T = (1 + prefix_chi2(problem)[-1]).clamp(max=cap).expand(T)
    return _variance("seq_tis_variance", problem, SeqTIS("pi", cap), second_T)


# ---- the production objectives ---------------------------------------------------------------------------------------


def _expected(problem: Problem, objective: Objective) -> Estimate:
    """The moments of one response's gradient, whose advantage is its reward."""
    return estimate(problem, objective, Group(num_responses=None, baseline="none"))


def _score(correction: Correction) -> Objective:
    return _objective(ratios.none, NoRegion(), correction)


def _clip(eps_low: float, eps_high: float) -> Objective:
    return _objective(ratios.token, MinClip(eps_low, eps_high), NoCorrection())


def _objective(ratio: ratios.Ratio, region: TrustRegion, correction: Correction) -> Objective:
    # The advantage named here is never computed: `_expected` takes an infinite group without a baseline.
    return Objective("audited", "group_mean", ratio, region, correction, token_sum)


def _bias(
    name: str,
    problem: Problem,
    cut: Objective,
    whole: Objective,
    mass_T: Float[Tensor, " T"],
    scale: float | None = None,
) -> Bound:
    # Raises ValueError where a weight would not be finite.
    policies(problem)
    lhs = (_expected(problem, cut).mean - _expected(problem, whole).mean).norm()
    size = problem.reward_Y.abs().max() if scale is None else scale
    return Bound(name, lhs, size * longest_score(problem.policy) * mass_T.sum())


def _variance(name: str, problem: Problem, correction: Correction, second_T: Float[Tensor, " T"]) -> Bound:
    policies(problem)
    variance = torch.tensor(_expected(problem, _score(correction)).variance, dtype=torch.float64)
    limit = (problem.reward_Y.abs().max() * longest_score(problem.policy)) ** 2 * len(second_T) * second_T.sum()
    return Bound(name, variance, limit)


def _chebyshev(lo: float, hi: float) -> float:
    if not 0 <= lo < 1 < hi:
        raise ValueError(f"expected 0 <= lo < 1 < hi, got lo = {lo}, hi = {hi}")
    return max(hi / (hi - 1) ** 2, lo / (1 - lo) ** 2)
