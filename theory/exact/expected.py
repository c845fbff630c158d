"""The expected update of an objective: the objective as it is, on all responses, with their probabilities as weights.

A response adds a u(y) to the update: u is the gradient that the objective's own code gives it at advantage +1 or -1
and denominator 1, a its expected advantage over denominator (theory/exact/groups.py). The drift is the update with each
token's advantage replaced by its prefix's mean, E_mu[a | y_<t]: the part that no choice of token earned. It is 0 where
E_mu[w_t g_t | y_<t] = 0, that is under a token, prefix or sequence weight, as long as mu samples all that pi does
(top-p does not); without a weight it is -sum_t E_mu[E_mu[a | y_<t] grad KL_t(mu || pi)]. An unweighted update less its
drift is that of the score centred under mu, g_t - E_mu[g_t | y_<t] (arXiv 2609.20807).

Advantages per token enter the update as they are and the drift by their prefix means. Facts of the whole batch
(theory/exact/settling.py) are computed at every update's pi.

Letters: theory/exact/tree.py, forest.py and groups.py. Papers: MiniRL (arXiv 2512.01374) Eq. 2, 4 and sec. 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.exact.estimator import Problem, coefficients
from theory.exact.forest import Forest
from theory.exact.groups import Classes, Group, Moments, classes, moments
from theory.exact.levels import Edges
from theory.exact.policies import TreePolicy
from theory.exact.settling import (
    at_nodes,
    baselines,
    log_mean,
    require_group,
    require_routers,
    within_budget,
)
from theory.objectives import Objective, Top, Totals


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

    # -- what does not change while the batch is trained on

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
        """log of the mean weight of all responses, nats, which normalised weights are divided by."""
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
            each_sC = one.probability * one.moments.number_sC / self.group.num_responses
            signs_sY[:, one.rows_y] = one.within_y * each_sC[:, one.classes.index_Y]
        return signs_sY

    @property
    def _baseline_P(self) -> Float[Tensor, " P"]:
        """The baseline that an infinite group subtracts from the rewards of each prompt."""
        prompt_Y = self.forest.prompt_of_response
        zero_P = torch.zeros(int(prompt_Y.max()) + 1, dtype=torch.float64)
        if self.group.baseline == "none":
            return zero_P
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
            of = classes(probability_y / total, self.reward_Y[rows_y], kept_y, length_y, by_length)
            # A class that mu never samples has the weight 0, and no share.
            reach_C = of.probability_C.clamp(min=torch.finfo(torch.float64).tiny)
            within_y = probability_y / total / reach_C[of.index_Y]
            found.append(PromptGroup(total, rows_y, within_y, of, moments(self.objective, G, of)))
        return found

    def _finite_shares_sY(self) -> Tensor:
        shares_sY = torch.zeros(2, len(self.probability_Y), dtype=torch.float64)
        for one in self.groups:
            reach_C = one.classes.probability_C.clamp(min=torch.finfo(torch.float64).tiny)
            shares_sY[:, one.rows_y] = (one.moments.first_sC / reach_C)[:, one.classes.index_Y]
        return shares_sY

    @cached_property
    def prefix_shares_BT(self) -> Float[Tensor, "B T"]:
        """E_mu[a | y_<t] of every token: the mean share of what its prefix leads to."""
        node_BT, on = self.forest.node_BT, self.forest.whole.is_response_BT
        share_BT = self.token_shares_BT
        if share_BT is None:
            share_BT = (self.shares_sY[0] - self.shares_sY[1])[:, None].expand_as(node_BT)
        # Many responses pass a node: shares and probabilities are summed there, then divided.
        total_N, reach_N = torch.zeros(2, sum(self.forest.sizes), dtype=torch.float64).unbind()
        p_BT = self.probability_Y[:, None].expand_as(node_BT)
        for values_N, weight_BT in ((total_N, p_BT * share_BT), (reach_N, p_BT)):
            values_N.index_add_(0, node_BT[on], weight_BT[on])
        mean_N = torch.where(reach_N > 0, total_N / reach_N, 0.0)
        return torch.where(on, mean_N[node_BT], 0.0)

    # -- the update

    def update(self, policy: TreePolicy, router_shift: Sequence[Float[Tensor, " _n"]] | None = None) -> Update:
        """The expected update at pi = `policy`, whose routers are `router_shift` from old's at every node, in nats.

        Raises ValueError where the objective needs that shift and there is none, or needs infinite groups.
        """
        require_group(self.objective, self.group)
        require_routers(self.objective, policy, router_shift is not None)
        shift_BT = None if router_shift is None else at_nodes(self.forest, router_shift, self.forest.whole)
        return Update(self, policy, self.forest.values_BT(policy.logp()), shift_BT)

    @cached_property
    def node_shares_sN(self) -> Float[Tensor, "2 N"]:
        """E_mu[|a| f; the prefix] of every node, where a > 0 and where a < 0: f is the aggregation's factor of a token,
        1 over its response's length, or 1.
        """
        node_BT, on = self.forest.node_BT, self.forest.whole.is_response_BT
        kept_BT = self.objective.kept(self.old_BT, self.mu_BT, on)
        # An aggregation is linear in its terms, so that its gradient is the factor of each.
        term_BT = torch.zeros_like(self.old_BT).requires_grad_()
        (factor_BT,) = torch.autograd.grad(self.objective.aggregation(term_BT, kept_BT, Totals(1, 1)), term_BT)
        total_sN = torch.zeros(2, sum(self.forest.sizes), dtype=torch.float64)
        for total_N, share_Y in zip(total_sN, self.shares_sY, strict=True):
            total_N.index_add_(0, node_BT[on], ((self.probability_Y * share_Y)[:, None] * factor_BT)[on])
        return total_sN


@dataclass(frozen=True)
class Update:
    """An expected update and the drift in it, in units of the objective per parameter."""

    batch: Batch
    policy: TreePolicy
    pi_BT: Float[Tensor, "B T"]
    router_shift_BT: Float[Tensor, "B T"] | None = None

    @cached_property
    def objective(self) -> Objective:
        """The objective with the batch's bounds at this pi, without its centering (a term of nodes, added apart)."""
        batch = self.batch
        apart = replace(batch.objective, centering="none")
        logp = (self.pi_BT, batch.old_BT, batch.mu_BT)
        on_BT = batch.forest.whole.is_response_BT
        if batch.token_shares_BT is None:
            return within_budget(apart, logp, on_BT, batch.signs_sY)
        return within_budget(apart, logp, on_BT, batch.probability_Y.expand(2, -1) / 2, batch.token_shares_BT)

    @cached_property
    def gradient(self) -> Float[Tensor, " Q"]:
        """The expected gradient of the objective."""
        return self.policy.pullback(self.edges)

    @cached_property
    def drift(self) -> Float[Tensor, " Q"]:
        """The part of the gradient that no choice of token earned, after the objective's own centering."""
        return self.policy.pullback(self.drift_edges)

    @cached_property
    def edges(self) -> Edges:
        """The weight of every edge's grad log pi in the gradient."""
        return self._plus_centering(self.on_edges(self.batch.probability_Y[:, None] * self.each_BT))

    @cached_property
    def each_BT(self) -> Float[Tensor, "B T"]:
        """The weight of every token's grad log pi in its response's update, at the response's mean share."""
        if self.batch.token_shares_BT is None:
            return self.combined(self.batch.shares_sY[:, :, None])
        return self._coefficients(slice(None), self.batch.token_shares_BT)

    @cached_property
    def drift_edges(self) -> Edges:
        """The weight of every edge's grad log pi in the drift."""
        mean_BT = self.batch.prefix_shares_BT
        if self.batch.token_shares_BT is None:
            each_BT = self.combined(torch.stack([mean_BT.clamp(min=0), (-mean_BT).clamp(min=0)]))
        else:
            each_BT = self._coefficients(slice(None), mean_BT)
        return self._plus_centering(self.on_edges(self.batch.probability_Y[:, None] * each_BT))

    def _plus_centering(self, edges: Edges) -> Edges:
        if self.batch.objective.centering == "none":
            return edges
        return [a_nV + b_nV for a_nV, b_nV in zip(edges, self.centering_edges, strict=True)]

    @cached_property
    def centering_edges(self) -> Edges:
        """The objective's centering, from its own code at every node."""
        batch, forest = self.batch, self.batch.forest
        pi_NV, old_NV, mu_NV = (torch.cat(list(x)) for x in (self.policy.logp(), batch.logp_old, batch.logp_mu))
        mu_NK, ids_NK = mu_NV.topk(min(batch.objective.num_top, forest.num_tokens), dim=1)
        edges_NV = torch.zeros_like(pi_NV)
        for sign, share_N in zip((1.0, -1.0), batch.node_shares_sN, strict=True):
            # Every node is one response of one position here, at advantage +1 or -1, weighed by its share.
            leaf_NK = pi_NV.gather(1, ids_NK).detach().requires_grad_()
            logp = (x_NK[:, None] for x_NK in (leaf_NK, old_NV.gather(1, ids_NK), mu_NK))
            top = Top(*logp, is_complete=ids_NK.shape[1] == forest.num_tokens)
            term_N1 = batch.objective.centering_of(top, (share_N > 0)[:, None], torch.full_like(share_N, sign)[:, None])
            (each_NK,) = torch.autograd.grad((share_N[:, None] * term_N1).sum(), leaf_NK)
            edges_NV = edges_NV.scatter_add(1, ids_NK, each_NK)
        return list(edges_NV.split(list(forest.sizes)))

    def combined(self, weights_s: Float[Tensor, "2 Y _T"]) -> Float[Tensor, "B T"]:
        """sum over signs of weight times coefficient, of every token."""
        has_sY = (weights_s != 0).any(2)
        if (has_sY.sum(0) == 1).all():
            # The usual case: every response has exactly one sign, and no gather or scatter is needed.
            found_BT = self._coefficients(slice(None), 1.0 - 2.0 * has_sY[1].double())
            return weights_s.sum(0) * found_BT
        # An objective may treat the signs differently, and a response may have both or neither.
        sign_b, rows_b = has_sY.nonzero(as_tuple=True)
        found_bT = self._coefficients(rows_b, 1.0 - 2.0 * sign_b.double())
        return torch.zeros_like(self.pi_BT).index_add_(0, rows_b, weights_s[sign_b, rows_b] * found_bT)

    def _coefficients(
        self, rows_b: Int[Tensor, " b"] | slice, advantages: Float[Tensor, " b"] | Float[Tensor, "b T"]
    ) -> Float[Tensor, "b T"]:
        """d J / d log pi_t of these responses at denominator 1 and these advantages, one each or one per token."""
        batch, shift_BT = self.batch, self.router_shift_BT
        pi_bT, old_bT, mu_bT = (x_BT[rows_b] for x_BT in (self.pi_BT, batch.old_BT, batch.mu_BT))
        shift_bT = None if shift_BT is None else shift_BT[rows_b]
        mask_bT = batch.forest.whole.is_response_BT[rows_b]
        return coefficients(
            self.objective, pi_bT, old_bT, mu_bT, advantages, mask_bT, shift_bT, batch.log_mean_weight
        )  # fmt: skip

    def pullback(self, weighted_BT: Float[Tensor, "B T"]) -> Float[Tensor, " Q"]:
        """sum over tokens of weight times grad log pi."""
        return self.policy.pullback(self.on_edges(weighted_BT))

    def on_edges(self, weighted_BT: Float[Tensor, "B T"]) -> Edges:
        """The weights of tokens, summed on their edges."""
        forest = self.batch.forest
        flat_E = torch.zeros(forest.num_edges, dtype=torch.float64)
        # After the end a coefficient is 0, whichever edge it is added to.
        flat_E.index_add_(0, forest.edge_BT.view(-1), weighted_BT.view(-1))
        return list(flat_E.view(-1, forest.num_tokens).split(list(forest.sizes)))


def mean_gradient(updates: Sequence[Update], centred: bool = False) -> Float[Tensor, " Q"]:
    """The mean of the updates' gradients, each less its drift where `centred`, by one pull-back per policy."""
    found = _mean(updates, [one.edges for one in updates])
    return found - _mean(updates, [one.drift_edges for one in updates]) if centred else found


def _mean(updates: Sequence[Update], edges: Sequence[Edges]) -> Float[Tensor, " Q"]:
    # A pullback is linear: updates of one policy are summed on their edges and pulled back together.
    own: dict[int, list[int]] = {}
    for k, update in enumerate(updates):
        own.setdefault(id(update.policy), []).append(k)
    pulled = []
    for same in own.values():
        depths = zip(*(edges[k] for k in same), strict=True)
        pulled.append(updates[same[0]].policy.pullback([torch.stack(each).sum(0) for each in depths]))
    return torch.stack(pulled).sum(0) / len(updates)


def expected_update(problem: Problem, objective: Objective, group: Group) -> Update:
    """The expected update of one prompt's problem, at the policy whose gradients the estimator takes."""
    tree = problem.policy.tree
    forest = Forest(tree.num_tokens, tree.max_length, tree.has_end)
    batch = Batch(forest, problem.logp_mu, problem.logp_old, problem.reward_Y, objective, group)
    return batch.update(problem.policy, problem.router_shift)


__all__ = ["Batch", "PromptGroup", "Update", "expected_update", "mean_gradient"]
