"""The bias and the variance of a policy-gradient estimator, as finite sums: no sample is drawn.

The estimator of one group is sum_i a_i u(y_i): a_i is advantage over denominator (theory/exact/groups.py), and u(y) the
gradient that the objective's own code gives a response at advantage +1 or -1, so that the audited code is what trains.

Letters: theory/exact/tree.py and groups.py. Papers: MiniRL (arXiv 2512.01374) Eq. 1, 2 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.exact.centred import response_gradients
from theory.exact.groups import Classes, Group, classes, moments
from theory.exact.levels import Edges
from theory.exact.problem import Problem, true_gradient
from theory.exact.settling import at_nodes, baselines, log_mean, require_group, require_routers, within_budget
from theory.exact.tree import Paths
from theory.objectives import Objective, Totals


@dataclass(frozen=True)
class Estimate:
    """Mean and covariance of the gradient that one group of responses gives, against the true gradient.

    `variance` is the trace of the covariance of one group's estimate times its number of responses: an estimate from n
    responses in whole groups has variance / n. Both gradients are in units of the objective per parameter.
    `num_draws` is None where all is exact, else the number of groups that sampled the advantages' distribution.
    """

    mean: Float[Tensor, " Q"]
    truth: Float[Tensor, " Q"]
    variance: float
    num_draws: int | None = None

    @property
    def bias(self) -> float:
        """||mean - truth|| / ||truth||, >= 0."""
        return float((self.mean - self.truth).norm() / self.truth.norm())

    @property
    def scale(self) -> float:
        """<mean, truth> / ||truth||^2: how long the step is along the true gradient."""
        return float(self.mean @ self.truth / self.truth.square().sum())

    @property
    def cosine(self) -> float:
        """Cosine of the angle to the true gradient, in [-1, 1]; nan where the estimate is 0 on average."""
        return float(self.mean @ self.truth / (self.mean.norm() * self.truth.norm()))

    @property
    def direction_bias(self) -> float:
        """The least bias that a rescaling leaves, sqrt(1 - cosine^2), in [0, 1]; nan where there is no cosine."""
        rest = 1 - self.cosine**2
        # Rounding may leave -1e-16. A nan is not below 0, and stays nan where `max` might drop it.
        return math.sqrt(0.0 if rest < 0 else rest)

    def error(self, num_responses: int) -> float:
        """Root of the mean squared error of an estimate from that many responses, over ||truth||."""
        total = (self.mean - self.truth).square().sum() + self.variance / num_responses
        return float(total.sqrt() / self.truth.norm())


def estimate(
    problem: Problem,
    objective: Objective,
    group: Group,
    generator: torch.Generator | None = None,
    truth: Float[Tensor, " Q"] | None = None,
) -> Estimate:
    """The exact moments of `objective`'s gradient from groups drawn from mu; `truth` is computed unless it is given.

    A budget's bounds and the baselines of tokens are those of an infinite batch; the variance that a sampled batch's
    own would add is left out. Raises ValueError for an objective with a KL penalty (its reference is not part of the
    problem), one that uses routers where there are none, and an advantage per token with finite groups.
    """
    if objective.kl_coefficient > 0:
        raise ValueError(f"{objective.name}: expected kl_coefficient 0, got {objective.kl_coefficient}")
    require_group(objective, group)
    require_routers(objective, problem.policy, problem.router_shift is not None)
    truth = true_gradient(problem) if truth is None else truth
    if group.num_responses is None:
        mean, second = _of_one_response(problem, objective, group.baseline)
        return Estimate(mean, truth, float(second - mean.square().sum()))
    policy = problem.policy
    log_mu_Y = policy.tree.log_probabilities(problem.logp_mu)
    kept_Y = _kept(problem, objective)
    by_length = objective.aggregation.counts == "tokens"
    of = classes(log_mu_Y.exp(), problem.reward_Y, kept_Y, policy.tree.lengths, by_length)
    weights = moments(objective, group.num_responses, of, generator)
    # The probability of each response with each sign of its advantage, which weighs it in a budget's mean.
    signs_sY = (weights.number_sC / group.num_responses / of.divisor_C)[:, of.index_Y] * log_mu_Y.exp()
    # Only after the moments: a budget moves the bounds, on which advantages and denominators do not depend.
    objective = _settled(problem, objective, signs_sY)
    means, squares_sC = _class_gradients(problem, objective, log_mu_Y, of)
    # Shares are magnitudes: the sign of an advantage is in u already.
    mean = torch.einsum("sc,scq->q", weights.first_sC, means)
    # Given their classes two responses of a group are independent: E<u_i, u_j> is the product of their class means.
    gram = torch.einsum("scq,rdq->scrd", means, means)
    second = (weights.square_sC * squares_sC).sum() + (weights.cross_sCsC * gram).sum()
    variance = group.num_responses * float(second - mean.square().sum())
    return Estimate(mean, truth, variance, weights.num_draws)


def _of_one_response(problem: Problem, objective: Objective, baseline: str) -> tuple[Tensor, Tensor]:
    """E_mu[u] and E_mu[||u||^2] where the advantage is R less a constant and the denominator an expectation."""
    policy = problem.policy
    tree, logp_pi = policy.tree, policy.logp()
    probability_Y = tree.log_probabilities(problem.logp_mu).exp()
    kept_Y = _kept(problem, objective)
    size_Y = tree.lengths if objective.aggregation.counts == "tokens" else torch.ones_like(tree.lengths)
    # The clamp is for a policy whose responses are all rejected: their parts are 0, as in theory/exact/batch.py.
    denominator = (probability_Y * torch.where(kept_Y, size_Y, 0)).sum().clamp(min=torch.finfo(torch.float64).tiny)
    advantages = _advantages(problem, objective, probability_Y, baseline)
    if objective.has_token_advantages:
        # Tokens carry their own signs; the two halves only have to add up to the response's probability.
        objective = _settled(problem, objective, probability_Y.expand(2, -1) / 2, advantages)
    else:
        objective = _settled(problem, objective, torch.stack([advantages > 0, advantages < 0]) * probability_Y)
    if objective.centering != "none":
        share_Y = torch.where(kept_Y, advantages, 0.0) / denominator
        # Row 0 has u at A = 1, row 1 at A = -1: the row of its sign, then times the magnitude.
        each_YQ = _centred_gradients(problem, objective)[(share_Y < 0).long(), torch.arange(len(share_Y))]
        each_YQ = share_Y.abs()[:, None] * each_YQ
        return probability_Y @ each_YQ, (probability_Y * each_YQ.square().sum(1)).sum()
    edges, second = tree.zero_edges(), torch.zeros((), dtype=torch.float64)
    for rows, paths in tree.chunks():
        coefficients_BT = _coefficients(problem, objective, logp_pi, paths, advantages[rows]) / denominator
        second += (probability_Y[rows] * policy.squared_norms(coefficients_BT, paths)).sum()
        tree.scatter(edges, probability_Y[rows, None] * coefficients_BT, paths)
    return policy.pullback(edges), second


def _advantages(
    problem: Problem, objective: Objective, probability_Y: Float[Tensor, " Y"], baseline: str
) -> Float[Tensor, " Y"] | Float[Tensor, "Y T"]:
    """The advantages of an infinite group, one per response or one per token."""
    tree, reward_Y = problem.target.tree, problem.reward_Y.double()
    if baseline == "none":
        return reward_Y[:, None].expand(-1, tree.max_length) if objective.has_token_advantages else reward_Y
    if not objective.has_token_advantages:
        return reward_Y - (probability_Y * reward_Y).sum()
    one_Y = torch.zeros_like(tree.lengths)
    return reward_Y[:, None] - baselines(tree, problem.logp_old, probability_Y, reward_Y, one_Y)


def _centred_gradients(problem: Problem, objective: Objective) -> Float[Tensor, "2 Y Q"]:
    """u(y) of every response at the advantages +1 and -1, with the objective's centering."""
    mu, old = list(problem.logp_mu), list(problem.logp_old)
    return torch.stack([response_gradients(problem.policy, mu, old, objective, sign) for sign in (1.0, -1.0)]).double()


def _class_gradients(
    problem: Problem, objective: Objective, log_mu_Y: Tensor, of: Classes
) -> tuple[Float[Tensor, "2 C Q"], Float[Tensor, "2 C"]]:
    """E_mu[u(y)] and E_mu[||u(y)||^2] within each class, for advantages +1 and -1."""
    policy, C = problem.policy, len(of)
    tree, logp_pi = policy.tree, policy.logp()
    # Sums on edges of their own per class: the cross terms below need each class's mean gradient.
    edges = [[tree.zero_edges() for _ in range(C)] for _ in range(2)]
    squares_sC = torch.zeros(2, C, dtype=torch.float64)
    share_Y = log_mu_Y.exp() / of.divisor_C[of.index_Y]
    if objective.centering != "none":
        each_sYQ = _centred_gradients(problem, objective)
        squares_sC.index_add_(1, of.index_Y, share_Y * each_sYQ.square().sum(2))
        means_sCQ = torch.zeros(2, C, each_sYQ.shape[2], dtype=torch.float64)
        return means_sCQ.index_add_(1, of.index_Y, share_Y[:, None] * each_sYQ), squares_sC
    # Weighted coefficients are summed on edges first: one pullback per class and sign, not per response.
    for rows, paths in tree.chunks():
        class_B, share_B = of.index_Y[rows], share_Y[rows]
        for s, sign in enumerate((1.0, -1.0)):
            advantages_B = torch.full((len(class_B),), sign, dtype=torch.float64)
            coefficients_BT = _coefficients(problem, objective, logp_pi, paths, advantages_B)
            squares_sC[s].index_add_(0, class_B, share_B * policy.squared_norms(coefficients_BT, paths))
            for c in range(C):
                on = class_B == c
                part = Paths(paths.nodes_BT[on], paths.tokens_BT[on], paths.is_response_BT[on])
                tree.scatter(edges[s][c], share_B[on, None] * coefficients_BT[on], part)
    means = [torch.stack([policy.pullback(edges[s][c]) for c in range(C)]) for s in range(2)]
    return torch.stack(means), squares_sC


def _coefficients(
    problem: Problem, objective: Objective, logp_pi: Edges, paths: Paths, advantages: Tensor
) -> Float[Tensor, "B T"]:
    tree = problem.target.tree
    pi_BT, old_BT, mu_BT = (tree.gather(x, paths) for x in (logp_pi, problem.logp_old, problem.logp_mu))
    # As `Batch.mu_BT`: a response that mu never samples adds 0, not 0 times an infinite weight.
    is_sampled_B = ~(paths.is_response_BT & mu_BT.isneginf()).any(1)
    mu_BT = torch.where(is_sampled_B[:, None], mu_BT, old_BT)
    shift_BT = None if problem.router_shift is None else at_nodes(tree, problem.router_shift, paths)
    mean = _log_mean(problem, objective)
    return coefficients(objective, pi_BT, old_BT, mu_BT, advantages, paths.is_response_BT, shift_BT, mean)


def _log_mean(problem: Problem, objective: Objective) -> float:
    if not objective.normalise_weights:
        return 0.0
    tree = problem.target.tree
    whole = tree.paths(0, tree.num_responses)
    old_YT, mu_YT = (tree.gather(x, whole) for x in (problem.logp_old, problem.logp_mu))
    return log_mean(objective, old_YT, mu_YT, whole.is_response_BT, tree.log_probabilities(problem.logp_mu).exp())


def _settled(
    problem: Problem, objective: Objective, signs_sY: Float[Tensor, "2 Y"], advantages_YT: Tensor | None = None
) -> Objective:
    """The objective with the bounds that all responses give its budget; itself, without a pass over them, if none."""
    if not objective.m2_budget:
        return objective
    tree, edges = problem.target.tree, (problem.policy.logp(), problem.logp_old, problem.logp_mu)
    whole = tree.paths(0, tree.num_responses)
    logp = (tree.gather(edges[0], whole), tree.gather(edges[1], whole), tree.gather(edges[2], whole))
    return within_budget(objective, logp, whole.is_response_BT, signs_sY, advantages_YT)


def coefficients(
    objective: Objective,
    pi_BT: Float[Tensor, "B T"],
    old_BT: Float[Tensor, "B T"],
    mu_BT: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    is_response_BT: Bool[Tensor, "B T"],
    router_shift_BT: Float[Tensor, "B T"] | None = None,
    log_mean_weight: float = 0.0,
) -> Float[Tensor, "B T"]:
    """d J / d log pi_t of each response alone, at denominator 1, from the objective's own code.

    Advantages are one per response, or one per token for an objective that has them. `log_mean_weight` is that of the
    batch, for normalised weights.
    """
    # Responses share no term at denominator 1, so one backward pass gives the gradient of each.
    leaf_BT = pi_BT.detach().requires_grad_()
    is_of_tokens = advantages.ndim == 2
    output = objective(
        leaf_BT,
        old_BT,
        mu_BT,
        advantages[:, 0] if is_of_tokens else advantages,
        is_response_BT,
        router_shift_BT=router_shift_BT,
        advantages_BT=advantages if is_of_tokens else None,
        totals=Totals(1, 1, log_mean_weight),
        has_metrics=False,
    )
    return torch.autograd.grad(output.objective, leaf_BT)[0]


def _kept(problem: Problem, objective: Objective) -> Bool[Tensor, " Y"]:
    """Whether the objective keeps any token of each response."""
    tree, kept = problem.target.tree, []
    for _, paths in tree.chunks():
        old_BT, mu_BT = tree.gather(problem.logp_old, paths), tree.gather(problem.logp_mu, paths)
        kept.append(objective.kept(old_BT, mu_BT, paths.is_response_BT).any(1))
    return torch.cat(kept)
