"""Regions on a divergence: a token's gradient stops once pi's distribution has gone too far from mu's.

A ratio says little about a distribution: 1e-5 -> 1e-3 is a ratio of 100 and moves 0.001 of the mass, 0.99 -> 0.8 a
ratio of 0.8 and moves 0.2. The divergence is that of the sampled token against all others (two outcomes), a lower
bound of the whole one by data processing, computed from the log-probabilities that every objective already has.
Papers: DPPO (arXiv 2602.04879) Eq. 11 to 14, CPPO (2606.10968) Eq. 8 to 11 and Algorithm 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.fields import About
from theory.names import listed
from theory.objectives.factors import Factor, pick
from theory.objectives.trust_regions.base import TRUST_REGIONS, Tokens, WeightRatio, Widths, product, score, stopped

_TABLE_3 = "CPPO, arXiv 2606.10968, Table 3"


def binary_tv(logp_p_BT: Float[Tensor, "*BT"], logp_q_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """Total variation of "this token or another" under p and q, |p - q|, in [0, 1]. Source: DPPO Eq. 13."""
    return (logp_p_BT.exp() - logp_q_BT.exp()).abs()


def binary_kl(logp_p_BT: Float[Tensor, "*BT"], logp_q_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """KL(p || q) of "this token or another", p log(p/q) + (1-p) log((1-p)/(1-q)), nats, in [0, inf].

    A log-probability is known to the float's eps at best, so 1 - p and 1 - q are taken as at least that: a certain
    token whose log-probability one engine rounds to 0 and the other to -1e-7 counts as no divergence, never as nan.
    Source: DPPO Eq. 14, with p = mu. Differs from source: (1) that floor (its authors add 1e-8 to both rests).
    """
    rest_p_BT, rest_q_BT = ((-x_BT.expm1()).clamp(min=torch.finfo(x_BT.dtype).eps) for x_BT in (logp_p_BT, logp_q_BT))
    # A token that p excludes adds nothing, whatever q gives it; one that q alone excludes is infinitely far, also where
    # p is too small for a float.
    this_BT = torch.where(logp_q_BT.isneginf(), math.inf, logp_p_BT.exp() * (logp_p_BT - logp_q_BT))
    this_BT = torch.where(logp_p_BT.isneginf(), 0.0, this_BT)
    return this_BT + rest_p_BT * (rest_p_BT / rest_q_BT).log()


@dataclass(frozen=True)
class DivergenceMask(Widths):
    """M_t sg[w] A log pi, M_t = 0 where A pushes pi farther from mu, from which it is already too far.

    With w = pi/mu the gradient is M_t (pi/mu) A grad log pi, that of the papers' M_t (pi/mu) A; M_t is a stop, not a
    mask: a stopped token stays in every denominator. Updates that bring pi back are never stopped.
    """

    weight_ratio: ClassVar[WeightRatio] = "pi/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = False

    @abstractmethod
    def too_far(self, tokens: Tokens, eps_B1: Tensor) -> Bool[Tensor, "B T"]:
        """True where pi is farther from mu than eps allows."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """`too_far` in formulas, for a bound called eps."""

    @torch.no_grad()
    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Two masks: A > 0, pi above mu and too far, and A < 0, pi below it and too far."""
        eps_B1 = pick(advantages_B1 > 0, self.eps_high, self.eps_low, like=tokens.logp_pi_BT)
        far_BT = self.too_far(tokens, eps_B1)
        # Strict: a token at mu has not moved, and no bound stops it.
        up_BT, down_BT = tokens.logp_pi_BT > tokens.logp_mu_BT, tokens.logp_pi_BT < tokens.logp_mu_BT
        return far_BT & up_BT & (advantages_B1 > 0), far_BT & down_BT & (advantages_B1 < 0)

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """M_t sg[w] A log pi."""
        # The ratio only fills the interface: these regions read log-probabilities, and weigh by `weight`.
        high_BT, low_BT = self.clipped(tokens, log_ratio_BT.exp(), advantages_B1)
        return score(torch.where(high_BT | low_BT, 0.0, weight.value_BT), advantages_B1, tokens.logp_pi_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the rule for M_t."""
        stop = f"M_t = 0 where A log(pi_t/mu_t) > 0 and {self.rule}"
        eps = f"eps = {self.eps_high:g} where A > 0, {self.eps_low:g} where A < 0"
        return f"{product('M_t', stopped(weight), 'A', 'log pi_t')} [{stop}; {eps}]"


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class BinaryTV(DivergenceMask):
    """DPPO-Binary-TV: too far where |pi_t - mu_t| > eps. Source: DPPO Eq. 12 and 13.

    Differs from source: (1) eps may differ by direction, as in its authors' code in verl. eps 0.15 is that code's.
    """

    name: ClassVar[str] = "dppo_tv"

    eps_low: float = 0.15
    eps_high: float = 0.15

    @property
    def rule(self) -> str:
        return "|pi_t - mu_t| > eps"

    def too_far(self, tokens: Tokens, eps_B1: Tensor) -> Tensor:
        """True where |pi - mu| > eps."""
        return binary_tv(tokens.logp_pi_BT, tokens.logp_mu_BT) > eps_B1


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class BinaryKL(DivergenceMask):
    """DPPO-Binary-KL: too far where KL(mu_t || pi_t) of "this token or another" > eps. Source: DPPO Eq. 12 and 14.

    Differs from source as `BinaryTV` does. eps 0.05 is that of a public implementation (open-instruct).
    """

    name: ClassVar[str] = "dppo_kl"

    eps_low: float = 0.05
    eps_high: float = 0.05

    @property
    def rule(self) -> str:
        return "KL(Ber(mu_t) || Ber(pi_t)) > eps"

    def too_far(self, tokens: Tokens, eps_B1: Tensor) -> Tensor:
        """True where the binary KL(mu || pi) > eps."""
        return binary_kl(tokens.logp_mu_BT, tokens.logp_pi_BT) > eps_B1


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class CPPO(DivergenceMask):
    """Too far where w_t D_t > min(eps, eps + delta_b W_(t-1) - S_(t-1)), with D_t = |pi_t - mu_t|.

    w_t = 1 - (1 - w_min) (t - 1) / (|y| - 1) falls from 1 on the first token to w_min on the last: an early deviation
    moves the state of all that follows. W and S are the sums of w_s and of w_s D_s over s < t: a prefix that spent more
    than delta_b per token leaves less to later tokens. Source: CPPO Eq. 8 to 10, Algorithm 1; eps is its delta.
    Differs from source: (1) D_t is the binary total variation of its ablation and public code, not the top-20 one;
    (2) eps may differ by direction; (3) delta_b is a constant, not each response's own quantile (its Eq. 22, for base
    models). The numbers are those of its run with a constant delta_b (sec. 4.1, Table 3). At 1 delta_b never binds.
    """

    name: ClassVar[str] = "cppo"
    is_tokenwise: ClassVar[bool] = False

    eps_low: float = 0.15
    eps_high: float = 0.15
    delta_b: Annotated[float, About("divergence per token a prefix may spend", ge=0, le=1, source=_TABLE_3)] = 0.015
    w_min: Annotated[float, About("weight of the last position; the first has 1", gt=0, le=1, source=_TABLE_3)] = 0.8

    @property
    def rule(self) -> str:
        weights = f"w from 1 to {self.w_min:g} along the response"
        budget = f"min(eps, eps + sum_(s<t) w_s ({self.delta_b:g} - |pi_s - mu_s|))"
        return f"w_t |pi_t - mu_t| > {budget}, {weights}"

    def position_weights(self, is_response_BT: Bool[Tensor, "B T"], like: Tensor) -> Float[Tensor, "B T"]:
        """w_t on response tokens, in [w_min, 1], 0 elsewhere; a response of one token has weight 1. CPPO Eq. 9."""
        mask_BT = is_response_BT.to(like.dtype)
        # The clamp is for a response of one token: 0 / 1 leaves it the weight 1, where 0 / 0 would be nan.
        steps_B1 = (mask_BT.sum(1, keepdim=True) - 1).clamp(min=1)
        return mask_BT * (1 - (1 - self.w_min) * (mask_BT.cumsum(1) - 1) / steps_B1)

    def too_far(self, tokens: Tokens, eps_B1: Tensor) -> Tensor:
        """True where the weighted divergence exceeds eps, or eps less the prefix's overspent budget."""
        # Off the mask both log-probabilities are 0, so that the prefix spends nothing there.
        divergence_BT = binary_tv(tokens.logp_pi_BT, tokens.logp_mu_BT)
        weight_BT = self.position_weights(tokens.is_response_BT, divergence_BT)
        spent_BT = weight_BT * divergence_BT
        saved_BT = self.delta_b * weight_BT - spent_BT
        # An exclusive cumulative sum, over s < t; savings do not widen the bound, a deficit narrows it.
        left_B0T = saved_BT.cumsum(1) - saved_BT
        return spent_BT > eps_B1 + left_B0T.clamp(max=0)
