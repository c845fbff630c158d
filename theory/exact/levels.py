"""Policies at a stated distance, and rewards of a stated shape: the dials of an exact experiment.

Distances are in nats per token, KL(p || q) as runs report it. An engine is independent noise on every node's logits; an
update of the weights is a step of shared parameters. Letters: theory/exact/tree.py.
Paper: MiniRL (arXiv 2512.01374) Eq. 5 and sec. 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from scipy.optimize import root_scalar
from torch import Tensor

from theory.exact.tree import PrefixTree

Edges = Sequence[Float[Tensor, "_n V"]]


def sequence_kl(tree: PrefixTree, logp_p: Edges, logp_q: Edges) -> float:
    """KL(p || q) of whole responses, nats, in [0, inf]: the sum over steps of the expected KL under p."""
    return _kl(tree.reach(logp_p), logp_p, logp_q)


def _kl(reach: Sequence[Float[Tensor, " _n"]], logp_p: Edges, logp_q: Edges) -> float:
    total = 0.0
    for reach_n, p_nV, q_nV in zip(reach, logp_p, logp_q, strict=True):
        # A token that p never takes adds 0, whatever q gives it.
        each_nV = torch.where(p_nV > -math.inf, p_nV.exp() * (p_nV - q_nV), 0.0)
        total += float((reach_n * each_nV.sum(1)).sum())
    return total


def expected_length(tree: PrefixTree, logp: Edges) -> float:
    """The expected number of tokens of a response, the end token included."""
    return sum(float(reach_n.sum()) for reach_n in tree.reach(logp))


def token_kl(tree: PrefixTree, logp_p: Edges, logp_q: Edges) -> float:
    """KL(p || q) per token, nats: that of responses over their expected length under p (MiniRL sec. 4.2)."""
    reach = tree.reach(logp_p)
    return _kl(reach, logp_p, logp_q) / sum(float(reach_n.sum()) for reach_n in reach)


def logit_noise(tree: PrefixTree, generator: torch.Generator) -> list[Float[Tensor, "_n V"]]:
    """Standard normal noise for every edge's logit: an engine whose errors at two prefixes are independent."""
    return [torch.randn(n, tree.num_tokens, generator=generator, dtype=torch.float64) for n in tree.sizes]


def disturbed(logp: Edges, noise: Edges, scale: float) -> list[Float[Tensor, "_n V"]]:
    """The conditionals softmax(log p + scale x noise)."""
    return [(x + scale * e).log_softmax(1) for x, e in zip(logp, noise, strict=True)]


def scale_at(distance: Callable[[float], float], target: float, largest: float = 64.0) -> float:
    """The scale at which a distance that is 0 at scale 0 reaches `target`, to a relative 1e-9; 0 for target 0.

    The first such scale, where the distance grows with the scale. Raises ValueError where `largest` does not reach it,
    and for a target that rounding exceeds at scale 0.
    """
    if target == 0:
        return 0.0
    # Doubled from a tiny scale until the target is passed, which brackets the first crossing.
    first = high = 1e-6
    while (reached := distance(high)) < target:
        if high >= largest:
            raise ValueError(f"expected a scale up to {largest} to reach {target}, got {reached} there")
        high = min(2 * high, largest)
    if high == first and (rounding := distance(0.0)) >= target:
        raise ValueError(f"expected more than the {rounding:.3g} that rounding leaves at scale 0, got {target}")
    # From 0, where the distance is 0: the doubling has only shown that `high` is past the target.
    found = root_scalar(lambda scale: distance(scale) - target, bracket=(0.0, high), rtol=1e-9, xtol=1e-15)
    return float(found.root)


# ---- rewards, one number per response --------------------------------------------------------------------------------


def sparse(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """1 on a random quarter of all responses, else 0: the effect of a token depends on all others."""
    return (torch.rand(tree.num_responses, generator=generator, dtype=torch.float64) < 0.25).double()


def single(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """1 on one response drawn at random, else 0: a single right answer."""
    reward = torch.zeros(tree.num_responses, dtype=torch.float64)
    reward[torch.randint(tree.num_responses, (), generator=generator)] = 1.0
    return reward


def dense(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """The mean over positions of a random score in [0, 1] of the token there: the reward adds up over tokens."""
    score_TV = torch.rand(tree.max_length, tree.num_tokens, generator=generator, dtype=torch.float64)
    scores = [score_TV[t].expand(n, -1) for t, n in enumerate(tree.sizes)]
    rows = [tree.gather(scores, paths).sum(1) / paths.length_B for _, paths in tree.chunks()]
    return torch.cat(rows)


def matches(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """The share of a response's tokens that match a string drawn at random: dense, with few values."""
    wanted_T = torch.randint(tree.num_continuing, (tree.max_length,), generator=generator)
    rows = []
    for _, paths in tree.chunks():
        equal_BT = (paths.tokens_BT == wanted_T) & paths.is_response_BT
        rows.append(equal_BT.sum(1).double() / paths.length_B)
    return torch.cat(rows)


def last(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """1 where the last token is one drawn at random among those that continue: only the end is graded."""
    chosen = int(torch.randint(tree.num_continuing, (), generator=generator))
    rows = []
    for _, paths in tree.chunks():
        # The answer is the token before the end token, if there is one.
        ends = (paths.length_B - 1)[:, None]
        final_B = paths.tokens_BT.gather(1, ends)[:, 0]
        if tree.has_end:
            before_B = paths.tokens_BT.gather(1, (ends - 1).clamp(min=0))[:, 0]
            answer_B = torch.where(paths.length_B > 1, before_B, -1)
            final_B = torch.where(final_B == tree.num_tokens - 1, answer_B, final_B)
        rows.append((final_B == chosen).double())
    return torch.cat(rows)


def sum_modulo(tree: PrefixTree, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """1 where the tokens but the end token sum to a number drawn at random, modulo W: a small arithmetic task."""
    chosen = int(torch.randint(tree.num_continuing, (), generator=generator))
    rows = []
    for _, paths in tree.chunks():
        counted_BT = torch.where(paths.is_response_BT, paths.tokens_BT, 0)
        if tree.has_end:
            counted_BT = torch.where(counted_BT == tree.num_tokens - 1, 0, counted_BT)
        rows.append((counted_BT.sum(1) % tree.num_continuing == chosen).double())
    return torch.cat(rows)


REWARDS: dict[str, Callable[[PrefixTree, torch.Generator], Tensor]] = {
    "sparse": sparse,
    "single": single,
    "dense": dense,
    "matches": matches,
    "last": last,
    "sum_modulo": sum_modulo,
}
"""The shapes of reward by name."""
