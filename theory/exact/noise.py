"""The noise of a sampled update: its exact variance, and Gaussian draws of its exact covariance.

A batch of B responses is B / G independent groups of G, each of a prompt (and a sampler of the engine) drawn at random;
an infinite group gives each response alone, with the batch's baseline and denominator at their expectations. A group's
estimate is sum over responses and signs of X(s, y) u(s, y), linear in random weights X. For a Gaussian W with the
covariance of X, sum W u therefore has the covariance of the estimate: one pullback, and no matrix over the parameters.

Letters: theory/exact/tree.py, groups.py and expected.py; K samplers of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from theory.exact.batch import PromptGroup
from theory.exact.expected import Update


def variance(updates: Sequence[Update]) -> float:
    """The trace of the covariance of one group's estimate, times its number of responses; B responses leave it / B.

    On one prompt and sampler it is `Estimate.variance` (theory/exact/estimator.py). In squared units of the objective
    per parameter; the score is not centred. Raises ValueError for an objective that centres it itself.
    """
    if updates[0].batch.objective.centering != "none":
        raise ValueError(f"variance: expected an objective without centering, got {updates[0].batch.objective.name}'s")
    G = updates[0].batch.group.num_responses
    each = [_second_of_responses(one) if G is None else _second_of_groups(one) for one in updates]
    mean = torch.stack([one.gradient for one in updates]).mean(0)
    return (G or 1) * (sum(each) / len(each) - float(mean.square().sum()))


def draw(updates: Sequence[Update], centred: bool, generator: torch.Generator) -> Float[Tensor, " Q"]:
    """One Gaussian draw with the mean 0 and the covariance of one group's estimate times its number of responses.

    Divided by sqrt(B) it is the noise of B responses. `centred` uses the score less its mean under mu, for objectives
    that treat both signs of an advantage alike (trust region none).
    """
    G = updates[0].batch.group.num_responses
    found = _of_responses(updates, centred, generator) if G is None else _of_groups(updates, centred, generator)
    return (G or 1) ** 0.5 * torch.stack(found).sum(0)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# ---- infinite groups: one response per estimate ----------------------------------------------------------------------


def _second_of_responses(update: Update) -> float:
    batch = update.batch
    norms_Y = update.policy.squared_norms(update.each_BT, batch.forest.whole)
    return float((batch.probability_Y * norms_Y).sum())


def _of_responses(updates: Sequence[Update], centred: bool, generator: torch.Generator) -> list[Float[Tensor, " Q"]]:
    # A batch draws (sampler, response) jointly: one multinomial over both.
    probability_KY = torch.stack([one.batch.probability_Y for one in updates]) / len(updates)
    found = []
    for one, indicator_Y in zip(updates, _multinomial(probability_KY, generator), strict=True):
        weighted_BT = indicator_Y[:, None] * one.each_BT
        if centred:
            weighted_BT = weighted_BT - _centre(one, (one.batch.shares_sY[0] - one.batch.shares_sY[1]) * indicator_Y)
        found.append(one.pullback(weighted_BT))
    return found


def _multinomial(probability: Float[Tensor, "*n"], generator: torch.Generator) -> Float[Tensor, "*n"]:
    """A Gaussian draw with the covariance diag(p) - p p^T of the indicators of one draw from p."""
    root = probability.sqrt()
    e = _normal(probability.shape, generator)
    # Covariance diag(p) - 2 p p^T + p p^T sum(p), where the p sum to 1.
    return root * e - probability * (root * e).sum()


# ---- finite groups: G responses of one prompt per estimate -----------------------------------------------------------


def _second_of_groups(update: Update) -> float:
    """E[||estimate||^2] over prompts and groups."""
    batch, ones_sY1 = update.batch, torch.ones(2, len(update.pi_BT), 1, dtype=torch.float64)
    squares_sY = torch.zeros(2, len(update.pi_BT), dtype=torch.float64)
    for s in range(2):
        # Weight 1 on one sign and 0 on the other: the squared norm of u at that sign.
        only = ones_sY1 * torch.tensor([1.0 - s, s])[:, None, None]
        squares_sY[s] = update.policy.squared_norms(update.combined(only), batch.forest.whole)
    total = 0.0
    for one in batch.groups:
        each_sy = one.moments.square_sC[:, one.classes.index_Y] * one.within_y
        means_sCQ = _class_means(update, one)
        # Given their classes two responses of a group are independent, so class means give E<u_i, u_j>.
        gram = torch.einsum("scq,rdq->scrd", means_sCQ, means_sCQ)
        within = float((each_sy * squares_sY[:, one.rows_y]).sum())
        total += one.probability * (within + float((one.moments.cross_sCsC * gram).sum()))
    return total


def _class_means(update: Update, of: PromptGroup) -> Float[Tensor, "2 C Q"]:
    """E_mu[u] of each class and sign."""
    means = []
    for s in range(2):
        for c in range(len(of.classes)):
            weights_sY = torch.zeros(2, len(update.pi_BT), dtype=torch.float64)
            weights_sY[s, of.rows_y] = torch.where(of.classes.index_Y == c, of.within_y, 0.0)
            means.append(update.pullback(update.combined(weights_sY[:, :, None])))
    return torch.stack(means).view(2, len(of.classes), -1)


def _of_groups(updates: Sequence[Update], centred: bool, generator: torch.Generator) -> list[Float[Tensor, " Q"]]:
    found = []
    for one, weights_sY in zip(updates, _weights_of_groups(updates, generator), strict=True):
        weighted_BT = one.combined(weights_sY[:, :, None])
        if centred:
            weighted_BT = weighted_BT - _centre(one, weights_sY[0] - weights_sY[1])
        found.append(one.pullback(weighted_BT))
    return found


def _weights_of_groups(updates: Sequence[Update], generator: torch.Generator) -> list[Float[Tensor, "2 Y"]]:
    """Gaussian weights of all responses, by the law of total covariance: within a prompt's groups, and between the
    means of prompts and samplers.
    """
    K = len(updates)
    chances = torch.tensor([[one.probability / K for one in update.batch.groups] for update in updates])
    between_KP = _multinomial(chances.double(), generator)
    found = []
    for update, between_P in zip(updates, between_KP, strict=True):
        weights_sY = torch.zeros(2, len(update.pi_BT), dtype=torch.float64)
        for one, between in zip(update.batch.groups, between_P, strict=True):
            # The covariance within is the mean of the parts' own: each draw enters by the root of its chance.
            own_sy = (one.probability / K) ** 0.5 * _within(one, generator)
            # Within a class all members have one advantage: they share its mean by their probabilities.
            mean_sy = one.moments.first_sC[:, one.classes.index_Y] * one.within_y
            weights_sY[:, one.rows_y] = own_sy + between * mean_sy
        found.append(weights_sY)
    return found


def _within(of: PromptGroup, generator: torch.Generator) -> Float[Tensor, "2 y"]:
    """Gaussian weights of one prompt's responses: which members of a class are drawn, and how much each class gets."""
    index_y, first_sC, square_sC = of.classes.index_Y, of.moments.first_sC, of.moments.square_sC
    C = len(of.classes)
    # Independent over signs: an advantage has one, and which member of a class gets it does not depend on it.
    e_sy = _normal((2, len(index_y)), generator)
    rooted_sy = of.within_y.sqrt() * e_sy
    sums_sC = torch.zeros(2, C, dtype=torch.float64).index_add_(1, index_y, rooted_sy)
    # A multinomial's covariance within each class: these weights sum to 0 over the class.
    which_sy = square_sC.sqrt()[:, index_y] * (rooted_sy - of.within_y * sums_sC[:, index_y])
    # E[S S^T] of the sums S of |a| by class and sign: each response with itself, and pairs of two.
    covariance = square_sC.flatten().diag() + of.moments.cross_sCsC.reshape(2 * C, 2 * C)
    values, vectors = torch.linalg.eigh(covariance - first_sC.flatten().outer(first_sC.flatten()))
    # Rounding leaves eigenvalues of -1e-17: the covariance is singular wherever a class has one sign.
    much = vectors @ (values.clamp(min=0).sqrt() * _normal((2 * C,), generator))
    return which_sy + of.within_y * much.view(2, C)[:, index_y]


# ---- centred ---------------------------------------------------------------------------------------------------------


def _centre(update: Update, weight_Y: Float[Tensor, " Y"]) -> Float[Tensor, "B T"]:
    """The token weights of sum_y W(y) sum_t E_mu[w_t g_t | y_<t]: each prefix spreads its weight over mu."""
    batch, forest = update.batch, update.batch.forest
    on, node_BT = forest.whole.is_response_BT, forest.node_BT
    passed_N, reach_N = torch.zeros(2, sum(forest.sizes), dtype=torch.float64).unbind()
    # The aggregation's factor is in the weight, which the prefix spreads, and not in the coefficient.
    for total_N, each_BT in ((passed_N, weight_Y[:, None] * batch.factor_BT), (reach_N, batch.probability_Y[:, None])):
        total_N.index_add_(0, node_BT[on], each_BT.expand_as(node_BT)[on])
    mean_N = torch.where(reach_N > 0, passed_N / reach_N, 0.0)
    # The coefficient at A = 1 serves both signs: `draw` centres only objectives that treat them alike.
    ones_sY1 = torch.stack([torch.ones_like(weight_Y), torch.zeros_like(weight_Y)])[:, :, None]
    return torch.where(
        on, batch.probability_Y[:, None] * mean_N[node_BT] * update.combined(ones_sY1, update.summed), 0.0
    )
