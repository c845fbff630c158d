"""Gate conventions: how router logits become a set of experts and their weights, for the public MoE families.

Selection and weighing are two functions, so that a replayed set is weighed by the live logits (R3, arXiv 2510.11370,
Eq. 8) in the model's own convention. Ids are ascending, so that the sum over experts has one order.

Letters beyond theory/contracts.py: N rows of a flattened batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class GateKernels(Protocol):
    """Another implementation of `select` and `weigh`, for a model whose other kernels are not torch's."""

    def select(
        self, logits_NE: Float[Tensor, "N E"], num_slots: int, gate: Gate, selection_bias_E: Float[Tensor, " E"] | None
    ) -> Int[Tensor, "N K"]:
        """The experts that `select` chooses, for sizes that fit."""
        ...

    def weigh(self, logits_NE: Float[Tensor, "N E"], experts_NK: Int[Tensor, "N K"], gate: Gate) -> Tensor:
        """The weights that `weigh` gives."""
        ...


@dataclass(frozen=True)
class Gate:
    """One convention: the score of an expert, before or after the top-k, and the scaling of the chosen scores.

    score, order: `softmax` before the top-k is a softmax over all experts, after it over the chosen ones (which sum to
    1 already, so that `renormalise` then changes nothing); `sigmoid` is per expert, and before the top-k.
    renormalise: the chosen scores are divided by their sum. scaling: then multiplied by this.
    num_groups, num_top_groups, group_score: only experts of the best groups may be chosen; a group's score is the
    largest of its experts' (`max`) or the sum of its two largest (`top2_sum`). Where a sharp softmax leaves the best
    groups fewer than K scores above 0, experts of weight 0 from any group fill the slots.
    kernels: the implementation; None is this module. Not part of the convention.
    """

    score: Literal["softmax", "sigmoid"]
    order: Literal["before", "after"]
    renormalise: bool
    scaling: float = 1.0
    num_groups: int = 1
    num_top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    kernels: GateKernels | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.score == "sigmoid" and self.order == "after":
            raise ValueError("expected order 'before' with score 'sigmoid' (it is per expert), got 'after'")
        if not 1 <= self.num_top_groups <= self.num_groups:
            raise ValueError(f"expected from 1 to {self.num_groups} top groups, got {self.num_top_groups}")
        if not self.scaling > 0:
            raise ValueError(f"expected a positive scaling, got {self.scaling}")


GATES: dict[str, Gate] = {
    "qwen3": Gate("softmax", "before", renormalise=True),
    "mixtral": Gate("softmax", "before", renormalise=True),
    "olmoe": Gate("softmax", "before", renormalise=False),
    "deepseek_v2": Gate("softmax", "before", renormalise=False, scaling=16.0, num_groups=8, num_top_groups=3),
    "deepseek_v3": Gate(
        "sigmoid", "before", renormalise=True, scaling=2.5, num_groups=8, num_top_groups=4, group_score="top2_sum"
    ),
    # With one group `group_score` decides nothing.
    "moonlight": Gate("sigmoid", "before", renormalise=True, scaling=2.446, group_score="top2_sum"),
    "softmax_after": Gate("softmax", "after", renormalise=False),
}
"""Named conventions with the numbers of the published models; `dataclasses.replace` fits groups to a smaller one."""


def select(
    logits_NE: Float[Tensor, "N E"], num_slots: int, gate: Gate, selection_bias_E: Float[Tensor, " E"] | None = None
) -> Int[Tensor, "N K"]:
    """The `num_slots` experts with the largest scores, as ascending ids; no gradient.

    `selection_bias_E` is added to the scores for the choice alone, never to the weights (DeepSeek-V3's load balancing).
    Raises ValueError where the number of experts does not fit the slots or the groups.
    """
    if gate.kernels is not None:
        _check_sizes(logits_NE.shape[1], num_slots, gate)
        return gate.kernels.select(logits_NE, num_slots, gate, selection_bias_E)
    with torch.no_grad():
        return _best(_choosing(logits_NE, gate), num_slots, gate, selection_bias_E)


def weigh(logits_NE: Float[Tensor, "N E"], experts_NK: Int[Tensor, "N K"], gate: Gate) -> Float[Tensor, "N K"]:
    """The weights of the given experts under these logits, in the logits' type; the gradient reaches the logits.

    softmax, after:   w_k = exp(s_k) / sum_{j in set} exp(s_j)                         (R3 Eq. 8)
    softmax, before:  w_k = exp(s_k) / sum_{j in all} exp(s_j)                         (Pr2, arXiv 2606.00395, Eq. 7)
    sigmoid:          w_k = 1 / (1 + exp(-s_k))
    renormalise divides by the sum over the set (softmax before, renormalised, is softmax after); then times scaling.
    Scores of 16-bit logits are computed in float32.
    """
    if gate.kernels is not None:
        return gate.kernels.weigh(logits_NE, experts_NK, gate)
    return _weights(_choosing(logits_NE, gate), experts_NK, gate).to(logits_NE.dtype)


def route(
    logits_NE: Float[Tensor, "N E"], num_slots: int, gate: Gate, selection_bias_E: Float[Tensor, " E"] | None = None
) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
    """Natural routing: the experts that the logits choose, and their weights; `select` and `weigh` of one softmax."""
    if gate.kernels is not None:
        experts_NK = select(logits_NE, num_slots, gate, selection_bias_E)
        return experts_NK, weigh(logits_NE, experts_NK, gate)
    scores_NE = _choosing(logits_NE, gate)
    with torch.no_grad():
        experts_NK = _best(scores_NE, num_slots, gate, selection_bias_E)
    return experts_NK, _weights(scores_NE, experts_NK, gate).to(logits_NE.dtype)


def log_scores(logits_NE: Float[Tensor, "N E"], gate: Gate) -> Float[Tensor, "N E"]:
    """log p of every expert, nats, at most 0: of the softmax over all experts, whatever its order, or of the sigmoid.

    16-bit logits are widened to float32. RSPO (arXiv 2510.23027) compares them between passes.
    """
    wide_NE = _wide(logits_NE)
    if gate.score == "softmax":
        return wide_NE.log_softmax(dim=-1)
    # As in `_scores`: a softmax over {x, 0} gives a row the same bits in every batch.
    return torch.stack([wide_NE, torch.zeros_like(wide_NE)], dim=-1).log_softmax(dim=-1)[..., 0]


def _choosing(logits_NE: Tensor, gate: Gate) -> Tensor:
    """The values that the top-k compares: scores, or logits where the softmax comes after it."""
    return _scores(logits_NE, gate) if gate.order == "before" else _wide(logits_NE)


def _best(scores_NE: Tensor, num_slots: int, gate: Gate, selection_bias_E: Tensor | None) -> Tensor:
    _check_sizes(scores_NE.shape[1], num_slots, gate)
    if selection_bias_E is not None:
        # Not in place: `route` weighs the experts by the same scores, without the bias.
        scores_NE = scores_NE + selection_bias_E.to(scores_NE)
    # After the bias: DeepSeek-V3 ranks its groups by the biased scores as well.
    if gate.num_top_groups < gate.num_groups:
        scores_NE = _only_top_groups(scores_NE, gate, _left_out(gate, selection_bias_E is not None))
    # Sorted, as the order of topk's ids depends on the scores.
    return scores_NE.topk(num_slots, dim=-1).indices.sort(dim=-1).values


def _weights(scores_NE: Tensor, experts_NK: Tensor, gate: Gate) -> Tensor:
    weights_NK = scores_NE.gather(1, experts_NK)
    if gate.order == "after":
        weights_NK = weights_NK.softmax(dim=-1)
    elif gate.renormalise:
        total_N1 = weights_NK.sum(dim=-1, keepdim=True)
        # DeepSeek-V3's own constant, part of its convention: sigmoids may all underflow, a softmax's largest may not.
        weights_NK = weights_NK / (total_N1 + 1e-20 if gate.score == "sigmoid" else total_N1)
    return weights_NK if gate.scaling == 1 else weights_NK * gate.scaling


def _wide(logits_NE: Tensor) -> Tensor:
    # Not `.float()`, in which float64 logits would lose their digits.
    return logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))


def _scores(logits_NE: Tensor, gate: Gate) -> Tensor:
    wide_NE = _wide(logits_NE)
    if gate.score == "softmax":
        return wide_NE.softmax(dim=-1)
    # sigmoid(x) as a softmax over {x, 0}: row by row, so that a token's gates do not depend on the batch it comes in;
    # torch's sigmoid computes the last lanes of a tensor by another formula than the others.
    return torch.stack([wide_NE, torch.zeros_like(wide_NE)], dim=-1).softmax(dim=-1)[..., 0]


def _check_sizes(E: int, num_slots: int, gate: Gate) -> None:
    if E % gate.num_groups != 0:
        raise ValueError(f"expected a number of experts divisible into {gate.num_groups} groups, got {E}")
    size = E // gate.num_groups
    if gate.num_groups > 1 and gate.group_score == "top2_sum" and size < 2:
        raise ValueError(f"expected at least 2 experts in each of {gate.num_groups} groups, got {E} in all")
    if not 1 <= num_slots <= size * gate.num_top_groups:
        raise ValueError(f"expected from 1 to {size * gate.num_top_groups} slots, got {num_slots}")


def _left_out(gate: Gate, is_biased: bool) -> float:
    """The top-k value of an expert outside the best groups: 0 beside plain softmax scores, as in DeepSeek-V2, else
    -inf. Where all but K' < K scores of the best groups underflow to 0, the ties are then those of its own router."""
    is_plain_softmax = gate.score == "softmax" and gate.order == "before" and not is_biased
    return 0.0 if is_plain_softmax else -math.inf


def _only_top_groups(scores_NE: Tensor, gate: Gate, left_out: float) -> Tensor:
    scores_NGS = scores_NE.unflatten(1, (gate.num_groups, -1))
    num_summed = 1 if gate.group_score == "max" else 2
    group_NG = scores_NGS.topk(num_summed, dim=-1).values.sum(dim=-1)
    top = group_NG.topk(gate.num_top_groups, dim=-1).indices
    is_out_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(1, top, False)
    return scores_NGS.masked_fill(is_out_NG.unsqueeze(-1), left_out).flatten(1)
