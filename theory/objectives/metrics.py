"""The metrics of an objective: its ratio and trust region, its weights and rejections, and its KL penalty.

Means over all response tokens, those of rejected responses included, without gradient; names that end with `_max` are
maxima. Sources: MiniRL (arXiv 2512.01374) Eq. 5 and 7 for the ratios pi/old and old/mu, Pr2 (2606.00395) Eq. 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.divergences import masked_mean, saturated
from theory.objectives.composition import Composition
from theory.objectives.kl_penalty import kl_pi_ref
from theory.objectives.trust_regions import Tokens


@torch.no_grad()
def ratio_metrics(
    parts: Composition, tokens: Tokens, advantages_B1: Float[Tensor, "B _T"], log_gamma_BT: Tensor | float
) -> dict[str, Float[Tensor, ""]]:
    """Mean of the ratio pi/old, its maximum where A < 0, and the shares of tokens that the trust region clips.

    Empty for an objective without a ratio. `log_gamma_BT` is the log of the router-shift ratio, 0.0 without one.
    """
    is_response_BT = tokens.is_response_BT
    if not parts.ratio.symbol:
        return {}
    ratio_BT = parts.ratio(tokens.logp_pi_BT, tokens.logp_old_BT - log_gamma_BT, is_response_BT)
    finite_BT = saturated(ratio_BT)
    metrics = {"actor/ratio_mean": masked_mean(finite_BT, is_response_BT)}
    negative_BT = is_response_BT & (advantages_B1 < 0)
    if negative_BT.any():
        metrics["actor/negative_ratio_max"] = finite_BT[negative_BT].max()
    if isinstance(log_gamma_BT, Tensor):
        # The clamp sets it to this number in its own type, to which the comparison rounds too: equal to the bit.
        at_floor_BT = log_gamma_BT <= math.log(parts.router_shift_floor)
        metrics["actor/router_shift_ratio"] = masked_mean(log_gamma_BT.exp(), is_response_BT)
        metrics["actor/router_shift_clipfrac"] = masked_mean(at_floor_BT.to(ratio_BT.dtype), is_response_BT)
    clipped = parts.trust_region.clipped(tokens, ratio_BT, advantages_B1)
    if clipped is not None:
        high, low = (masked_mean(flag_BT.to(ratio_BT.dtype), is_response_BT) for flag_BT in clipped)
        metrics |= {"actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low, "actor/pg_clipfrac": high + low}
    return metrics


@torch.no_grad()
def weight_metrics(
    parts: Composition,
    weight_BT: Float[Tensor, "B T"],
    log_gap_BT: Float[Tensor, "B T"],
    log_rho_BT: Float[Tensor, "B T"],
    kept_BT: Bool[Tensor, "B T"],
    is_response_BT: Bool[Tensor, "B T"],
) -> dict[str, Float[Tensor, ""]]:
    """Mean and maximum of the correction's weights, and the shares of tokens that it truncates and rejects.

    `log_gap_BT` is the log of the ratio that it weighs by, `log_rho_BT` that of old/mu, which rejections look at.
    """
    truncated_BT = parts.correction.truncated(log_gap_BT, is_response_BT)
    truncated_BT = (truncated_BT | parts.rejection.truncated(log_rho_BT, is_response_BT)) & kept_BT
    rejected_BT = is_response_BT & ~kept_BT
    return {
        "rollout_corr/weight_mean": masked_mean(weight_BT, is_response_BT),
        "rollout_corr/weight_max": weight_BT[is_response_BT].max(),
        "rollout_corr/truncated_fraction": masked_mean(truncated_BT.to(weight_BT.dtype), is_response_BT),
        "rollout_corr/rejected_fraction": masked_mean(rejected_BT.to(weight_BT.dtype), is_response_BT),
    }


@torch.no_grad()
def penalty_metrics(
    parts: Composition, tokens: Tokens, logp_ref_BT: Float[Tensor, "B T"]
) -> dict[str, Float[Tensor, ""]]:
    """Mean estimate of KL(pi || ref), nats per token, whatever its coefficient."""
    penalty_BT = kl_pi_ref(tokens.logp_pi_BT, logp_ref_BT, parts.kl_estimator, tokens.logp_mu_BT)
    return {"actor/kl_penalty": masked_mean(penalty_BT, tokens.is_response_BT)}


def combine_metrics(parts: Sequence[tuple[int, dict[str, Tensor]]]) -> dict[str, float]:
    """The metrics of a mini-batch from those of its parts, each with its number of response tokens.

    Token means combine by their token counts (Objective's metrics are token means); maxima stay maxima, also where a
    part has none. A part without response tokens has no metrics and is left out. Raises ValueError where no part has a
    response token.
    """
    count = sum(n for n, _ in parts)
    if count == 0:
        raise ValueError("expected at least 1 response token in the parts together, got 0")
    # Parts without tokens have no metrics to read the names from.
    parts = [(n, m) for n, m in parts if n > 0]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for _, m in parts for name in m):
        if name.endswith("_max"):
            # A weighted mean of the parts' maxima would depend on the split.
            metrics[name] = max(m[name].item() for _, m in parts if name in m)
        else:
            metrics[name] = sum(n * m[name].item() for n, m in parts) / count
    return metrics
