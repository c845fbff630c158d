"""Facts of the whole batch, fixed before its gradient: baselines of tokens, a budget's bounds, the mean weight.

The batch is infinite, so that each is an expectation over responses (theory/preparation.py has those of a sampled
batch). The variance that a sampled batch's own bounds and baselines would add is left out.

Letters: theory/exact/tree.py. Papers: M2PO (arXiv 2510.01161), optimal token baseline (2602.07078), RSPO (2510.23027).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.exact.groups import Group
from theory.exact.policies import TreePolicy
from theory.exact.tree import Paths, PrefixTree
from theory.objectives import Objective
from theory.objectives.weighing import log_mean_weight


def require_routers(objective: Objective, policy: TreePolicy, has_router_shift: bool) -> None:
    """Raises ValueError for an objective that uses routers where the policy has none."""
    if objective.uses_router_shift and not has_router_shift:
        raise ValueError(
            f"{objective.name}: router_shift_floor {objective.router_shift_floor:g}: expected a policy with routers, "
            f"whose shift scales the ratios (the sandbox's MoE has them), got {type(policy).__name__}"
        )


def require_group(objective: Objective, group: Group) -> None:
    """Raises ValueError for an advantage per token with finite groups, which are not enumerated for it."""
    if objective.has_token_advantages and group.num_responses is not None:
        raise ValueError(
            f"{objective.name}: advantage {objective.advantage}: expected an infinite group (a token's baseline "
            f"depends on the prefixes of all other responses), got one of {group.num_responses}"
        )


def baselines(
    tree: PrefixTree,
    logp_old: Sequence[Float[Tensor, "_n V"]],
    probability_Y: Float[Tensor, " Y"],
    reward_Y: Float[Tensor, " Y"],
    prompt_Y: Int[Tensor, " Y"],
) -> Float[Tensor, "P T"]:
    """B_t of every prompt, in units of reward: the optimal token baseline of an infinite group.

        B_t = E[W_t R] / E[W_t],    W_t = sum_(s<=t) (1 - 2 old(y_s) + sum_v old(v)^2),

    over responses that have a t-th token; their mean reward where all W_t are 0, and 0 where no response has one.
    Source: 2602.07078, as in `theory.advantages.optimal_token`, whose limit it is as the group grows.
    """
    old = [logp_nV.exp() for logp_nV in logp_old]
    # Rounding may put an energy, a sum of squares, just below 0.
    energy = [(1 - 2 * p_nV + p_nV.square().sum(1, keepdim=True)).clamp(min=0) for p_nV in old]
    sums_4PT = torch.zeros(4, int(prompt_Y.max()) + 1, tree.max_length, dtype=torch.float64)
    for rows, paths in tree.chunks():
        W_BT, p_B1, R_B1 = tree.gather(energy, paths).cumsum(1), probability_Y[rows, None], reward_Y[rows, None]
        ones_BT = torch.ones_like(W_BT)
        # Each `sum_PT` is a view of `sums_4PT`, which is filled in place.
        for sum_PT, x_BT in zip(sums_4PT, (W_BT * R_B1, W_BT, ones_BT * R_B1, ones_BT), strict=True):
            sum_PT.index_add_(0, prompt_Y[rows], torch.where(paths.is_response_BT, p_B1 * x_BT, 0.0))
    weighted_PT, weight_PT, total_PT, reach_PT = sums_4PT
    mean_PT = torch.where(reach_PT > 0, total_PT / reach_PT, 0.0)
    return torch.where(weight_PT > 0, weighted_PT / weight_PT, mean_PT)


def within_budget(
    objective: Objective,
    logp: tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]],
    is_response_BT: Bool[Tensor, "B T"],
    weights_sB: Float[Tensor, "2 B"],
    advantages_BT: Float[Tensor, "B T"] | None = None,
) -> Objective:
    """The objective with the bounds that its budget gives on all responses; itself without a budget.

    `logp` are pi, old and mu of every token. `weights_sB` are the probabilities of each response with A > 0 and with
    A < 0; where tokens have advantages of their own, `advantages_BT`, a response's probability is the sum of the two.
    """
    if not objective.m2_budget:
        return objective
    if advantages_BT is not None:
        return objective.within_budget(*logp, advantages_BT, is_response_BT, weights_sB.sum(0)[:, None])
    # Every response twice, once with each sign of its advantage, weighed by that sign's probability.
    pi_BT, old_BT, mu_BT, on_BT = (torch.cat([x_BT, x_BT]) for x_BT in (*logp, is_response_BT))
    # In the order of the cat above: all responses at A = 1, then all at A = -1.
    signs_B1 = torch.ones_like(weights_sB) * torch.tensor([1.0, -1.0]).to(weights_sB)[:, None]
    return objective.within_budget(pi_BT, old_BT, mu_BT, signs_B1.view(-1, 1), on_BT, weights_sB.reshape(-1, 1))


def log_mean(
    objective: Objective,
    logp_old_BT: Float[Tensor, "B T"],
    logp_mu_BT: Float[Tensor, "B T"],
    is_response_BT: Bool[Tensor, "B T"],
    probability_B: Float[Tensor, " B"],
) -> float:
    """log of the mean weight of kept responses, nats, that normalised weights are divided by; 0 where none are."""
    if not objective.normalise_weights:
        return 0.0
    # A response that mu never samples has no count, and would only bring an infinite ratio.
    sampled_BT = torch.where((probability_B > 0)[:, None], logp_mu_BT, logp_old_BT)
    kept_BT = objective.kept(logp_old_BT, sampled_BT, is_response_BT)
    log_rho_BT = torch.where(kept_BT, logp_old_BT - sampled_BT, 0.0)
    return log_mean_weight(objective.correction, log_rho_BT, kept_BT, probability_B)


def at_nodes(tree: PrefixTree, values: Sequence[Float[Tensor, " _n"]], paths: Paths) -> Float[Tensor, "B T"]:
    """The value of each node on each path; 0 after the end."""
    return tree.gather([value_n[:, None].expand(-1, tree.num_tokens) for value_n in values], paths)
