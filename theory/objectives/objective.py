"""An objective as a composition: advantage x ratio x trust region x correction x aggregation, and a KL penalty.

    J = aggregate over kept tokens of  term(ratio, weight, A, log pi) - beta KL(pi || ref),   to be maximised.

Only pi carries a gradient; weights, masks and rejections are constants. Papers: MiniRL (arXiv 2512.01374) Eq. 3, 5, 7
and App. A, Pr2 (2606.00395) Eq. 10, 11 and 14.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.objectives.aggregations import Totals, count
from theory.objectives.centering import Top, centering_term
from theory.objectives.composition import Composition
from theory.objectives.factors import Factor, log_ratio, wide
from theory.objectives.kl_penalty import kl_pi_ref
from theory.objectives.metrics import penalty_metrics, ratio_metrics, weight_metrics
from theory.objectives.router_shift import log_router_ratio
from theory.objectives.second_moment import clip_level
from theory.objectives.trust_regions import MinClip, Tokens
from theory.objectives.weighing import log_mean_weight, token_weights


@dataclass(frozen=True)
class ObjectiveOutput:
    """The scalar to maximise, and metrics by registered name, as scalars without gradient.

    Metrics are means over the response tokens (rejected ones included), so that micro-batches combine by their token
    counts; names that end with `_max` are maxima. A metric that has no meaning for the objective is absent.
    """

    objective: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@dataclass(frozen=True)
class Objective(Composition):
    """A composed objective: calling it gives J and its metrics. Raises ValueError where its parts do not fit."""

    def __call__(
        self,
        logp_pi_BT: Float[Tensor, "B T"],
        logp_old_BT: Float[Tensor, "B T"],
        logp_mu_BT: Float[Tensor, "B T"],
        advantages_B: Float[Tensor, " B"],
        is_response_BT: Bool[Tensor, "B T"],
        *,
        logp_ref_BT: Float[Tensor, "B T"] | None = None,
        top: Top | None = None,
        router_shift_BT: Float[Tensor, "B T"] | None = None,
        advantages_BT: Float[Tensor, "B T"] | None = None,
        totals: Totals | None = None,
        has_metrics: bool = True,
    ) -> ObjectiveOutput:
        """J, in units of the advantage, on the tokens where `is_response_BT`; other positions may hold anything.

        `totals` are the denominators of the whole mini-batch where this is a micro-batch of it (`Objective.totals`);
        by default this batch is the whole. `router_shift_BT` is the shift of the routers (theory/routing/shift.py),
        for an objective that scales ratios by it. Without `has_metrics` the output has none. 16-bit log-probs are
        promoted to float32; 0/0 and 0 times infinity are 0 (theory/objectives/factors.py). With every response rejected
        J is 0, its gradient 0 and rollout_corr/rejected_fraction 1; with no response token J is 0 and there are no
        metrics. `advantages_BT`, an advantage per token, replaces `advantages_B`.
        Raises ValueError on shapes that differ, and where a KL coefficient has no `logp_ref_BT`, a router-shift floor
        no `router_shift_BT`, or centering no `top` (`full`: no complete one).
        """
        _require_shapes(
            logp_pi_BT, advantages_B, logp_old_BT=logp_old_BT, logp_mu_BT=logp_mu_BT, is_response_BT=is_response_BT,
            logp_ref_BT=logp_ref_BT, router_shift_BT=router_shift_BT, advantages_BT=advantages_BT,
        )  # fmt: skip
        self._require_inputs(logp_ref_BT, advantages_BT)
        logp_pi_BT, advantages_B1 = wide(logp_pi_BT), _broadcast(advantages_B, advantages_BT, is_response_BT)
        old_BT, mu_BT = (_on(is_response_BT, wide(x_BT.detach())) for x_BT in (logp_old_BT, logp_mu_BT))
        # Before the totals: rejected responses are in no denominator.
        kept_BT = self.kept(old_BT, mu_BT, is_response_BT)
        totals = self._totals(old_BT, mu_BT, kept_BT, is_response_BT) if totals is None else totals

        sampled = Tokens(_on(is_response_BT, logp_pi_BT.detach()), old_BT, mu_BT, is_response_BT)
        log_gap_BT, log_rho_BT = self._log_ratios(sampled.logp_pi_BT, old_BT, mu_BT)
        weight = self._weight(log_gap_BT, log_rho_BT, kept_BT, is_response_BT, totals.log_mean_weight)
        # Rejected responses are masked here, as their ratios may be infinite; metrics below count them.
        tokens = Tokens(*(_on(kept_BT, x_BT) for x_BT in (logp_pi_BT, old_BT, mu_BT)), is_response_BT=kept_BT)
        log_gamma_BT = self._log_gamma(router_shift_BT, is_response_BT)
        term_BT = self._term(tokens, weight, advantages_B1, log_gamma_BT)
        if self.centering != "none":
            term_BT = term_BT + self.centering_of(top, kept_BT, advantages_B1)
        if logp_ref_BT is not None and self.kl_coefficient > 0:
            ref_BT = _on(kept_BT, wide(logp_ref_BT))
            penalty_BT = kl_pi_ref(tokens.logp_pi_BT, ref_BT, self.kl_estimator, tokens.logp_mu_BT)
            term_BT = term_BT - self.kl_coefficient * penalty_BT

        metrics = {}
        # A mean over no token is no data.
        if has_metrics and is_response_BT.any():
            metrics |= ratio_metrics(self, sampled, advantages_B1, log_gamma_BT)
            metrics |= weight_metrics(self, weight.value_BT, log_gap_BT, log_rho_BT, kept_BT, is_response_BT)
            if logp_ref_BT is not None:
                metrics |= penalty_metrics(self, sampled, _on(is_response_BT, wide(logp_ref_BT)))
        return ObjectiveOutput(self.aggregation(term_BT, kept_BT, totals), metrics)

    def _term(
        self, tokens: Tokens, weight: Factor, advantages_B1: Tensor, log_gamma_BT: Tensor | float = 0.0
    ) -> Tensor:
        """Each token's term of the sum, before centering and penalty."""
        # pi / (old / gamma) is gamma pi/old: token by token, before a ratio combines a response's tokens.
        log_ratio_BT = self.ratio.log(tokens.logp_pi_BT, tokens.logp_old_BT - log_gamma_BT, tokens.is_response_BT)
        # The region multiplies by the ratio itself, or a weight on pi/mu has it already; else it joins the weight.
        ratio_in_weight = self.trust_region.weight_ratio != "pi/mu" or self.correction.numerator == "pi"
        whole = weight if ratio_in_weight else weight * Factor.exp(log_ratio_BT)
        return self.trust_region.term(tokens, log_ratio_BT, whole, advantages_B1)

    def within_budget(
        self,
        logp_pi_BT: Float[Tensor, "B T"],
        logp_old_BT: Float[Tensor, "B T"],
        logp_mu_BT: Float[Tensor, "B T"],
        advantages_B1: Float[Tensor, "B _T"],
        is_response_BT: Bool[Tensor, "B T"],
        weights_B1: Float[Tensor, "B _W"] | None = None,
    ) -> Objective:
        """The objective of one whole mini-batch, with its budget's bounds (theory/objectives/second_moment.py).

        `weights_B1` are those of responses or tokens in the mean, by default 1.
        """
        region = self.trust_region
        assert isinstance(region, MinClip), "the composition requires it"
        pi_BT, old_BT = (_on(is_response_BT, wide(x_BT.detach())) for x_BT in (logp_pi_BT, logp_old_BT))
        kept_BT = self.kept(logp_old_BT, logp_mu_BT, is_response_BT)
        tau = clip_level(log_ratio(pi_BT, old_BT), advantages_B1, kept_BT, self.m2_budget, weights_B1)
        # |log r| <= tau as bounds on r, which only ever widen the region's own.
        low = max(region.eps_low, -math.expm1(-tau))  # 1 for an infinite tau: no bound
        # A bound that the type of log pi cannot hold would be refused by its clamp: beyond it nothing binds.
        high = max(region.eps_high, math.inf if tau > math.log(torch.finfo(pi_BT.dtype).max) - 1 else math.expm1(tau))
        return replace(self, trust_region=replace(region, eps_low=low, eps_high=high), m2_budget=0.0)

    def _require_inputs(self, logp_ref_BT: Tensor | None, advantages_BT: Tensor | None) -> None:
        if self.kl_coefficient > 0 and logp_ref_BT is None:
            raise ValueError(f"{self.name}: expected logp_ref_BT for kl_coefficient {self.kl_coefficient}, got None")
        if self.has_token_advantages != (advantages_BT is not None):
            wanted, got = ("", "none") if advantages_BT is None else ("no ", "some")
            raise ValueError(f"{self.name}: advantage {self.advantage}: expected {wanted}advantages_BT, got {got}")
        if self.m2_budget:
            budget = f"{self.name}: m2_budget {self.m2_budget:g}"
            raise ValueError(f"{budget}: expected bounds computed on a whole mini-batch (within_budget), got none")

    def _log_gamma(self, router_shift_BT: Tensor | None, is_response_BT: Tensor) -> Tensor | float:
        if not self.uses_router_shift:
            return 0.0
        if router_shift_BT is None:
            floor = f"{self.name}: router_shift_floor {self.router_shift_floor:g}"
            raise ValueError(f"{floor}: expected the shift of the routers at every token, got none")
        return log_router_ratio(router_shift_BT, self.router_shift_floor, is_response_BT)

    def centering_of(self, top: Top | None, kept_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """Centering's term on every kept token (theory/objectives/centering.py)."""
        if top is None:
            raise ValueError(f"{self.name}: expected mu's likeliest tokens for centering {self.centering}, got none")
        if self.centering == "full" and not top.is_complete:
            num = top.logp_mu_BTK.shape[2]
            raise ValueError(f"{self.name}: expected all tokens of mu for centering full, got the {num} likeliest")

        def coefficients(pi_Bt: Tensor, old_Bt: Tensor, mu_Bt: Tensor, there_Bt: Tensor) -> Tensor:
            log_gap_Bt, log_rho_Bt = self._log_ratios(pi_Bt, old_Bt, mu_Bt)
            # The caller's pass may run without gradients; the coefficients are the term's own derivative.
            with torch.enable_grad():
                leaf_Bt = pi_Bt.requires_grad_()  # a leaf: what centering hands over is detached
                # One mask twice: only kept tokens are here, and no position is an observation.
                weight = self._weight(log_gap_Bt.detach(), log_rho_Bt, there_Bt, there_Bt)
                term_Bt = self._term(Tokens(leaf_Bt, old_Bt, mu_Bt, there_Bt), weight, advantages_B1)
                return torch.autograd.grad(term_Bt.sum(), leaf_Bt)[0]

        return centering_term(top, kept_BT, coefficients)

    def _log_ratios(self, pi_BT: Tensor, old_BT: Tensor, mu_BT: Tensor) -> tuple[Tensor, Tensor]:
        # A weight may be on pi/mu; rejections are always on old/mu.
        numerator_BT = pi_BT if self.correction.numerator == "pi" else old_BT
        return log_ratio(numerator_BT, mu_BT), log_ratio(old_BT, mu_BT)

    def _weight(
        self, log_gap_BT: Tensor, log_rho_BT: Tensor, kept_BT: Tensor, is_response_BT: Tensor, log_mean: float = 0.0
    ) -> Factor:
        return token_weights(self.correction, self.rejection, log_gap_BT, log_rho_BT, kept_BT, is_response_BT, log_mean)

    def totals(
        self, logp_old_BT: Float[Tensor, "B T"], logp_mu_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]
    ) -> Totals:
        """The denominators of a whole mini-batch, after rejections: with them its micro-batches' objectives add up."""
        old_BT, mu_BT = (_on(is_response_BT, wide(x_BT.detach())) for x_BT in (logp_old_BT, logp_mu_BT))
        return self._totals(old_BT, mu_BT, self.kept(old_BT, mu_BT, is_response_BT), is_response_BT)

    def _totals(self, old_BT: Tensor, mu_BT: Tensor, kept_BT: Tensor, is_response_BT: Tensor) -> Totals:
        totals = count(kept_BT)
        if not self.normalise_weights:
            return totals
        # Of kept responses: the weight of a rejected one may exceed all others together.
        mean = log_mean_weight(self.correction, log_ratio(old_BT, mu_BT), kept_BT)
        return replace(totals, log_mean_weight=mean)

    def kept(
        self, logp_old_BT: Float[Tensor, "B T"], logp_mu_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """The response tokens of the responses that the correction keeps: the mask that every sum runs over."""
        if not (self.correction.rejection or self.rejection.rejection):
            return is_response_BT
        old_BT, mu_BT = (_on(is_response_BT, wide(x_BT.detach())) for x_BT in (logp_old_BT, logp_mu_BT))
        log_rho_BT = log_ratio(old_BT, mu_BT)
        keep_B = self.correction.keep(log_rho_BT, is_response_BT) & self.rejection.keep(log_rho_BT, is_response_BT)
        # Whole responses: a correction that rejects tokens gives them the weight 0 and keeps this mask.
        return is_response_BT & keep_B[:, None]


def _on(mask_BT: Tensor, x_BT: Tensor) -> Tensor:
    """x where the mask is True, else 0: applied before any arithmetic, so that no nan or inf off the mask spreads."""
    return torch.where(mask_BT, x_BT, 0.0)


def _broadcast(advantages_B: Tensor, advantages_BT: Tensor | None, is_response_BT: Tensor) -> Tensor:
    """The advantages as (B, 1), or as (B, T) where each token has its own: both broadcast in every term."""
    if advantages_BT is None:
        return wide(advantages_B.detach())[:, None]
    return _on(is_response_BT, wide(advantages_BT.detach()))


def _require_shapes(logp_pi_BT: Tensor, advantages_B: Tensor, **others_BT: Tensor | None) -> None:
    shape = tuple(logp_pi_BT.shape)
    for name, x_BT in others_BT.items():
        if x_BT is not None and tuple(x_BT.shape) != shape:
            raise ValueError(f"{name}: expected the shape of logp_pi_BT, {shape}, got {tuple(x_BT.shape)}")
    if tuple(advantages_B.shape) != shape[:1]:
        raise ValueError(f"advantages_B: expected shape {shape[:1]}, got {tuple(advantages_B.shape)}")
