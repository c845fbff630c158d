"""Advantages from the rewards of a group: how much better a response did than the others to the same prompt.

Each function but `optimal_token` maps rewards to advantages of the same shape, one scalar per response, shared by
all of its tokens.
Letters: P prompts, G responses per prompt.
Papers: MiniRL (arXiv 2512.01374) sec. 4.1 and App. A, Pr2 (2606.00395) App. A.3, RLOO (2402.14740), DAPO (2503.14476),
OPO (2505.23585), REINFORCE++ (2501.03262), the optimal token baseline (2602.07078).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def keep_mixed_groups(rewards_PG: Float[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """The prompts kept under dynamic sampling: True where the rewards of the group are not all equal.

    With verifiable 0/1 rewards this drops the groups that are all right or all wrong, under any advantage. Such a group
    has advantages of 0 where they subtract the group's own mean; it has a gradient under `reinforce_pp` and
    `reinforce_pp_baseline`, which subtract the batch's, with a length penalty or label noise, which come after the
    filter, and with a KL penalty. Source: DAPO, sec. 3.2; verl's filter, too, knows rewards alone.
    """
    return (rewards_PG != rewards_PG[:, :1]).any(dim=1)


def noisy_labels(
    rewards_PG: Float[Tensor, "P G"], label_noise: float, generator: torch.Generator
) -> Float[Tensor, "P G"]:
    """Rewards in [0, 1], each flipped to 1 - R independently with probability `label_noise`: a verifier that errs.

    E[R'] = R + label_noise (1 - 2 R). Takes one uniform draw per reward from `generator`, also at label_noise 0.
    """
    # rand lies in [0, 1) and `<` is strict: a noise of 0 flips nothing, one of 1 everything.
    is_wrong_PG = torch.rand(rewards_PG.shape, generator=generator) < label_noise
    return torch.where(is_wrong_PG, 1.0 - rewards_PG, rewards_PG)


def group_mean(rewards_PG: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward less the mean of its group, in units of reward: A_i = R_i - mean_j R_j. Each row sums to 0.

    Equal rewards give exactly 0, so that no later division amplifies the rounding of the mean.
    Source: MiniRL sec. 4.1, where the expectation over y' ~ mu is estimated on the group.
    """
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return torch.where(keep_mixed_groups(rewards_PG)[:, None], centred_PG, torch.zeros_like(centred_PG))


def group_norm(rewards_PG: Float[Tensor, "P G"], eps: float = 1e-6) -> Float[Tensor, "P G"]:
    """Reward in standard deviations of its group: A_i = (R_i - mean_j R_j) / (std_j R_j + eps), dimensionless.

    The papers do not say which standard deviation. This is the sample one (divisor G - 1), as in verl, which ran the
    papers' GRPO baselines; the population one would give advantages larger by sqrt(G / (G - 1)). Equal rewards give
    exactly 0. Raises ValueError for G = 1, where the sample standard deviation does not exist.
    Source: MiniRL App. A; Pr2 Eq. 12 with eps = epsilon_A.
    """
    _require_group(rewards_PG, "group_norm")
    return group_mean(rewards_PG) / (rewards_PG.std(dim=1, keepdim=True, correction=1) + eps)


def leave_one_out(rewards_PG: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward less the mean of the *other* responses: A_i = R_i - mean_{j != i} R_j = G / (G - 1) (R_i - mean_j R_j).

    The baseline does not depend on response i, so the policy gradient stays unbiased at any G.
    Raises ValueError for G = 1: there is no other response. Source: RLOO.
    """
    _require_group(rewards_PG, "leave_one_out")
    G = rewards_PG.shape[1]
    # By `group_mean`, which is exactly 0 for equal rewards: R_i - (sum_j R_j - R_i) / (G - 1) would leave its rounding.
    return group_mean(rewards_PG) * (G / (G - 1))


def _require_group(rewards_PG: Tensor, name: str) -> None:
    if rewards_PG.shape[1] < 2:
        raise ValueError(f"{name}: expected at least 2 responses per prompt, got G = {rewards_PG.shape[1]}")


def opo(rewards_PG: Float[Tensor, "P G"], lengths_PG: Int[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward less its group's length-weighted mean, in units of reward: A_i = R_i - sum_j |y_j| R_j / sum_j |y_j|.

    This baseline has the least variance where the squared norm of a response's score is proportional to its length.
    Equal rewards give exactly 0. Source: OPO, as in verl 0.9.1 (`opo`).
    """
    weight_PG = lengths_PG.to(rewards_PG.dtype)
    # Averaging deviations keeps the digits that a mean of large rewards would round away.
    centred_PG = group_mean(rewards_PG)
    # Lengths are whole numbers, so that the clamp acts only on a group without a sampled token.
    baseline_P1 = (weight_PG * centred_PG).sum(1, keepdim=True) / weight_PG.sum(1, keepdim=True).clamp(min=1)
    return centred_PG - baseline_P1


def reinforce_pp(rewards_PG: Float[Tensor, "P G"], lengths_PG: Int[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward standardised over all tokens of the batch, whatever their groups; dimensionless.

    A_i = (R_i - m) / sqrt(v + 1e-8), m and v the mean and the sample variance of R over the batch's tokens. A batch of
    equal rewards gives exactly 0. Source: REINFORCE++, as in verl 0.9.1 (`reinforce_plus_plus` at gamma 1).
    Differs from source: (1) no KL penalty enters the reward.
    """
    return _whitened(rewards_PG, lengths_PG)


def reinforce_pp_baseline(rewards_PG: Float[Tensor, "P G"], lengths_PG: Int[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward less its group's mean, then standardised over all tokens of the batch as in `reinforce_pp`; dimensionless.

    A group of equal rewards does not give 0: the mean over tokens is not 0 where lengths differ. Source: REINFORCE++,
    as in verl 0.9.1 (`reinforce_plus_plus_baseline`).
    """
    return _whitened(group_mean(rewards_PG), lengths_PG)


def _whitened(x_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """x standardised by its mean and sample deviation over tokens; 0 where all are equal."""
    # Every token has its response's reward: in mean and variance a response counts as often as it has tokens.
    weight_PG = lengths_PG.to(x_PG.dtype)
    # At least 2, so that a batch of one token divides by 1 and not by 0.
    num_tokens = weight_PG.sum().clamp(min=2)
    centred_PG = x_PG - (weight_PG * x_PG).sum() / num_tokens
    variance = (weight_PG * centred_PG.square()).sum() / (num_tokens - 1)
    # Equality is tested on x: rounding leaves a variance that is not 0, which `rsqrt` would amplify.
    return torch.where((x_PG != x_PG[:1, :1]).any(), centred_PG * (variance + 1e-8).rsqrt(), torch.zeros_like(x_PG))


def optimal_token(
    rewards_PG: Float[Tensor, "P G"],
    logp_old_BT: Float[Tensor, "B T"],
    sum_squares_BT: Float[Tensor, "B T"],
    is_response_BT: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Reward less a separate baseline at every token, in units of reward; 0 off the mask. B = P G, groups adjacent.

        A_it = R_i - sum_j W_jt R_j / sum_j W_jt,    W_jt = sum_(s<=t) (1 - 2 old(y_js) + sum_v old(v)^2),

    over the responses j of the group that have a t-th sampled token, t counted without observations. Each summand of W
    is the squared length of a token's score in its logits, so the quotient is the baseline of least variance in the
    logits where scores of different tokens are uncorrelated. A group of equal rewards gives exactly 0. Raises
    ValueError for G = 1. Source: optimal token baseline (2602.07078), as in verl 0.9.1 (`tir_optimal_token_baseline`,
    which is `optimal_token_baseline` where there are no observations).
    Differs from source: (1) A = 0 where one response continues after all others have ended, as in verl with
    handle_zero_tail off; verl's default is A = R there; (2) no weight of the engine gap enters W; (3) where all W_jt
    are 0 the baseline is the mean.
    """
    P, G = rewards_PG.shape
    _require_group(rewards_PG, "optimal_token")
    energy_BT = 1 - 2 * logp_old_BT.double().exp() + sum_squares_BT.double()
    T, length_B = is_response_BT.shape[1], is_response_BT.sum(1)
    # The sampled tokens move to the left, in order, so that column t has the t-th of every response.
    order_BT = (~is_response_BT).long().argsort(dim=1, stable=True)
    there_BT = torch.arange(T, device=length_B.device) < length_B[:, None]
    # Rounding may put an energy, a sum of squares, just below 0.
    W_BT = torch.where(there_BT, energy_BT.gather(1, order_BT).clamp(min=0), 0.0).cumsum(1)
    W_PGT, there_PGT = W_BT.view(P, G, T), there_BT.view(P, G, T)
    # Equal weights turn the baseline into the mean where all W are 0.
    W_PGT = torch.where((W_PGT * there_PGT).sum(1, keepdim=True) > 0, W_PGT, 1.0) * there_PGT
    # Deviations from the mean, as in `opo`: equal rewards give exactly 0, whatever the weights.
    centred_PG1 = group_mean(rewards_PG).double()[..., None]
    # Where no response has a t-th token, both sums are 0 and the next line drops the quotient. The floor is below any
    # sum of energies, and above 0 in float64 alone.
    baseline_P1T = (W_PGT * centred_PG1).sum(1, keepdim=True) / W_PGT.sum(1, keepdim=True).clamp(min=1e-300)
    packed_BT = torch.where(there_PGT, centred_PG1 - baseline_P1T, 0.0).view(P * G, T)
    # The one response that still continues has no other to be compared with.
    alone_PGT = there_PGT & (there_PGT.sum(1, keepdim=True) == 1)
    packed_BT = torch.where(alone_PGT.view(P * G, T), 0.0, packed_BT)
    # Undoes the gather: each row of `order_BT` is a permutation, so that every position is written once.
    return torch.zeros_like(packed_BT).scatter(1, order_BT, packed_BT).to(rewards_PG.dtype)


def overlong_penalty(
    lengths_PG: Int[Tensor, "P G"], max_tokens: int, buffer: int, factor: float = 1.0
) -> Float[Tensor, "P G"]:
    """DAPO's length penalty, added to the reward, in [-factor, 0]: 0 up to max_tokens - buffer, then linear to -factor.

    Between the two it is factor (max_tokens - buffer - |y|) / buffer; |y| counts all tokens after the prompt.
    Raises ValueError unless 0 < buffer <= max_tokens. Source: DAPO Eq. 13, as in verl 0.9.1 and TRL 1.16 (factor 1).
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"overlong_buffer: expected 0 < overlong_buffer <= max_tokens = {max_tokens}, got {buffer}")
    over_PG = (lengths_PG - (max_tokens - buffer)).clamp(min=0, max=buffer)
    return -factor * over_PG.float() / buffer


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_mean": group_mean,
    "group_norm": group_norm,
    "leave_one_out": leave_one_out,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "optimal_token": optimal_token,
}
"""The advantage functions by the name that an objective and a config use."""

OF_LENGTHS = ("opo", "reinforce_pp", "reinforce_pp_baseline")
"""The advantages that also take the responses' lengths, in tokens that mu sampled."""

OF_TOKENS = ("optimal_token",)
"""The advantages per token, computed from the old pass."""


def advantages_of(
    name: str, rewards_PG: Float[Tensor, "P G"], lengths_PG: Int[Tensor, "P G"] | None = None
) -> Float[Tensor, "P G"]:
    """The named advantage, one per response. Raises ValueError for one per token, and where needed lengths are None."""
    if name in OF_TOKENS:
        others = ", ".join(x for x in ADVANTAGES if x not in OF_TOKENS)
        raise ValueError(f"advantage: expected one per response ({others}), got {name}, which needs the old pass")
    if name not in OF_LENGTHS:
        return ADVANTAGES[name](rewards_PG)
    if lengths_PG is None:
        others = ", ".join(x for x in ADVANTAGES if x not in OF_LENGTHS + OF_TOKENS)
        raise ValueError(f"advantage: expected one that needs no lengths ({others}), got {name}")
    return ADVANTAGES[name](rewards_PG, lengths_PG)


FORMULAS: dict[str, str] = {
    "group_mean": "A = R - mean(R)",
    "group_norm": "A = (R - mean(R)) / (std(R) + eps)",
    "leave_one_out": "A = R - mean of the other responses' R",
    "opo": "A = R - sum |y| R / sum |y|",
    "reinforce_pp": "A = (R - mean(R)) / std(R), over all tokens of the batch",
    "reinforce_pp_baseline": "A = (B - mean(B)) / std(B), over all tokens of the batch, B = R - mean(R) of the group",
    "optimal_token": "A_t = R - sum W_t R / sum W_t, W_t = sum_(s<=t) (1 - 2 old_s + sum_v old(v)^2)",
}
"""Their formulas, as text."""
