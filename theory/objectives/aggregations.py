"""From per-token terms to one number: the only place where a mask is summed, and where every denominator is chosen.

The denominators are those of a whole mini-batch (`Totals`), so that its micro-batches add up to the whole. A row
without a kept token is in no denominator. `kept` is True on the response tokens of responses that no correction
rejected. Papers: MiniRL (arXiv 2512.01374) Eq. 7 and App. A, Pr2 (2606.00395) Eq. 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """The denominators of a mini-batch: kept responses (those with a kept token) and kept tokens.

    `log_mean_weight` is the logarithm of the mean weight that normalised weights are divided by; 0 where none are.
    """

    num_responses: int
    num_tokens: int
    log_mean_weight: float = 0.0


def count(kept_BT: Bool[Tensor, "B T"]) -> Totals:
    """The totals of a mask, as plain integers (across devices they are added)."""
    return Totals(num_responses=int(kept_BT.any(1).sum()), num_tokens=int(kept_BT.sum()))


@dataclass(frozen=True)
class Aggregation:
    """A named rule from terms to a number. `formula` is a template with a place for the term, `{term}`.

    `counts` says which of the totals is its denominator.
    """

    name: str
    formula: str
    reduce: Callable[[Tensor, Tensor, Totals], Tensor]
    counts: Literal["responses", "tokens"] = "responses"

    def __call__(
        self, term_BT: Float[Tensor, "B T"], kept_BT: Bool[Tensor, "B T"], totals: Totals
    ) -> Float[Tensor, ""]:
        """The aggregate. Terms under a False mask get exactly zero gradient; with nothing kept at all it is 0."""
        # Not a product with the mask: a nan times 0 is nan.
        return self.reduce(torch.where(kept_BT, term_BT, 0.0), kept_BT, totals)


def _token_sum(term_BT: Tensor, kept_BT: Tensor, totals: Totals) -> Tensor:
    return _divide(term_BT.sum(), totals.num_responses)


def _length_norm(term_BT: Tensor, kept_BT: Tensor, totals: Totals) -> Tensor:
    # A row without a kept token has the sum 0: any divisor but 0 leaves it out.
    length_B = kept_BT.sum(1).clamp(min=1)
    return _divide((term_BT.sum(1) / length_B).sum(), totals.num_responses)


def _token_mean(term_BT: Tensor, kept_BT: Tensor, totals: Totals) -> Tensor:
    return _divide(term_BT.sum(), totals.num_tokens)


def _divide(total: Tensor, denominator: int) -> Tensor:
    # Nothing kept (every response rejected): the sum over no terms is 0, and stays 0 rather than 0/0.
    return total / denominator if denominator > 0 else total


token_sum = Aggregation("token_sum", "(1/#responses) sum_i sum_t {term}", _token_sum)
"""Tokens summed, responses averaged: the first-order surrogate's own weighting (MiniRL Eq. 7, Pr2 Eq. 10)."""

length_norm = Aggregation("length_norm", "(1/#responses) sum_i (1/|y_i|) sum_t {term}", _length_norm)
"""Each response averaged over its own tokens, then responses averaged (GRPO; MiniRL App. A and sec. 4.3)."""

token_mean = Aggregation("token_mean", "(1/#tokens) sum_i sum_t {term}", _token_mean, counts="tokens")
"""One mean over all tokens of the mini-batch: long responses weigh more (DAPO; CISPO in MiniRL App. A, per group)."""

AGGREGATIONS: dict[str, Aggregation] = {a.name: a for a in (token_sum, length_norm, token_mean)}
