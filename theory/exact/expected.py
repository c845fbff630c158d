"""The expected update of an objective: the objective as it is, on all responses, with their probabilities as weights.

A response adds a u(y) to the update: u is the gradient that the objective's own code gives it at advantage +1 or -1
and denominator 1, a its expected advantage over denominator (theory/exact/groups.py). The drift is the update with each
token's advantage replaced by the mean over what its prefix leads to: the part that no choice of token earned,

    sum_t E_mu[ E_mu[|a| f; a > 0 | y_<t] c+_t g_t + E_mu[|a| f; a < 0 | y_<t] c-_t g_t ],

with c+_t and c-_t the token's coefficient at A = +1 and -1, which a bound tells apart, and f the aggregation's factor.
It is 0 where E_mu[w_t g_t | y_<t] = 0, that is under a token, prefix or sequence weight, as long as mu samples all that
pi does (top-p does not); without a weight it is -sum_t E_mu[E_mu[a f | y_<t] grad KL_t(mu || pi)]. Where a token's
coefficients depend on no other token, an update less its drift is that of the score centred under mu, c_t g_t -
E_mu[c_t g_t | y_<t] (arXiv 2609.20807).

Advantages per token enter the update as they are and the drift by their prefix means. Facts of the whole batch
(theory/exact/settling.py) are computed at every update's pi.

Letters: theory/exact/tree.py, forest.py and groups.py. Papers: MiniRL (arXiv 2512.01374) Eq. 2, 4 and sec. 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.exact.batch import Batch
from theory.exact.estimator import coefficients
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.levels import Edges
from theory.exact.policies import TreePolicy
from theory.exact.problem import Problem
from theory.exact.settling import at_nodes, require_group, require_routers, within_budget
from theory.objectives import AGGREGATIONS, Objective, Top


@dataclass(frozen=True)
class Update:
    """An expected update and the drift in it, in units of the objective per parameter."""

    batch: Batch
    policy: TreePolicy
    pi_BT: Float[Tensor, "B T"]
    router_shift_BT: Float[Tensor, "B T"] | None = None

    @staticmethod
    def at(batch: Batch, policy: TreePolicy, router_shift: Sequence[Float[Tensor, " _n"]] | None = None) -> Update:
        """The expected update at pi = `policy`, whose routers are `router_shift` from old's at every node, in nats.

        Raises ValueError where the objective needs that shift and there is none, or needs infinite groups.
        """
        require_group(batch.objective, batch.group)
        require_routers(batch.objective, policy, router_shift is not None)
        shift_BT = None if router_shift is None else at_nodes(batch.forest, router_shift, batch.forest.whole)
        return Update(batch, policy, batch.forest.values_BT(policy.logp()), shift_BT)

    @cached_property
    def objective(self) -> Objective:
        """The objective with the batch's bounds at this pi, without its centering (a term of nodes, added apart)."""
        batch = self.batch
        apart = replace(batch.objective, centering="none")
        logp = (self.pi_BT, batch.old_BT, batch.mu_BT)
        on_BT = batch.forest.whole.is_response_BT
        if batch.token_shares_BT is None:
            return within_budget(apart, logp, on_BT, batch.signs_sY)
        # Tokens carry their own signs; the two halves only have to add up to the response's probability.
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
        # Shares in the place of advantages: the objective is linear in an advantage of a given sign.
        return self._coefficients(slice(None), self.batch.token_shares_BT)

    @cached_property
    def drift_edges(self) -> Edges:
        """The weight of every edge's grad log pi in the drift."""
        shares_sBT = self.batch.prefix_shares_sBT
        if self.batch.token_shares_BT is None:
            # A sign at a time: a bound may give the two signs different coefficients, and their mean has only one.
            each_BT = self.combined(shares_sBT, self.summed)
        else:
            each_BT = self._coefficients(slice(None), shares_sBT[0], self.summed)
            each_BT = each_BT + self._coefficients(slice(None), -shares_sBT[1], self.summed)
        return self._plus_centering(self.on_edges(self.batch.probability_Y[:, None] * each_BT))

    @cached_property
    def summed(self) -> Objective:
        """The objective without its aggregation's factor, which the means over a prefix hold."""
        return replace(self.objective, aggregation=AGGREGATIONS["token_sum"])

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

    def combined(self, weights_s: Float[Tensor, "2 Y _T"], objective: Objective | None = None) -> Float[Tensor, "B T"]:
        """sum over signs of weight times coefficient, of every token; under the update's objective, or another."""
        has_sY = (weights_s != 0).any(2)
        if (has_sY.sum(0) == 1).all():
            # The usual case: every response has exactly one sign, and no gather or scatter is needed.
            found_BT = self._coefficients(slice(None), 1.0 - 2.0 * has_sY[1].double(), objective)
            return weights_s.sum(0) * found_BT
        # An objective may treat the signs differently, and a response may have both or neither.
        sign_b, rows_b = has_sY.nonzero(as_tuple=True)
        found_bT = self._coefficients(rows_b, 1.0 - 2.0 * sign_b.double(), objective)
        return torch.zeros_like(self.pi_BT).index_add_(0, rows_b, weights_s[sign_b, rows_b] * found_bT)

    def _coefficients(
        self,
        rows_b: Int[Tensor, " b"] | slice,
        advantages: Float[Tensor, " b"] | Float[Tensor, "b T"],
        objective: Objective | None = None,
    ) -> Float[Tensor, "b T"]:
        """d J / d log pi_t of these responses at denominator 1 and these advantages, one each or one per token."""
        batch, shift_BT = self.batch, self.router_shift_BT
        pi_bT, old_bT, mu_bT = (x_BT[rows_b] for x_BT in (self.pi_BT, batch.old_BT, batch.mu_BT))
        shift_bT = None if shift_BT is None else shift_BT[rows_b]
        mask_bT = batch.forest.whole.is_response_BT[rows_b]
        return coefficients(
            objective or self.objective, pi_bT, old_bT, mu_bT, advantages, mask_bT, shift_bT, batch.log_mean_weight
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
    # By identity: the updates keep their policies alive, so that no id is used twice.
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
    forest = Forest.of_one(problem.policy.tree)
    batch = Batch(forest, problem.logp_mu, problem.logp_old, problem.reward_Y, objective, group)
    return Update.at(batch, problem.policy, problem.router_shift)
