"""All responses that a small vocabulary and a short horizon allow, as a tree of prefixes in dense arrays.

The nodes at depth t are the strings of t tokens without an end, numbered as numbers in base W; a node's edges are its
V next tokens. Every quantity of a policy is then one dense array per depth, and each node is evaluated once. A response
ends with the end token, the last of the vocabulary, or at T tokens.

Letters beyond theory/contracts.py: W tokens that continue a response (V, or V - 1 with an end token), n nodes of a
depth, Y all responses, B responses of one chunk. Paper: MiniRL (arXiv 2512.01374) Eq. 1 to 4 are sums over these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_RESPONSES = 4_000_000
"""More responses than this are refused: at some 10 us each they would take a minute, and their rewards 32 MB."""

CHUNK = 65536
"""Responses in a pass's working set, and in the largest tree that keeps its paths."""


@dataclass(frozen=True)
class Paths:
    """The paths of some responses through the tree: at each position a node of that depth and the token taken there.

    Positions after the end hold node 0 and token 0 under a False mask.
    """

    nodes_BT: Int[Tensor, "B T"]
    tokens_BT: Int[Tensor, "B T"]
    is_response_BT: Bool[Tensor, "B T"]

    @property
    def length_B(self) -> Int[Tensor, " B"]:
        """Tokens of each response, the end token included."""
        return self.is_response_BT.sum(1)


@dataclass(frozen=True)
class PrefixTree:
    """The responses over `num_tokens` tokens of at most `max_length`; with `has_end` the last token ends a response.

    Raises ValueError for sizes below 2 tokens (3 with an end) or 1 position, and for a tree of more than MAX_RESPONSES.
    """

    num_tokens: int
    max_length: int
    has_end: bool = False

    def __post_init__(self) -> None:
        # With an end token W is one less, and W = 1 would make `num_responses` divide by 0.
        least = 3 if self.has_end else 2
        if self.num_tokens < least:
            raise ValueError(f"num_tokens: expected at least {least}, got {self.num_tokens}")
        if self.max_length < 1:
            raise ValueError(f"max_length: expected at least 1, got {self.max_length}")
        # Longer trees are too large for any vocabulary, and the power would never finish for a length of 1e18.
        if self.max_length > 64 or self.num_responses > MAX_RESPONSES:
            got = f"{self.num_responses:,}" if self.max_length <= 64 else "more than 2^64"
            raise ValueError(
                f"expected at most {MAX_RESPONSES:,} responses to enumerate, got {got} "
                f"({self.num_tokens} tokens, up to {self.max_length} of them): lower either"
            )

    # -- sizes

    @property
    def num_continuing(self) -> int:
        """W, the tokens after which a response continues."""
        return self.num_tokens - 1 if self.has_end else self.num_tokens

    def num_nodes(self, depth: int) -> int:
        """The prefixes of `depth` tokens that have not ended: W^depth."""
        return self.num_continuing**depth

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each depth from 0 to T - 1."""
        return tuple(self.num_nodes(t) for t in range(self.max_length))

    @cached_property
    def first_nodes_T(self) -> Int[Tensor, " T"]:
        """The first node of each depth, where nodes are numbered over all depths."""
        return torch.tensor([sum(self.sizes[:t]) for t in range(self.max_length)])

    @cached_property
    def num_edges(self) -> int:
        """Pairs of a node and a next token, over all depths."""
        return sum(self.sizes) * self.num_tokens

    @property
    def num_responses(self) -> int:
        """Y: one for each node's end token, and the V continuations of each node of the last depth."""
        W, T = self.num_continuing, self.max_length
        ended = (W ** (T - 1) - 1) // (W - 1) if self.has_end else 0
        return ended + W ** (T - 1) * self.num_tokens

    # -- responses, by number: those that end early first, shortest first, then those of T tokens

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The number of the first response that ends at depth 0, 1, ..., and of the first of T tokens."""
        starts, total = [], 0
        for t in range(self.max_length - 1):
            starts.append(total)
            # Without an end token no response is shorter than T: these ranges are empty.
            total += self.sizes[t] if self.has_end else 0
        return (*starts, total)

    def paths(self, start: int, stop: int) -> Paths:
        """The paths of the responses numbered from `start` to `stop` (exclusive)."""
        is_whole = (start, stop) == (0, self.num_responses)
        return self._whole if is_whole and stop <= CHUNK else self._paths(start, stop)

    @cached_property
    def _whole(self) -> Paths:
        """Every pass over a small tree reads the same paths."""
        return self._paths(0, self.num_responses)

    def _paths(self, start: int, stop: int) -> Paths:
        index_B = torch.arange(start, stop)
        T, V, W = self.max_length, self.num_tokens, self.num_continuing
        last = torch.full_like(index_B, T - 1)
        offset = torch.full_like(index_B, self._starts[-1])
        # Backwards: the smallest depth whose range of numbers ends above the index is set last, and stays.
        for t in range(T - 2, -1, -1):
            ends_here = index_B < self._starts[t + 1]
            last, offset = torch.where(ends_here, t, last), torch.where(ends_here, self._starts[t], offset)
        within_B = index_B - offset
        is_full_B = last == T - 1
        # Responses of T tokens are numbered by their last edge, the others, which end in the end token, by their node.
        own_B = torch.where(is_full_B, within_B // V, within_B)
        end_B = torch.where(is_full_B, within_B % V, V - 1)
        nodes_BT = torch.zeros(len(index_B), T, dtype=torch.int64)
        tokens_BT = torch.zeros_like(nodes_BT)
        below_B = own_B
        # Upwards from the last node: its number in base W is the tokens that led to it.
        for t in range(T - 1, -1, -1):
            nodes_BT[:, t] = torch.where(last == t, own_B, below_B // W).masked_fill(last < t, 0)
            tokens_BT[:, t] = torch.where(last == t, end_B, below_B % W).masked_fill(last < t, 0)
            below_B = nodes_BT[:, t]
        mask_BT = torch.arange(T)[None, :] <= last[:, None]
        return Paths(nodes_BT, tokens_BT, mask_BT)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[slice, Paths]]:
        """All responses in order of their numbers, at most `size` at a time."""
        for start in range(0, self.num_responses, size):
            stop = min(start + size, self.num_responses)
            yield slice(start, stop), self.paths(start, stop)

    @cached_property
    def lengths(self) -> Int[Tensor, " Y"]:
        """Tokens of every response, the end token included."""
        lengths = torch.full((self.num_responses,), self.max_length, dtype=torch.int64)
        for t in range(self.max_length - 1):
            lengths[self._starts[t] : self._starts[t + 1]] = t + 1
        return lengths

    def prefixes(self, depth: int) -> Int[Tensor, "n t"]:
        """The tokens of each node of a depth."""
        node = torch.arange(self.num_nodes(depth))
        tokens = [node // self.num_continuing ** (depth - 1 - s) % self.num_continuing for s in range(depth)]
        return torch.stack(tokens, dim=1) if tokens else torch.zeros(1, 0, dtype=torch.int64)

    # -- between edges and responses

    def gather(self, edges: Sequence[Float[Tensor, "_n V"]], paths: Paths) -> Float[Tensor, "B T"]:
        """The value of each edge on each path; 0 after the end."""
        # Positions after the end read node 0 and token 0, and are replaced by 0 below.
        columns = [edges[t][paths.nodes_BT[:, t], paths.tokens_BT[:, t]] for t in range(self.max_length)]
        return torch.where(paths.is_response_BT, torch.stack(columns, dim=1), 0.0)

    def scatter(self, edges: Sequence[Float[Tensor, "_n V"]], values_BT: Float[Tensor, "B T"], paths: Paths) -> None:
        """Adds each path's values to its edges, in place."""
        for t in range(self.max_length):
            on = paths.is_response_BT[:, t]
            flat = paths.nodes_BT[on, t] * self.num_tokens + paths.tokens_BT[on, t]
            # index_add_, as many paths share an edge.
            edges[t].view(-1).index_add_(0, flat, values_BT[on, t].to(edges[t]))

    def zero_edges(self) -> list[Float[Tensor, "_n V"]]:
        """A zero for every edge, in float64."""
        return [torch.zeros(n, self.num_tokens, dtype=torch.float64) for n in self.sizes]

    @property
    def roots(self) -> Float[Tensor, " _n"]:
        """The probability of each node of depth 0: there is one."""
        return torch.ones(1, dtype=torch.float64)

    def reach(self, logp: Sequence[Float[Tensor, "_n V"]]) -> list[Float[Tensor, " _n"]]:
        """The probability that a response passes each node, a depth at a time."""
        reach = [self.roots]
        for t in range(self.max_length - 1):
            # The end token, the last of the vocabulary, leads to no node.
            # Row-major: token v of node n leads to node n W + v of the next depth.
            reach.append((reach[t][:, None] * logp[t].exp()[:, : self.num_continuing]).reshape(-1))
        return reach

    def log_probabilities(self, logp: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Y"]:
        """log-probability of every response under conditionals `logp`; they sum to 1 in probability."""
        return torch.cat([self.gather(logp, paths).sum(1) for _, paths in self.chunks()])
