"""Divergences between policies: exact ones on logits, and estimators from the log-probabilities of sampled tokens.

The direction is in the name: `kl_p_q` is KL(p || q), `k3_kl_mu_old` estimates KL(mu || old) from tokens drawn from mu.
Estimators take the numerator first and the sampler second, so that r = first / second. All values are in nats.
Papers: MiniRL (arXiv 2512.01374) Eq. 5 and sec. 4.2, R3 (2510.11370) Eq. 2 and 3; k1, k2, k3 after J. Schulman,
"Approximating KL divergence" (2020); the names of the `rollout_corr` quantities after verl.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# ---- exact, on logits ------------------------------------------------------------------------------------------------

SATURATION = 75.0
"""Nats up to which a metric follows a product over tokens: a mean of a million such numbers is finite in float32."""


def kl_p_q(logits_p: Float[Tensor, "*batch V"], logits_q: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """KL(p || q) = sum_v p log(p / q) over the last axis, nats, in [0, inf].

    A token that p forbids (logit -inf) adds 0; one that only q forbids makes the divergence inf. Gradients reach both.
    """
    logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    # The usual case, without the masks below and with the same bits. A NaN or an empty batch takes the long way.
    if logp.numel() and min(logp.amin().item(), logq.amin().item()) > -math.inf:
        return (logp.exp() * (logp - logq)).sum(-1)
    possible = logp > -math.inf
    # The log-ratio is taken only where p can go, so that 0 * inf appears neither in the value nor in the gradient.
    log_ratio = torch.where(possible, logp, 0.0) - torch.where(possible, logq, 0.0)
    # The exponential of a log p that is finite may still be 0, and its product with inf nan.
    return torch.where(log_ratio == math.inf, math.inf, logp.exp() * log_ratio).sum(-1)


def kl_of_terms(logits_p: Float[Tensor, "*batch V"], logits_q: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """KL(p || q) = sum_v p (r - 1 - log r), r = q/p, over the last axis, nats, in [0, inf]: every term is at least 0.

    Exact near equality, where `kl_p_q`, whose terms have both signs, is all rounding. Gradients reach both.
    """
    logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    # Not its negation by >: a nan is to stay one.
    is_end = (logp == -math.inf) | (logq == -math.inf)
    # Both are 0 where either is -inf: a difference of two -inf would be nan.
    log_r = torch.where(is_end, 0.0, logq) - torch.where(is_end, 0.0, logp)
    # Far above p the term is q - p - p log r: p may be 0 by underflow where expm1 is inf.
    is_near = log_r < 1
    near_r = torch.where(is_near, log_r, 0.0)
    # The last digit of expm1 may put a term below 0.
    terms = torch.where(
        is_near, logp.exp() * (near_r.expm1() - near_r).clamp(min=0), logq.exp() - logp.exp() * (1 + log_r)
    )
    # As p -> 0 the term tends to q, and as q -> 0 to inf.
    ends = torch.where(logp == -math.inf, logq.exp(), math.inf)
    return torch.where(is_end, ends, terms).sum(-1)


def tv_p_q(logits_p: Float[Tensor, "*batch V"], logits_q: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Total variation, (1/2) sum_v |p - q| over the last axis, in [0, 1]; symmetric."""
    return (logits_p.softmax(-1) - logits_q.softmax(-1)).abs().sum(-1) / 2


def entropy(logits_BTV: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """Entropy -sum_v p log p of each position's next-token distribution, nats, in [0, log V]; -inf logits add 0.

    Source: MiniRL sec. 4.2 (the mean over response tokens is what the paper plots).
    """
    logp = logits_BTV.log_softmax(-1)
    return -(logp.exp() * torch.where(logp > -math.inf, logp, 0.0)).sum(-1)


def surprise_gap(logp_BT: Float[Tensor, "*BT"], entropy_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """-log p(y) - H(p) of each token y, nats, >= -H(p): 0 in expectation if y ~ p, negative if too likely."""
    return -logp_BT - entropy_BT


# ---- estimators, one value per token ---------------------------------------------------------------------------------


def k1(logp_q: Float[Tensor, "*BT"], logp_p: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k1 = -log r, r = q/p: estimates KL(p || q) for a token ~ p. Unbiased, of either sign, high variance.

    As a loss it is useless: its gradient in p is the bare score, whose expectation is 0.
    """
    return logp_p - logp_q


def k2(logp_q: Float[Tensor, "*BT"], logp_p: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k2 = (log r)^2 / 2, r = q/p: a biased, non-negative estimate of KL(p || q) for a token ~ p.

    Its gradient in p is unbiased for that of KL(p || q) when the token is drawn from p itself.
    """
    return (logp_q - logp_p) ** 2 / 2


def k3(logp_q: Float[Tensor, "*BT"], logp_p: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k3 = r - 1 - log r, r = q/p: estimates KL(p || q) for a token ~ p. Unbiased, non-negative, never clamped.

    Its gradient in q is unbiased for that of KL(p || q). Its gradient in p is that of the *reverse*, KL(q || p).
    `expm1` keeps the digits where r is near 1. Source: R3 Eq. 2.
    """
    log_r = logp_q - logp_p
    return log_r.expm1() - log_r


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators of KL(p || q) by name, each a function of (logp_q, logp_p)."""


def k1_kl_mu_old(logp_old_BT: Float[Tensor, "*BT"], logp_mu_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k1 of KL(mu || old), the training-inference discrepancy, token ~ mu: log(mu/old). Source: MiniRL sec. 4.2."""
    return k1(logp_old_BT, logp_mu_BT)


def k3_kl_mu_old(logp_old_BT: Float[Tensor, "*BT"], logp_mu_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k3 of KL(mu || old), the training-inference discrepancy, token ~ mu: r - 1 - log r, r = old/mu. R3 Eq. 2."""
    return k3(logp_old_BT, logp_mu_BT)


def k3_kl_old_pi(logp_pi_BT: Float[Tensor, "*BT"], logp_old_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k3 of KL(old || pi), the policy staleness, token ~ old: r - 1 - log r, r = pi/old."""
    return k3(logp_pi_BT, logp_old_BT)


def k3_kl_mu_pi(logp_pi_BT: Float[Tensor, "*BT"], logp_mu_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """k3 of KL(mu || pi), discrepancy and staleness together, token ~ mu: r - 1 - log r, r = pi/mu."""
    return k3(logp_pi_BT, logp_mu_BT)


# ---- over a batch ----------------------------------------------------------------------------------------------------


def saturated(x_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """x up to e^SATURATION, for metrics of pi: a ratio may be infinite where the term is bounded, and so the update."""
    return x_BT.clamp(max=math.exp(SATURATION))


def masked_mean(x_BT: Float[Tensor, "*BT"], mask_BT: Bool[Tensor, "*BT"]) -> Float[Tensor, ""]:
    """Mean of x where the mask is True. Entries under False change no value and get zero gradient.

    Raises ValueError on a mask without a True: the mean of nothing is no data, not 0.
    """
    count = int(mask_BT.sum())
    if count == 0:
        raise ValueError(f"masked_mean: expected at least 1 True in the mask, got 0 of {mask_BT.numel()}")
    return torch.where(mask_BT, x_BT, 0.0).sum() / count


def extreme_fraction(
    logp_a_BT: Float[Tensor, "*BT"], logp_b_BT: Float[Tensor, "*BT"], mask_BT: Bool[Tensor, "*BT"], tau: float | int
) -> Float[Tensor, ""]:
    """F(tau) = fraction of tokens with max(a/b, b/a) > tau, in [0, 1]; symmetric in a and b, without gradient.

    A NaN where the mask is True gives NaN. Raises ValueError for tau < 1 (every token would count) and for an empty
    mask. Source: R3 Eq. 3.
    """
    if not tau >= 1:
        raise ValueError(f"extreme_fraction: expected tau >= 1, got {tau}")
    gap_BT = (logp_a_BT - logp_b_BT).detach().abs()
    is_extreme_BT = (gap_BT > math.log(tau)).to(gap_BT.dtype)
    # `nan > x` is False: without this a NaN would count as a moderate gap.
    return masked_mean(torch.where(gap_BT.isnan(), gap_BT, is_extreme_BT), mask_BT)


def effective_sample_size(log_weight_BT: Float[Tensor, "*BT"], mask_BT: Bool[Tensor, "*BT"]) -> Float[Tensor, ""]:
    """Effective sample size as a fraction of the samples, in (0, 1]: 1 / mean((w / mean w)^2) = (sum w)^2 / n sum w^2.

    Takes log-weights and stays in log space, so that no weight overflows. 1 when all weights are equal.
    Raises ValueError on an empty mask. Source: verl's rollout_corr.
    """
    # Taken out, not set to 0: a log-weight of 0 is a weight of 1.
    log_weight = log_weight_BT[mask_BT]
    if log_weight.numel() == 0:
        raise ValueError(f"effective_sample_size: expected at least 1 True in the mask, got 0 of {mask_BT.numel()}")
    return (2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0) - math.log(log_weight.numel())).exp()


def chi2_token(
    logp_old_BT: Float[Tensor, "B T"], logp_mu_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean over tokens of rho^2 - 1, rho = old/mu: estimates chi2(old || mu), token ~ mu; in [-1, inf]. verl's name."""
    # expm1: squaring first and subtracting 1 would lose the digits where the engines nearly agree.
    return masked_mean((2 * (logp_old_BT - logp_mu_BT)).expm1(), mask_BT)


def chi2_seq(
    logp_old_BT: Float[Tensor, "B T"], logp_mu_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean over responses of (prod_t rho_t)^2 - 1, rho = old/mu: estimates chi2 of the whole responses' distributions.

    The product (verl), not its geometric mean, its square held at e^SATURATION (verl holds its logarithm within 20).
    Rows without a response token are left out.
    """
    log_product_B = torch.where(mask_BT, logp_old_BT - logp_mu_BT, 0.0).sum(1)
    return masked_mean((2 * log_product_B).clamp(max=SATURATION).expm1(), mask_BT.any(1))


@torch.no_grad()
def discrepancy_metrics(
    logp_old_BT: Float[Tensor, "B T"], logp_mu_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """The `rollout_corr` metrics of mu against old, by registered name (theory/metrics.py has each formula).

    Raises ValueError where the mask has no response token.
    """
    gap_BT = logp_old_BT - logp_mu_BT
    probs_diff_BT = (logp_old_BT.exp() - logp_mu_BT.exp()).abs()
    # Each response's own mean first, as verl does, so that long responses weigh no more than short ones. A row without
    # tokens gives 0 / 0, which the mask below leaves out.
    num_tokens_B = mask_BT.sum(1)
    mean_gap_B = torch.where(mask_BT, gap_BT, 0.0).sum(1) / num_tokens_B
    values = {
        "rollout_corr/kl": masked_mean(k1_kl_mu_old(logp_old_BT, logp_mu_BT), mask_BT),
        "rollout_corr/k3_kl": masked_mean(k3_kl_mu_old(logp_old_BT, logp_mu_BT), mask_BT),
        "rollout_corr/chi2_token": chi2_token(logp_old_BT, logp_mu_BT, mask_BT),
        "rollout_corr/chi2_seq": chi2_seq(logp_old_BT, logp_mu_BT, mask_BT),
        "rollout_corr/eff_sample_size": effective_sample_size(gap_BT, mask_BT),
        "rollout_corr/extreme_frac_tau2": extreme_fraction(logp_old_BT, logp_mu_BT, mask_BT, tau=2.0),
        "rollout_corr/probs_diff_mean": masked_mean(probs_diff_BT, mask_BT),
        "rollout_corr/probs_diff_max": probs_diff_BT[mask_BT].max(),
        # The gap is log old - log mu, verl's difference log mu - log old.
        "rollout_corr/log_ppl_diff": -masked_mean(mean_gap_B, num_tokens_B > 0),
    }
    return {name: float(value) for name, value in values.items()}


@torch.no_grad()
def staleness_metrics(
    logp_pi_BT: Float[Tensor, "B T"], logp_old_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """The `staleness` metrics of old against pi, by registered name. ValueError where the mask has no response token.

    The tokens came from mu, not old: the k3 mean is unbiased for KL(old || pi) only as far as mu equals old.
    """
    values = {
        "staleness/k3_kl": masked_mean(saturated(k3_kl_old_pi(logp_pi_BT, logp_old_BT)), mask_BT),
        "staleness/extreme_frac_tau2": extreme_fraction(logp_pi_BT, logp_old_BT, mask_BT, tau=2.0),
    }
    return {name: float(value) for name, value in values.items()}
