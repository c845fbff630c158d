"""A trace as the doctor reads it: one row per sampled token, with its position, its context and its routing row.

Letters beyond theory/contracts.py: n sampled tokens of all responses together, R routing rows, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.traces import Trace
from theory.divergences import k3_kl_mu_old
from theory.routing.measures import difference_counts

MIN_TOKENS = 20
"""Fewest tokens for a clue."""


@dataclass(frozen=True, eq=False)
class View:
    """The sampled tokens of a trace, packed; d = log old - log mu in nats."""

    trace: Trace
    mu_n: Float[Tensor, " n"]
    old_n: Float[Tensor, " n"]
    token_n: Int[Tensor, " n"]
    response_n: Int[Tensor, " n"]
    position_n: Int[Tensor, " n"]
    """Position in the response, from 0; observations count as positions."""
    place_n: Int[Tensor, " n"]
    """Place in `trace.tokens`."""
    entropy_n: Float[Tensor, " n"] | None

    @staticmethod
    def of(trace: Trace) -> View:
        """The view of a trace; ValueError where no token was sampled."""
        # A runs over response tokens, observations included; offsets and `tokens` run over prompts too.
        mask_A = trace.is_response
        if not bool(mask_A.any()):
            raise ValueError(f"is_response: expected at least 1 sampled token, got 0 of {len(mask_A)}")
        lengths_B = trace.offsets.diff() - trace.num_prompt
        response_A = torch.repeat_interleave(torch.arange(len(trace)), lengths_B)
        position_A = torch.arange(len(mask_A)) - (lengths_B.cumsum(0) - lengths_B)[response_A]
        # The start of the sequence, its prompt, and the position in the response.
        place_A = trace.offsets[response_A] + trace.num_prompt[response_A] + position_A
        return View(
            trace=trace,
            # float64, as k3 of a small d is the difference of two nearly equal numbers.
            mu_n=trace.logp_mu[mask_A].double(),
            old_n=trace.logp_old[mask_A].double(),
            token_n=trace.tokens[place_A][mask_A].long(),
            response_n=response_A[mask_A],
            position_n=position_A[mask_A],
            place_n=place_A[mask_A],
            entropy_n=None if trace.entropy_old is None else trace.entropy_old[mask_A].double(),
        )

    def __len__(self) -> int:
        return len(self.mu_n)

    @cached_property
    def context_n(self) -> Int[Tensor, " n"]:
        """A number of the tokens before it, prompt included: equal for equal contexts."""
        # Never in the sequence before: a prompt has at least one token.
        return _contexts(self.trace)[self.place_n - 1]

    @cached_property
    def row_n(self) -> Int[Tensor, " n"]:
        """The routing row of the token's input, which is the token before it."""
        # Sequence b has S_b - 1 rows, so its rows start b places before its tokens.
        return self.place_n - self.response_n - 1

    @cached_property
    def draw_n(self) -> Int[Tensor, " n"]:
        """A number of (context, token): equal for the same token after the same context."""
        # Exact in int64: contexts and the vocabulary are far below 2^31.
        return self.context_n * (self.token_n.max() + 1) + self.token_n

    @cached_property
    def d_n(self) -> Float[Tensor, " n"]:
        """log old - log mu, nats."""
        return self.old_n - self.mu_n

    @cached_property
    def k3_n(self) -> Float[Tensor, " n"]:
        """k3 estimate of KL(mu || old), nats, at least 0: rho - 1 - log rho, rho = e^d (R3, arXiv 2510.11370 Eq. 2)."""
        return k3_kl_mu_old(self.old_n, self.mu_n)

    @cached_property
    def doubt_n(self) -> Float[Tensor, " n"]:
        """1 - p, p old's probability of the token; d = (1 - p) delta, to first order, if its logit moves by delta."""
        return -torch.expm1(self.old_n)

    @cached_property
    def size_n(self) -> Float[Tensor, " n"]:
        """|d| / (1 - p), the deviation in logit units as if only the token's logit had moved; inf where p = 1."""
        # d = 0 with p = 1 would be 0 / 0.
        return torch.where(self.d_n == 0, 0.0, self.d_n.abs() / self.doubt_n)

    @cached_property
    def is_open_n(self) -> Bool[Tensor, " n"]:
        """Tokens with p < 0.99: on surer ones a moved logit hardly shows."""
        return self.doubt_n > 0.01

    @cached_property
    def is_last_n(self) -> Bool[Tensor, " n"]:
        """Whether it is the last sampled token of its response."""
        is_last_n = torch.ones(len(self), dtype=torch.bool)
        is_last_n[:-1] = self.response_n[1:] != self.response_n[:-1]
        return is_last_n

    @cached_property
    def difference_RL(self) -> Int[Tensor, "R L"] | None:
        """Differing expert choices of mu and old per row and layer, -1 where unknown; None without both records."""
        mu, old = self.trace.record_mu, self.trace.record_old
        return None if mu is None or old is None else difference_counts(mu, old)

    @cached_property
    def differs_n(self) -> Bool[Tensor, " n"] | None:
        """Tokens whose own row has other experts at some layer."""
        return None if self.difference_RL is None else (self.difference_RL > 0).any(1)[self.row_n]


def _contexts(trace: Trace) -> Int[Tensor, " N"]:
    """A number of each token's prefix, itself included: equal for equal prefixes."""
    # A trie: a prefix is the pair (number of the prefix without the last token, last token).
    numbers: dict[tuple[int, int], int] = {}
    starts = set(trace.offsets.tolist())
    out, before = [], -1
    for place, token in enumerate(trace.tokens.tolist()):
        before = -1 if place in starts else before
        before = numbers.setdefault((before, token), len(numbers))
        out.append(before)
    return torch.tensor(out)
