"""A group of G sampled responses: the exact distribution of advantages and denominators.

An advantage and a denominator depend on a response only through its class: its reward, whether it is kept, and its
number of kept tokens. A group is then a vector of counts, multinomial under mu, and every moment is a finite sum.

Letters beyond theory/exact/tree.py: C classes of responses, M groups (vectors of counts), s the sign of an advantage.
Papers: MiniRL (arXiv 2512.01374) sec. 4.1 and App. A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory import advantages
from theory.names import unknown_name
from theory.objectives import Objective

MAX_GROUPS = 200_000
"""More count vectors than this are sampled instead of enumerated."""

NUM_DRAWS = 20_000
"""Groups that are drawn then."""


@dataclass(frozen=True)
class Classes:
    """The classes of responses, with their probabilities under mu, and the class of every response."""

    index_Y: Int[Tensor, " Y"]
    probability_C: Float[Tensor, " C"]
    reward_C: Float[Tensor, " C"]
    is_kept_C: Bool[Tensor, " C"]
    num_tokens_C: Int[Tensor, " C"]

    def __len__(self) -> int:
        return len(self.probability_C)

    @property
    def divisor_C(self) -> Float[Tensor, " C"]:
        """The probabilities to divide by: tiny for a class that mu never samples, whose 0 / 0 is then 0."""
        return self.probability_C.clamp(min=torch.finfo(torch.float64).tiny)


def classes(
    probability_Y: Float[Tensor, " Y"],
    reward_Y: Float[Tensor, " Y"],
    is_kept_Y: Bool[Tensor, " Y"],
    num_tokens_Y: Int[Tensor, " Y"],
    by_length: bool,
) -> Classes:
    """Responses sorted into classes; `by_length` where the denominator counts tokens. Rejected ones have 0 tokens."""
    # Without lengths in the denominator there are fewer classes, and so far fewer groups to enumerate.
    tokens_Y = torch.where(is_kept_Y, num_tokens_Y, 0) if by_length else torch.zeros_like(num_tokens_Y)
    # float64 holds all three exactly, so that equal rows are one class.
    keys = torch.stack([reward_Y.double(), is_kept_Y.double(), tokens_Y.double()], dim=1)
    unique, index_Y = torch.unique(keys, dim=0, return_inverse=True)
    probability_C = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, index_Y, probability_Y.double())
    return Classes(index_Y, probability_C, unique[:, 0], unique[:, 1] > 0, unique[:, 2].long())


BASELINES = ("mean", "none")


@dataclass(frozen=True)
class Group:
    """The source of advantages. G responses share a prompt; with `num_responses` None the group is infinitely large.

    An infinite group subtracts the expected reward under mu (`baseline` "mean"; an advantage per token, its own
    baseline instead) or nothing ("none"). A finite group uses the objective's own advantage, as in training. Raises
    ValueError for another baseline.
    """

    num_responses: int | None = 8
    baseline: str = "mean"

    def __post_init__(self) -> None:
        if self.num_responses is not None and self.num_responses < 2:
            raise ValueError(f"num_responses: expected at least 2 or None (infinitely many), got {self.num_responses}")
        if self.baseline not in BASELINES:
            raise unknown_name("baseline", self.baseline, BASELINES)


@dataclass(frozen=True)
class Moments:
    """Moments of a_i = advantage / denominator, by class and sign, of the responses of one group.

    number_sC: E[sum_i 1(class, sign)], their expected number; first_sC: E[sum_i |a_i| 1(class, sign)];
    square_sC: E[sum_i a_i^2 1(class, sign)];
    cross_sCsC: E[sum_(i != j) |a_i| |a_j| 1(class, sign of i) 1(class, sign of j)]. Signs: 0 is A > 0, 1 is A < 0.
    `num_draws` is None where they are exact, else the number of groups sampled.
    """

    number_sC: Float[Tensor, "2 C"]
    first_sC: Float[Tensor, "2 C"]
    square_sC: Float[Tensor, "2 C"]
    cross_sCsC: Float[Tensor, "2 C 2 C"]
    num_draws: int | None = None


def moments(objective: Objective, G: int, of: Classes, generator: torch.Generator | None = None) -> Moments:
    """The moments of groups of G responses under this objective's advantage and denominator.

    Exact where at most MAX_GROUPS count vectors exist; otherwise over NUM_DRAWS groups drawn with `generator`.
    Raises ValueError where a generator is needed and none is given.
    """
    C = len(of)
    # The number of vectors of C counts that sum to G.
    if math.comb(G + C - 1, C - 1) <= MAX_GROUPS:
        counts_MC = _compositions(G, C)
        log_p_M = _log_multinomial(counts_MC, of.probability_C)
        return _from_counts(objective, of, counts_MC, log_p_M.exp())
    if generator is None:
        raise ValueError(
            f"expected a generator: {math.comb(G + C - 1, C - 1):,} groups of {G} from {C} classes are too many "
            f"to enumerate (at most {MAX_GROUPS:,})"
        )
    # One draw of all members, cut into groups: they are independent.
    draws_MG = torch.multinomial(of.probability_C, NUM_DRAWS * G, replacement=True, generator=generator)
    counts_MC = torch.nn.functional.one_hot(draws_MG.view(NUM_DRAWS, G), C).sum(1)
    weight_M = torch.full((NUM_DRAWS,), 1 / NUM_DRAWS, dtype=torch.float64)
    return replace(_from_counts(objective, of, counts_MC, weight_M), num_draws=NUM_DRAWS)


def _from_counts(objective: Objective, of: Classes, counts_MC: Tensor, weight_M: Tensor) -> Moments:
    a_MC = _shares(objective, of, counts_MC)
    a_sMC = torch.stack([a_MC.clamp(min=0), (-a_MC).clamp(min=0)])
    n_MC = counts_MC.double()
    # An advantage of 0 has no sign, and is in neither count.
    number = torch.einsum("m,mc,smc->sc", weight_M, n_MC, (a_sMC > 0).double())
    first = torch.einsum("m,mc,smc->sc", weight_M, n_MC, a_sMC)
    square = torch.einsum("m,mc,smc->sc", weight_M, n_MC, a_sMC.square())
    each_sMC = n_MC * a_sMC
    cross = torch.einsum("m,smc,rmd->scrd", weight_M, each_sMC, each_sMC)
    # `cross` counts ordered pairs, each response with itself included: those are subtracted.
    own = torch.einsum("m,mc,smc,rmc->scr", weight_M, n_MC, a_sMC, a_sMC)
    for c in range(len(of)):
        cross[:, c, :, c] -= own[:, c, :]
    return Moments(number, first, square, cross)


def _shares(objective: Objective, of: Classes, counts_MC: Int[Tensor, "M C"]) -> Float[Tensor, "M C"]:
    """A / denominator of each class in each group; 0 where the group has none of the class or it is rejected."""
    M = len(counts_MC)
    G = int(counts_MC[0].sum())
    # Members in the order of their classes: member i is in the first class whose cumulative count exceeds i.
    ends_MC = counts_MC.cumsum(1)
    member_MG = torch.searchsorted(ends_MC, torch.arange(G).expand(M, G).contiguous(), right=True)
    rewards_MG = of.reward_C[member_MG]
    advantages_MG = advantages.advantages_of(objective.advantage, rewards_MG)
    # A class has one advantage: that of its first member. The clip is for absent classes at the end.
    first_MC = (ends_MC - counts_MC).clamp(max=G - 1)
    own_MC = advantages_MG.gather(1, first_MC)
    size_C = of.num_tokens_C if objective.aggregation.counts == "tokens" else of.is_kept_C.long()
    denominator_M = (counts_MC * size_C).sum(1)
    present_MC = (counts_MC > 0) & of.is_kept_C
    # The clamp is for groups without a kept response, which have no share anyway.
    return torch.where(present_MC, own_MC / denominator_M.clamp(min=1)[:, None], 0.0)


def _compositions(total: int, parts: int) -> Int[Tensor, "M C"]:
    """All vectors of `parts` non-negative integers with this sum."""
    # All parts but the last, which is the remainder. A row grows by every number that its sum leaves room for.
    rows = torch.arange(total + 1)[:, None]
    for _ in range(parts - 2):
        left_M = total - rows.sum(1)
        repeated = rows.repeat_interleave(left_M + 1, dim=0)
        new = torch.cat([torch.arange(int(n) + 1) for n in left_M])
        rows = torch.cat([repeated, new[:, None]], dim=1)
    if parts == 1:
        return torch.full((1, 1), total)
    return torch.cat([rows, (total - rows.sum(1))[:, None]], dim=1)


def _log_multinomial(counts_MC: Tensor, probability_C: Tensor) -> Tensor:
    n_MC = counts_MC.double()
    # 0 log 0 is 0: a class of probability 0 adds nothing where it does not occur, and -inf where it does.
    terms_MC = torch.special.xlogy(n_MC, probability_C) - torch.lgamma(n_MC + 1)
    return torch.lgamma(n_MC[0].sum() + 1) + terms_MC.sum(1)
