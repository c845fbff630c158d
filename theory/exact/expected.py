"""The expected update of an objective: the objective as it is, on all responses, with their probabilities as weights.

A response adds a u(y) to the update: u is the gradient that the objective's own code gives it at advantage +1 or -1
and denominator 1, a its expected advantage over denominator (theory/exact/groups.py). The drift is what the update
would be if each token's advantage were the mean one of its prefix, E_mu[a | y_<t]: what no choice of token earned. It
is 0 where E_mu[w_t g_t | y_<t] = 0, that is under a token, prefix or sequence weight, as long as mu samples all that pi
does (top-p does not); without a weight it is -sum_t E_mu[E_mu[a | y_<t] grad KL_t(mu || pi)]. An unweighted update less
its drift is that of the score centred under mu, g_t - E_mu[g_t | y_<t] (arXiv 2609.20807).

Letters: theory/exact/tree.py, forest.py and groups.py. Papers: MiniRL (arXiv 2512.01374) Eq. 2, 4 and sec. 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.exact.estimator import coefficients
from theory.exact.forest import Forest
from theory.exact.groups import Group, classes, moments
from theory.exact.levels import Edges
from theory.exact.policies import TreePolicy
from theory.objectives import Objective


@dataclass(frozen=True)
class Batch:
    """What mu samples from every context of a forest, all of it, with what it earns."""

    forest: Forest
    logp_mu: Edges
    logp_old: Edges
    reward_Y: Float[Tensor, " Y"]
    objective: Objective
    group: Group

    # -- what does not change while the batch is trained on

    @cached_property
    def probability_Y(self) -> Float[Tensor, " Y"]:
        """The probability of each context and response under mu."""
        return self.forest.log_probabilities(self.logp_mu).exp()

    @cached_property
    def old_BT(self) -> Float[Tensor, "B T"]:
        """log old of every token."""
        return self.forest.values_BT(self.logp_old)

    @cached_property
    def mu_BT(self) -> Float[Tensor, "B T"]:
        """log mu of every token. A response that mu never samples has old's: its weight is 0, not 0 times inf."""
        mu_BT = self.forest.values_BT(self.logp_mu)
        return torch.where((self.probability_Y > 0)[:, None], mu_BT, self.old_BT)

    @cached_property
    def shares_sY(self) -> Float[Tensor, "2 Y"]:
        """E[|a|] of every response where a > 0, and where a < 0: its advantage over the denominator, by sign.

        In an infinite group the denominator is that of all prompts; that of a finite one is the group's own.
        """
        paths = self.forest.whole
        kept_Y = self.objective.kept(self.old_BT, self.mu_BT, paths.is_response_BT).any(1)
        by_length = self.objective.aggregation.counts == "tokens"
        if self.group.num_responses is not None:
            return self._finite_shares_sY(self.group.num_responses, kept_Y, by_length)
        size_Y = self.forest.lengths if by_length else torch.ones_like(self.forest.lengths)
        denominator = (self.probability_Y * torch.where(kept_Y, size_Y, 0)).sum()
        centred_Y = self.reward_Y - self._baseline_P[self.forest.prompt_of_response]
        share_Y = torch.where(kept_Y, centred_Y, 0.0) / denominator.clamp(min=torch.finfo(torch.float64).tiny)
        return torch.stack([share_Y.clamp(min=0), (-share_Y).clamp(min=0)])

    @property
    def _baseline_P(self) -> Float[Tensor, " P"]:
        """What an infinite group takes off the rewards of each prompt."""
        prompt_Y = self.forest.prompt_of_response
        zero_P = torch.zeros(int(prompt_Y.max()) + 1, dtype=torch.float64)
        if self.group.baseline == "none":
            return zero_P
        total_P = zero_P.index_add(0, prompt_Y, self.probability_Y)
        return zero_P.index_add(0, prompt_Y, self.probability_Y * self.reward_Y) / total_P

    def _finite_shares_sY(self, G: int, kept_Y: Tensor, by_length: bool) -> Tensor:
        prompt_Y = self.forest.prompt_of_response
        shares_sY = torch.zeros(2, len(prompt_Y), dtype=torch.float64)
        for prompt in range(int(prompt_Y.max()) + 1):
            on = prompt_Y == prompt
            probability_Y = self.probability_Y[on] / self.probability_Y[on].sum()
            of = classes(probability_Y, self.reward_Y[on], kept_Y[on], self.forest.lengths[on], by_length)
            first_sC = moments(self.objective, G, of).first_sC
            # A class that mu never samples has the weight 0, and no share.
            each_sC = first_sC / of.probability_C.clamp(min=torch.finfo(torch.float64).tiny)
            shares_sY[:, on] = each_sC[:, of.index_Y]
        return shares_sY

    @cached_property
    def prefix_shares_BT(self) -> Float[Tensor, "B T"]:
        """E_mu[a | y_<t] of every token: the mean share of what its prefix leads to."""
        node_BT, on = self.forest.node_BT, self.forest.whole.is_response_BT
        signed_Y = self.shares_sY[0] - self.shares_sY[1]
        total_N, reach_N = torch.zeros(2, sum(self.forest.sizes), dtype=torch.float64).unbind()
        for values_N, weight_Y in ((total_N, self.probability_Y * signed_Y), (reach_N, self.probability_Y)):
            values_N.index_add_(0, node_BT[on], weight_Y[:, None].expand_as(node_BT)[on])
        mean_N = torch.where(reach_N > 0, total_N / reach_N, 0.0)
        return torch.where(on, mean_N[node_BT], 0.0)

    # -- the update

    def update(self, policy: TreePolicy) -> Update:
        """What the batch makes of pi = `policy`."""
        return Update(self, policy, self.forest.values_BT(policy.logp()))

    def coefficients(self, pi_BT: Float[Tensor, "B T"], sign: float, on_B: Bool[Tensor, " B"]) -> Float[Tensor, "B T"]:
        """d J / d log pi_t at advantage `sign` of the responses `on_B`; 0 for the others."""
        pi_bT, old_bT, mu_bT = (x_BT[on_B] for x_BT in (pi_BT, self.old_BT, self.mu_BT))
        signs_B = torch.full((int(on_B.sum()),), sign, dtype=torch.float64)
        found_BT = torch.zeros_like(pi_BT)
        mask_bT = self.forest.whole.is_response_BT[on_B]
        found_BT[on_B] = coefficients(self.objective, pi_bT, old_bT, mu_bT, signs_B, mask_bT)
        return found_BT


@dataclass(frozen=True)
class Update:
    """An expected update and the drift in it, in units of the objective a parameter."""

    batch: Batch
    policy: TreePolicy
    pi_BT: Float[Tensor, "B T"]

    @cached_property
    def gradient(self) -> Float[Tensor, " Q"]:
        """The expected gradient of the objective."""
        return self._weighted(self.batch.shares_sY[:, :, None])

    @cached_property
    def drift(self) -> Float[Tensor, " Q"]:
        """The part of it that no choice of token earned."""
        mean_BT = self.batch.prefix_shares_BT
        return self._weighted(torch.stack([mean_BT.clamp(min=0), (-mean_BT).clamp(min=0)]))

    def _weighted(self, shares_s: Float[Tensor, "2 Y _T"]) -> Float[Tensor, " Q"]:
        """The expected gradient at these shares, by sign, of responses or of their tokens."""
        total_BT = torch.zeros_like(self.pi_BT)
        for share_BT, sign in zip(shares_s, (1.0, -1.0), strict=True):
            # An objective may treat the signs in different ways, and most responses have one.
            on_B = (share_BT > 0).any(1)
            total_BT += share_BT * self.batch.coefficients(self.pi_BT, sign, on_B)
        return self._pullback(total_BT)

    def _pullback(self, coefficients_BT: Tensor) -> Float[Tensor, " Q"]:
        forest = self.batch.forest
        # After the end a coefficient is 0, whichever edge it is added to.
        weighted_BT = self.batch.probability_Y[:, None] * coefficients_BT
        flat_E = torch.zeros(forest.num_edges, dtype=torch.float64)
        flat_E.index_add_(0, forest.edge_BT.view(-1), weighted_BT.view(-1))
        return self.policy.pullback(flat_E.view(-1, forest.num_tokens).split(list(forest.sizes)))


__all__ = ["Batch", "Update"]
