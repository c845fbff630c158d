"""Agreement of two routers on their experts: regret and margins of the top-k set, in total variation and in KL.

p is the router whose choice counts (the live one), q the one that chose (cached or predicted); KL is KL(p || q), the
direction of the predictor's loss. Gates are softmaxes over all experts; ties are broken arbitrarily, as by `topk`.
Paper: Pr2 (arXiv 2606.00395) Lemma B.2, whose constants are compared here with the best possible ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.bounds.bound import Bound
from theory.divergences import kl_of_terms, tv_p_q


def in_top(logits: Float[Tensor, "*batch E"], num_slots: int) -> Bool[Tensor, "*batch E"]:
    """Whether each expert is among the `num_slots` largest. Raises ValueError unless 1 <= num_slots <= E."""
    E = logits.shape[-1]
    if not 1 <= num_slots <= E:
        raise ValueError(f"expected from 1 to {E} slots (experts), got {num_slots}")
    # By logits: a softmax may round two of them to one probability, a tie that is not there.
    chosen = logits.topk(num_slots, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)


def margin(logits: Float[Tensor, "*batch E"], num_slots: int) -> Float[Tensor, "*batch"]:
    """Delta_k = p_(k) - p_(k+1), the gap between the last expert chosen and the next, in [0, 1]; inf if K = E."""
    last, other = _boundary(logits, num_slots)
    return last - other


def swap_cost(logits: Float[Tensor, "*batch E"], num_slots: int) -> Float[Tensor, "*batch"]:
    """The least KL(p || q) in nats of any q with another top-k set than p: 0 on a tie, inf if K = E.

    With a = p_(k), b = p_(k+1), s = a + b: a log(2 a / s) + b log(2 b / s), reached by the q that gives both s / 2 and
    the others what p gives them. It is at least margin^2 / (2 s), 1/s times the margin^2 / 2 of Pr2 Lemma B.2.
    """
    return _exchange_cost(*_boundary(logits, num_slots))


def topk_regret(logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int) -> Bound:
    """p(S_p) - p(S_q) <= sqrt(2 KL(p || q)), S the top-k set of each: the mass of p lost by choosing by q.

    Proof: q(S_q) >= q(S_p), so p(S_p) - p(S_q) <= (p - q)(S_p) + (q - p)(S_q) <= 2 TV; then Pinsker.
    Tight as KL -> 0 between two experts at (1 +- d) / 2 and a tie: ratio 1 - d^2 / 12, so no smaller constant holds
    for all p. Loose where the exchanged experts hold little mass (`topk_regret_exchanged`); vacuous past KL = 1/2.
    Source: Pr2 Lemma B.2.
    """
    return Bound("topk_regret", _regret(logits_p, logits_q, num_slots)[0], (2 * kl_of_terms(logits_p, logits_q)).sqrt())


def topk_regret_exchanged(
    logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int
) -> Bound:
    """p(S_p) - p(S_q) <= sqrt(2 s KL(p || q)), s <= 1 the mass under p of the experts that only one of them chose.

    Proof: let A be the experts that only p chose, B those that only q chose. q(B) >= q(A). Merging experts into A, B
    and the rest only shrinks KL, and given q(B) >= q(A) it is least at q(A) = q(B) = s / 2: `_exchange_cost` of p(A)
    and p(B), which is s phi(r / s) for the regret r and phi(x) = ((1+x) log(1+x) + (1-x) log(1-x)) / 2 >= x^2 / 2.
    Tight as r / s -> 0 for any s: it is Lemma B.2 with the constant 2 s in place of 2. Where s = 1 the two are equal.
    """
    regret, mass = _regret(logits_p, logits_q, num_slots)
    # Where nothing is exchanged nothing is lost, and 0 * inf would be NaN.
    rhs = torch.where(mass > 0, (2 * mass * kl_of_terms(logits_p, logits_q)).sqrt(), 0.0)
    return Bound("topk_regret_exchanged", regret, rhs)


def topk_margin_max_norm(
    logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int
) -> Bound:
    """Where the top-k sets differ, Delta_k(p) / 2 <= max_j |p_j - q_j|; the left side is 0 where they are the same.

    So max |p - q| < Delta_k / 2 certifies equal routes. Proof: some i in S_p and j outside it have q_i <= q_j, while
    p_i - p_j >= Delta_k; so |p_i - q_i| + |p_j - q_j| >= Delta_k. Tight for a q that moves Delta_k / 2 from i to j.
    Source: Pr2 Lemma B.2, proof of the margin statement.
    """
    lhs = _if_routes_differ(margin(logits_p, num_slots) / 2, logits_p, logits_q, num_slots)
    return Bound("topk_margin_max_norm", lhs, (logits_p.softmax(-1) - logits_q.softmax(-1)).abs().amax(-1))


def topk_margin_tv(logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int) -> Bound:
    """Where the top-k sets differ, Delta_k(p) / 2 <= TV(p, q); the left side is 0 where they are the same.

    Proof: `topk_margin_max_norm`, and |p_j - q_j| <= TV for a single expert j. Tight in the same case: what i loses
    and j wins is the whole total variation. Source: Pr2 Lemma B.2, proof of the margin statement.
    """
    lhs = _if_routes_differ(margin(logits_p, num_slots) / 2, logits_p, logits_q, num_slots)
    return Bound("topk_margin_tv", lhs, tv_p_q(logits_p, logits_q))


def topk_margin_kl(logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int) -> Bound:
    """Where the top-k sets differ, Delta_k(p)^2 / 2 <= KL(p || q); the left side is 0 where they are the same.

    So a loss below Delta_k^2 / 2 certifies equal routes. Proof: `topk_margin_tv` and Pinsker. Tight only where the
    two experts at the boundary hold all the mass (s = 1 in `swap_cost`); among many experts loose by 1 / s in KL.
    Source: Pr2 Lemma B.2.
    """
    lhs = _if_routes_differ(margin(logits_p, num_slots).square() / 2, logits_p, logits_q, num_slots)
    return Bound("topk_margin_kl", lhs, kl_of_terms(logits_p, logits_q))


def topk_margin_exact(
    logits_p: Float[Tensor, "*batch E"], logits_q: Float[Tensor, "*batch E"], num_slots: int
) -> Bound:
    """Where the top-k sets differ, swap_cost(p) <= KL(p || q), nats; the left side is 0 where they are the same.

    The best possible certificate from a KL. Proof: some i in S_p, j outside have q_i <= q_j, so KL is at least the
    `_exchange_cost` of (p_i, p_j) (see `topk_regret_exchanged`); it grows in p_i and falls in p_j, so that it is least
    at the boundary. Tight: `swap_cost` names the q that reaches it.
    """
    lhs = _if_routes_differ(swap_cost(logits_p, num_slots), logits_p, logits_q, num_slots)
    return Bound("topk_margin_exact", lhs, kl_of_terms(logits_p, logits_q))


def route_flips(
    logits_p_TLE: Float[Tensor, "T L E"], logits_q_TLE: Float[Tensor, "T L E"], num_slots: int, threshold: float
) -> Bound:
    """P_t(the top-k routes differ at some layer) <= P_t(swap_cost < threshold at some layer) + loss / threshold.

    loss = sum_l E_t KL(p_tl || q_tl) is the predictor's (Pr2 Eq. 8), threshold in nats. It turns that loss into the
    probability that `replay_bias` needs, which Prop. B.1 with its soft routes does not.
    Proof: at a token of the left side some layer has KL >= swap_cost; either that is below the threshold, or
    sum_l KL / threshold is at least 1. Tight where the tokens that flip do so at exactly the threshold and no other
    token has any KL; vacuous where many tokens are near a tie.
    Raises ValueError unless threshold > 0.
    """
    if not threshold > 0:
        raise ValueError(f"expected a threshold above 0, got {threshold}")
    flips_TL = (in_top(logits_p_TLE, num_slots) != in_top(logits_q_TLE, num_slots)).any(-1)
    fragile_TL = swap_cost(logits_p_TLE, num_slots) < threshold
    loss = kl_of_terms(logits_p_TLE, logits_q_TLE).sum(1).mean()
    lhs, near = (x_TL.any(1).to(logits_p_TLE.dtype).mean() for x_TL in (flips_TL, fragile_TL))
    return Bound("route_flips", lhs, near + loss / threshold)


def _boundary(logits: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    E = logits.shape[-1]
    if not 1 <= num_slots <= E:
        raise ValueError(f"expected from 1 to {E} slots (experts), got {num_slots}")
    sorted_p = logits.softmax(-1).sort(dim=-1, descending=True).values
    last = sorted_p[..., num_slots - 1]
    # With all experts chosen there is no other one to lose to.
    return last, sorted_p[..., num_slots] if num_slots < E else torch.full_like(last, -torch.inf)


def _exchange_cost(a: Tensor, b: Tensor) -> Tensor:
    """The least KL(p || q) over q(B) >= q(A), for p(A) = a >= b = p(B): s phi((a - b) / s); inf for b = -inf."""
    s = torch.where(b > -torch.inf, a + b, 1.0)
    x = torch.where((s > 0) & (b > -torch.inf), (a - b) / s, 0.0)
    # xlog1py, as (1 - x) log(1 - x) is 0 at x = 1.
    cost = s * (torch.special.xlog1py(1 + x, x) + torch.special.xlog1py(1 - x, -x)) / 2
    return torch.where(b > -torch.inf, cost, torch.inf)


def _regret(logits_p: Tensor, logits_q: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    p, best, chosen = logits_p.softmax(-1), in_top(logits_p, num_slots), in_top(logits_q, num_slots)
    # The experts in both sets cancel, so that only the exchanged ones are summed.
    lost, won = (torch.where(x, p, 0.0).sum(-1) for x in (best & ~chosen, chosen & ~best))
    return lost - won, lost + won


def _if_routes_differ(value: Tensor, logits_p: Tensor, logits_q: Tensor, num_slots: int) -> Tensor:
    # For K = E the margin and the cost are inf, but no two sets differ: the left side is 0.
    differs = (in_top(logits_p, num_slots) != in_top(logits_q, num_slots)).any(-1)
    return torch.where(differs, value, 0.0)
