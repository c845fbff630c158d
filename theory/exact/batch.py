"""All responses of mu, their probabilities and their advantages: the part of an update that does not depend on pi.

Letters: theory/exact/tree.py, forest.py and groups.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.exact.forest import Forest
from theory.exact.groups import Classes, Group, Moments, classes, moments
from theory.exact.levels import Edges
from theory.exact.settling import baselines, log_mean
from theory.objectives import Objective, Totals


@dataclass(frozen=True)
class PromptGroup:
    """One prompt's part in a batch of finite groups: its probability, its responses, and their groups' moments.

    `within_y` is the probability of a response of its class.
    """

    probability: float
    rows_y: Int[Tensor, " y"]
    within_y: Float[Tensor, " y"]
    classes: Classes
    moments: Moments


@dataclass(frozen=True)
class Batch:
    """All responses of mu from every context of a forest, with their rewards."""

    forest: Forest
    logp_mu: Edges
    logp_old: Edges
    reward_Y: Float[Tensor, " Y"]
    objective: Objective
    group: Group

    @cached_property
    def probability_Y(self) -> Float[Tensor, " Y"]:
        """The probability of each context and response under mu."""
        return self.forest.log_probability_of(self._sampled_BT).exp()

    @cached_property
    def _sampled_BT(self) -> Float[Tensor, "B T"]:
        return self.forest.values_BT(self.logp_mu)

    @cached_property
    def old_BT(self) -> Float[Tensor, "B T"]:
        """log old of every token."""
        return self.forest.values_BT(self.logp_old)

    @cached_property
    def mu_BT(self) -> Float[Tensor, "B T"]:
        """log mu of every token. A response that mu never samples gets old's, so that it adds 0 and not 0 times inf."""
        return torch.where((self.probability_Y > 0)[:, None], self._sampled_BT, self.old_BT)

    @cached_property
    def log_mean_weight(self) -> float:
        """log of the mean weight of kept responses, nats, which normalised weights are divided by."""
        on_BT = self.forest.whole.is_response_BT
        return log_mean(self.objective, self.old_BT, self.mu_BT, on_BT, self.probability_Y)

    @cached_property
    def kept_Y(self) -> Bool[Tensor, " Y"]:
        """Whether the objective keeps any token of each response."""
        return self.objective.kept(self.old_BT, self.mu_BT, self.forest.whole.is_response_BT).any(1)

    @cached_property
    def shares_sY(self) -> Float[Tensor, "2 Y"]:
        """E[|a|] of every response where a > 0, and where a < 0: its advantage over the denominator, by sign.

        In an infinite group the denominator is that of all prompts; that of a finite one is the group's own.
        """
        if self.group.num_responses is not None:
            return self._finite_shares_sY()
        centred_Y = self.reward_Y - self._baseline_P[self.forest.prompt_of_response]
        share_Y = torch.where(self.kept_Y, centred_Y, 0.0) / self._denominator
        return torch.stack([share_Y.clamp(min=0), (-share_Y).clamp(min=0)])

    @property
    def _denominator(self) -> Float[Tensor, ""]:
        """The aggregation's denominator in an infinite group, per response."""
        by_length = self.objective.aggregation.counts == "tokens"
        size_Y = self.forest.lengths if by_length else torch.ones_like(self.forest.lengths)
        total = (self.probability_Y * torch.where(self.kept_Y, size_Y, 0)).sum()
        # Where every response is rejected all shares are 0, over whatever this is.
        return total.clamp(min=torch.finfo(torch.float64).tiny)

    @cached_property
    def token_shares_BT(self) -> Float[Tensor, "B T"] | None:
        """A / denominator of every token, of an objective that has advantages per token in an infinite group."""
        if not self.objective.has_token_advantages:
            return None
        prompt_Y, baseline_PT = self.forest.prompt_of_response, torch.zeros(1, dtype=torch.float64)
        if self.group.baseline == "mean":
            found_PT = baselines(self.forest, self.logp_old, self.probability_Y, self.reward_Y, prompt_Y)
            baseline_PT = found_PT[prompt_Y]
        on_BT = self.forest.whole.is_response_BT & self.kept_Y[:, None]
        return torch.where(on_BT, self.reward_Y[:, None] - baseline_PT, 0.0) / self._denominator

    @cached_property
    def signs_sY(self) -> Float[Tensor, "2 Y"]:
        """The probability of each context and response under mu with A > 0, and with A < 0."""
        if self.group.num_responses is None:
            return self.probability_Y * (self.shares_sY > 0)
        signs_sY = torch.zeros(2, len(self.probability_Y), dtype=torch.float64)
        for one in self.groups:
            # `number_sC` is a count in a group of G; a single response has the G-th part of it.
            each_sC = one.probability * one.moments.number_sC / self.group.num_responses
            signs_sY[:, one.rows_y] = one.within_y * each_sC[:, one.classes.index_Y]
        return signs_sY

    @property
    def _baseline_P(self) -> Float[Tensor, " P"]:
        """The baseline that an infinite group subtracts from the rewards of each prompt."""
        prompt_Y = self.forest.prompt_of_response
        # A forest numbers its prompts without a gap, so that the largest number tells how many there are.
        zero_P = torch.zeros(int(prompt_Y.max()) + 1, dtype=torch.float64)
        if self.group.baseline == "none":
            return zero_P
        # Over rejected responses too: a run takes its advantages before the objective rejects any (theory/loop.py).
        total_P = zero_P.index_add(0, prompt_Y, self.probability_Y)
        return zero_P.index_add(0, prompt_Y, self.probability_Y * self.reward_Y) / total_P

    @cached_property
    def groups(self) -> list[PromptGroup]:
        """The moments of each prompt's responses under a finite group, by prompt; none where the group is infinite."""
        G, prompt_Y = self.group.num_responses, self.forest.prompt_of_response
        if G is None:
            return []
        by_length = self.objective.aggregation.counts == "tokens"
        found = []
        for prompt in range(int(prompt_Y.max()) + 1):
            rows_y = (prompt_Y == prompt).nonzero()[:, 0]
            probability_y = self.probability_Y[rows_y]
            total = float(probability_y.sum())
            kept_y, length_y = self.kept_Y[rows_y], self.forest.lengths[rows_y]
            # Given the prompt, as all members of a group share it; `total` weighs the prompt.
            of = classes(probability_y / total, self.reward_Y[rows_y], kept_y, length_y, by_length)
            within_y = probability_y / total / of.divisor_C[of.index_Y]
            found.append(PromptGroup(total, rows_y, within_y, of, moments(self.objective, G, of)))
        return found

    def _finite_shares_sY(self) -> Tensor:
        shares_sY = torch.zeros(2, len(self.probability_Y), dtype=torch.float64)
        for one in self.groups:
            # No division by G: `first_sC` sums over the members, and the denominator in a is the group's.
            shares_sY[:, one.rows_y] = (one.moments.first_sC / one.classes.divisor_C)[:, one.classes.index_Y]
        return shares_sY

    @cached_property
    def prefix_shares_sBT(self) -> Float[Tensor, "2 B T"]:
        """E_mu[|a| f | y_<t] of every token, where a > 0 and where a < 0: the means over all that follow its prefix."""
        node_BT, on = self.forest.node_BT, self.forest.whole.is_response_BT
        # Many responses pass a node: their probabilities are summed there, as their shares are.
        reach_N = torch.zeros(sum(self.forest.sizes), dtype=torch.float64)
        reach_N.index_add_(0, node_BT[on], self.probability_Y[:, None].expand_as(node_BT)[on])
        mean_sN = torch.where(reach_N > 0, self.node_shares_sN / reach_N, 0.0)
        return torch.where(on, mean_sN[:, node_BT], 0.0)

    @cached_property
    def node_shares_sN(self) -> Float[Tensor, "2 N"]:
        """E_mu[|a| f; the prefix] of every node, where a > 0 and where a < 0; f is `factor_BT`."""
        node_BT, on = self.forest.node_BT, self.forest.whole.is_response_BT
        share_sBT = self.shares_sY[:, :, None]
        if (own_BT := self.token_shares_BT) is not None:
            share_sBT = torch.stack([own_BT.clamp(min=0), (-own_BT).clamp(min=0)])
        total_sN = torch.zeros(2, sum(self.forest.sizes), dtype=torch.float64)
        # `total_N` is a view of its row of `total_sN`.
        for total_N, share_BT in zip(total_sN, share_sBT, strict=True):
            total_N.index_add_(0, node_BT[on], (self.probability_Y[:, None] * share_BT * self.factor_BT)[on])
        return total_sN

    @cached_property
    def factor_BT(self) -> Float[Tensor, "B T"]:
        """f, the aggregation's factor of a token: 1 over its response's length, or 1; 0 where it is rejected."""
        kept_BT = self.objective.kept(self.old_BT, self.mu_BT, self.forest.whole.is_response_BT)
        # An aggregation is linear in its terms, so that its gradient is the factor of each.
        term_BT = torch.zeros_like(self.old_BT).requires_grad_()
        return torch.autograd.grad(self.objective.aggregation(term_BT, kept_BT, Totals(1, 1)), term_BT)[0]
