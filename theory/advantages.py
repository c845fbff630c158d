"""Advantages from the rewards of a group: how much better a response did than the others to the same prompt.

Each function maps rewards to advantages of the same shape, one scalar a response, shared by all of its tokens.
Letters: P prompts, G responses a prompt.
Papers: MiniRL (arXiv 2512.01374) sec. 4.1 and App. A, Pr2 (2606.00395) App. A.3, RLOO (2402.14740), DAPO (2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def keep_mixed_groups(rewards_PG: Float[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """Which prompts to keep under dynamic sampling: True where the rewards of the group are not all equal.

    With verifiable 0/1 rewards this drops the groups that are all right or all wrong, whose advantages are all 0.
    Source: DAPO, sec. 3.2.
    """
    return (rewards_PG != rewards_PG[:, :1]).any(dim=1)


def noisy_labels(
    rewards_PG: Float[Tensor, "P G"], label_noise: float, generator: torch.Generator
) -> Float[Tensor, "P G"]:
    """Rewards in [0, 1], each by itself exchanged for 1 - R with probability `label_noise`: a verifier that errs.

    E[R'] = R + label_noise (1 - 2 R). One uniform draw a reward, from `generator`; at 0 the rewards themselves.
    """
    is_wrong_PG = torch.rand(rewards_PG.shape, generator=generator) < label_noise
    return torch.where(is_wrong_PG, 1.0 - rewards_PG, rewards_PG)


def group_mean(rewards_PG: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Reward less the mean of its group, in units of reward: A_i = R_i - mean_j R_j. Each row sums to 0.

    A group of equal rewards gives exactly 0: the rounding of the mean is not left to be amplified by a division.
    Source: MiniRL sec. 4.1, where the expectation over y' ~ mu is estimated on the group.
    """
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return torch.where(keep_mixed_groups(rewards_PG)[:, None], centred_PG, torch.zeros_like(centred_PG))


def group_norm(rewards_PG: Float[Tensor, "P G"], eps: float = 1e-6) -> Float[Tensor, "P G"]:
    """Reward in standard deviations of its group: A_i = (R_i - mean_j R_j) / (std_j R_j + eps), without unit.

    The papers do not say which standard deviation. This is the sample one (divisor G - 1), as in verl, in which the
    papers' GRPO baselines ran; the population one would be larger by sqrt(G / (G - 1)). Equal rewards give exactly 0.
    Raises ValueError for G = 1, where the sample standard deviation does not exist.
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
    return group_mean(rewards_PG) * (G / (G - 1))


def _require_group(rewards_PG: Tensor, name: str) -> None:
    if rewards_PG.shape[1] < 2:
        raise ValueError(f"{name}: expected at least 2 responses a prompt, got G = {rewards_PG.shape[1]}")


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_mean": group_mean,
    "group_norm": group_norm,
    "leave_one_out": leave_one_out,
}
"""The advantage functions by the name that an objective and a config use."""

FORMULAS: dict[str, str] = {
    "group_mean": "A = R - mean(R)",
    "group_norm": "A = (R - mean(R)) / (std(R) + eps)",
    "leave_one_out": "A = R - mean of the other responses' R",
}
"""Their formulas, to print."""

__all__ = ["ADVANTAGES", "FORMULAS", "group_mean", "group_norm", "keep_mixed_groups", "leave_one_out", "noisy_labels"]
