"""The change of a gradient when its routes change: total variation, soft routes, k slots, and the bias of replay.

A token's gradient under each fixed route is a table of kernels, one row for every route of a tiny MoE (all E^L of
them), so that averages over routes, and the constant M, are exact.

Letters beyond theory/contracts.py: A = E^L routes of one token, in the order of `all_routes`; C components of a
gradient; Y responses, enumerated or sampled. Paper: Pr2 (arXiv 2606.00395) App. B; the soft route is its Eq. 17.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.bounds.bound import Bound
from theory.divergences import kl_of_terms, tv_p_q

MOST_ROUTES = 10_000_000


def all_routes(num_layers: int, num_experts: int) -> Int[Tensor, "A L"]:
    """Every route of one expert per layer, in lexicographic order: row a has expert z_l at layer l.

    Raises ValueError for no layer or expert, and for more than ten million routes.
    """
    if num_layers < 1 or num_experts < 1:
        raise ValueError(f"expected at least 1 layer and 1 expert, got {num_layers} and {num_experts}")
    count = num_experts**num_layers
    if count > MOST_ROUTES:
        raise ValueError(f"expected at most {MOST_ROUTES} routes, got {num_experts}^{num_layers} = {count}")
    axes = torch.meshgrid(*[torch.arange(num_experts)] * num_layers, indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], dim=1)


def route_distribution(logits_LE: Float[Tensor, "*batch L E"]) -> Float[Tensor, "*batch A"]:
    """P(route) = prod_l softmax(logits_l)[z_l] over `all_routes`: one independent expert per layer (Pr2 Eq. 17)."""
    rho_LE = logits_LE.softmax(-1)
    joint_A = rho_LE[..., 0, :]  # the first layer varies slowest
    for layer in range(1, rho_LE.shape[-2]):
        # The new layer varies fastest, as in `all_routes`.
        joint_A = (joint_A[..., :, None] * rho_LE[..., layer, None, :]).flatten(-2)
    return joint_A


def slots(logits_LE: Float[Tensor, "*batch L E"], num_slots: int) -> Float[Tensor, "*batch L_times_K E"]:
    """The layers with each repeated `num_slots` times: K independent slots of a layer are K layers (Pr2 App. B.2)."""
    if num_slots < 1:
        raise ValueError(f"expected at least 1 slot, got {num_slots}")
    return logits_LE.repeat_interleave(num_slots, dim=-2)


def pinsker(logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"]) -> Bound:
    """TV(p, q) <= sqrt(KL(p || q) / 2).

    Proof: merge the outcomes where p > q into one, and the others into another. TV stays, KL can only shrink (data
    processing). For two outcomes a, b the function KL - 2 (a - b)^2 is 0 at b = a and its derivative in b is
    (b - a) (1 / (b (1 - b)) - 4), of the sign of b - a, so it is at least 0.
    Tight as p -> q where the two merged masses are 1/2: ratio 1 - O(TV^2). Loose where an outcome is rare: ratio
    sqrt(2 eps) if p never takes one to which q gives eps; vacuous past KL = 2.
    """
    return Bound("pinsker", tv_p_q(logits_p, logits_q), (kl_of_terms(logits_p, logits_q) / 2).sqrt())


def product_tv(logits_p_LE: Float[Tensor, "*batch L E"], logits_q_LE: Float[Tensor, "*batch L E"]) -> Bound:
    """TV(prod_l p_l, prod_l q_l) <= sum_l TV(p_l, q_l), the left side by enumeration of all E^L routes.

    Proof: change one layer at a time from p to q and use the triangle inequality; changing layer l alone moves the
    product by TV(p_l, q_l), as the other factors sum to 1.
    Tight where one layer differs, and for rare events (p_l certain, q_l off by eps -> 0). Loose for L small balanced
    changes: the signs of independent layers cancel, E|S_L| / L for a walk of L steps, about sqrt(2 / (pi L)).
    """
    rhs = tv_p_q(logits_p_LE, logits_q_LE).sum(-1)
    return Bound("product_tv", _joint_tv(logits_p_LE, logits_q_LE), rhs)


def product_tv_coupling(logits_p_LE: Float[Tensor, "*batch L E"], logits_q_LE: Float[Tensor, "*batch L E"]) -> Bound:
    """TV(prod_l p_l, prod_l q_l) <= 1 - prod_l (1 - TV(p_l, q_l)): never above `product_tv`'s side, and never above 1.

    Proof: couple each layer maximally and the layers independently; all layers then agree with probability
    prod_l (1 - TV_l), and TV is at most the probability that a coupling disagrees.
    Tight where no route is one that p prefers at a layer and q at another (p_l certain, q_l off by any eps). Loose as
    `product_tv` for small balanced changes.
    """
    rhs = 1 - (1 - tv_p_q(logits_p_LE, logits_q_LE)).prod(-1)
    return Bound("product_tv_coupling", _joint_tv(logits_p_LE, logits_q_LE), rhs)


def route_gradient(
    p_A: Float[Tensor, "*batch A"], q_A: Float[Tensor, "*batch A"], kernels_AC: Float[Tensor, "*batch A C"]
) -> Bound:
    """||g(P) - g(Q)|| <= 2 M TV(P, Q), g(P) = E_P[psi(route)], M = max over all routes of ||psi||.

    Proof: g(P) - g(Q) = sum_a (P_a - Q_a) psi_a, whose norm is at most sum_a |P_a - Q_a| M = 2 M TV.
    Tight where psi = +M u on the routes that P prefers and -M u on the others. Loose where the kernels share a large
    mean, which the difference does not see: `route_gradient_diameter`.
    Raises ValueError where P or Q is not a distribution. Source: Pr2 Eq. 15 and 16.
    """
    rhs = 2 * kernels_AC.norm(dim=-1).amax(-1) * _tv(p_A, q_A)
    return Bound("route_gradient", _deviation(p_A, q_A, kernels_AC), rhs)


def route_gradient_diameter(
    p_A: Float[Tensor, "*batch A"], q_A: Float[Tensor, "*batch A"], kernels_AC: Float[Tensor, "*batch A C"]
) -> Bound:
    """||g(P) - g(Q)|| <= d TV(P, Q), d = max over pairs of routes of ||psi_a - psi_b||; d <= 2 M, so never worse.

    Proof: draw (a, b) from the maximal coupling of P and Q. g(P) - g(Q) = E[(psi_a - psi_b) 1(a != b)], and a != b
    has probability TV. (So d can replace 2 M in every bound that follows from Eq. 16.)
    Tight where Q is P with mass moved between two routes at the diameter. A shift of all kernels changes neither side.
    Memory grows as A^2.
    """
    # By matrix products `cdist` would lose the digits of kernels that are close to each other.
    gaps_AA = torch.cdist(kernels_AC, kernels_AC, compute_mode="donot_use_mm_for_euclid_dist")
    rhs = gaps_AA.flatten(-2).amax(-1) * _tv(p_A, q_A)
    return Bound("route_gradient_diameter", _deviation(p_A, q_A, kernels_AC), rhs)


def soft_route(
    logits_p_TLE: Float[Tensor, "T L E"], logits_q_TLE: Float[Tensor, "T L E"], kernels_TAC: Float[Tensor, "T A C"]
) -> Bound:
    """E_t ||g_t(P) - g_t(Q)|| <= M sqrt(2 loss), loss = sum_l E_t KL(p_tl || q_tl), M = max over tokens and routes.

    Proof: Eq. 16 and Pinsker give 2 M sqrt(KL(P_t || Q_t) / 2) per token; the layers of Eq. 17 are independent, so
    their KLs add; Jensen takes the mean over tokens under the root.
    Tight for one layer, a small step from two equally likely halves, kernels of opposite sign on them, and the same
    KL at each token. Loose with depth (`product_tv`), with unequal tokens, and with kernels that share a mean.
    It covers soft routes; theory/bounds/topk.py covers the hard top-k set.
    Source: Pr2 Prop. B.1, Eq. 18-20, with p the live router and q the predicted one.
    """
    loss = kl_of_terms(logits_p_TLE, logits_q_TLE).sum(1).mean()
    return _soft("soft_route", logits_p_TLE, logits_q_TLE, kernels_TAC, loss)


def soft_route_averaged(
    logits_p_TLE: Float[Tensor, "T L E"], logits_q_TLE: Float[Tensor, "T L E"], kernels_TAC: Float[Tensor, "T A C"]
) -> Bound:
    """E_t ||g_t(P) - g_t(Q)|| <= M sqrt(2 L loss), where the loss is reported as a mean over the L layers.

    Proof: the layer-summed loss of `soft_route` is L times the mean; the two right sides are the same number. Without
    the factor L the statement is false (four layers that all move by a little break it). Tight and loose as there.
    Source: Pr2 App. B.2, the sentence before Prop. B.1.
    """
    L = logits_p_TLE.shape[1]
    loss = kl_of_terms(logits_p_TLE, logits_q_TLE).mean()
    return _soft("soft_route_averaged", logits_p_TLE, logits_q_TLE, kernels_TAC, L * loss)


def k_slot_route(
    logits_p_TLE: Float[Tensor, "T L E"],
    logits_q_TLE: Float[Tensor, "T L E"],
    kernels_TAC: Float[Tensor, "T A C"],
    num_slots: int,
) -> Bound:
    """E_t ||g_t(P) - g_t(Q)|| <= M sqrt(2 K loss) for K independent slots per layer; A = E^(L K) routes of `slots`.

    Proof: K independent draws from p_l against q_l have KL K times that of one, so `soft_route` over L K layers has a
    loss K times as large: the factor is sqrt(K) on the Pinsker side. It is not sqrt(K) on the total variation itself,
    whose factor is K (`product_tv`), reached by rare events: TV(p^K, q^K) = 1 - (1 - eps)^K for p certain.
    Tight for K = 1 as `soft_route`; for K slots and small balanced changes the ratio falls to E|S_K| / sqrt(K) of a
    walk, about sqrt(2 / pi) = 0.80. Slots may coincide: this is not yet the top-k set.
    Source: Pr2 App. B.2, remark on k-slot relaxations, which leaves the factor open.
    """
    loss = num_slots * kl_of_terms(logits_p_TLE, logits_q_TLE).sum(1).mean()
    return _soft("k_slot_route", slots(logits_p_TLE, num_slots), slots(logits_q_TLE, num_slots), kernels_TAC, loss)


def replay_bias(
    gradients_a_YC: Float[Tensor, "Y C"],
    gradients_b_YC: Float[Tensor, "Y C"],
    probability_Y: Float[Tensor, " Y"],
    differs_Y: Bool[Tensor, " Y"],
) -> Bound:
    """||sum_y p(y) (g_y^a - g_y^b)|| <= 2 M P(a and b route y differently), M = max over y and both of ||g_y||.

    g_y^a is response y's whole gradient under one choice of routes (replayed: R2, R3, Pr2, Pr3), g_y^b under another
    (natural); `differs_Y` says where any expert of any of its rows and layers differs. p decides what g is: with p =
    mu, g_y = W_y R_y grad log pi_y.
    Proof: where the routes agree the computation is the same and the term is 0; elsewhere it is at most 2 M.
    Tight where g^a = -g^b on the responses that differ and both have the norm M; loose where a changed route changes
    the gradient only a little, which is the usual case.
    Raises ValueError where p is not a distribution, or where gradients differ by more than rounding under equal routes.
    Source: Eq. 16 of Pr2 with point masses, whose total variation is 1 where the routes differ (Pr2 sec. 3.3);
    the bias is MiniRL's (arXiv 2512.01374) sec. 3.2.
    """
    lhs, norms_YS = _replay_deviation(gradients_a_YC, gradients_b_YC, probability_Y, differs_Y)
    return Bound("replay_bias", lhs, 2 * norms_YS.amax() * torch.where(differs_Y, probability_Y, 0.0).sum())


def replay_bias_mean(
    gradients_a_YC: Float[Tensor, "Y C"],
    gradients_b_YC: Float[Tensor, "Y C"],
    probability_Y: Float[Tensor, " Y"],
    differs_Y: Bool[Tensor, " Y"],
) -> Bound:
    """||sum_y p(y) (g_y^a - g_y^b)|| <= E_p[(||g_y^a|| + ||g_y^b||) 1(a and b route y differently)]; as `replay_bias`.

    Proof: the triangle inequality, response by response; M would then replace each norm, so it is never worse.
    Tight where g^a = -g^b = c_y u on the responses that differ, for any lengths c_y: a rare response with a long
    gradient (a large importance weight) no longer sets the bound. Errors as for `replay_bias`.
    """
    lhs, norms_YS = _replay_deviation(gradients_a_YC, gradients_b_YC, probability_Y, differs_Y)
    return Bound("replay_bias_mean", lhs, torch.where(differs_Y, probability_Y * norms_YS.sum(1), 0.0).sum())


def _replay_deviation(a_YC: Tensor, b_YC: Tensor, probability_Y: Tensor, differs_Y: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the mean difference, and both gradients' norms (Y, 2); ValueError where `differs_Y` does not fit."""
    _check_distribution("probability_Y", probability_Y)
    gaps_YC, norms_YS = a_YC - b_YC, torch.stack([a_YC.norm(dim=1), b_YC.norm(dim=1)], dim=1)
    # A response of probability 0 is looked at too: equal routes that disagree are a caller's mistake everywhere.
    stray_Y = torch.where(differs_Y, 0.0, gaps_YC.norm(dim=1))
    worst = int(stray_Y.argmax())
    gap = float(stray_Y[worst])
    if gap > _rounding(gaps_YC) * float(norms_YS.amax()):
        raise ValueError(f"response {worst}: expected equal gradients under equal routes, got a gap of {gap:.3g}")
    return (probability_Y[:, None] * gaps_YC).sum(0).norm(), norms_YS


def _soft(name: str, logits_p_TLE: Tensor, logits_q_TLE: Tensor, kernels_TAC: Tensor, loss: Tensor) -> Bound:
    p_TA, q_TA = route_distribution(logits_p_TLE), route_distribution(logits_q_TLE)
    M = kernels_TAC.norm(dim=-1).amax()
    return Bound(name, _deviation(p_TA, q_TA, kernels_TAC).mean(), M * (2 * loss).sqrt())


def _deviation(p_A: Tensor, q_A: Tensor, kernels_AC: Tensor) -> Tensor:
    if p_A.shape != kernels_AC.shape[:-1]:
        raise ValueError(f"expected kernels for {tuple(p_A.shape)} routes, got {tuple(kernels_AC.shape[:-1])}")
    return ((p_A - q_A)[..., None] * kernels_AC).sum(-2).norm(dim=-1)


def _tv(p_A: Tensor, q_A: Tensor) -> Tensor:
    _check_distribution("p_A", p_A)
    _check_distribution("q_A", q_A)
    return (p_A - q_A).abs().sum(-1) / 2


def _joint_tv(logits_p_LE: Tensor, logits_q_LE: Tensor) -> Tensor:
    return (route_distribution(logits_p_LE) - route_distribution(logits_q_LE)).abs().sum(-1) / 2


def _check_distribution(name: str, p: Tensor) -> None:
    least, off = float(p.min()), float((p.sum(-1) - 1).abs().max())
    # `not <=`, so that a NaN is refused too.
    if least < 0 or not off <= _rounding(p):
        raise ValueError(f"{name}: expected probabilities that sum to 1, got a sum off by {off:.3g}, least {least:.3g}")


def _rounding(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps ** 0.5
