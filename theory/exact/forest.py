"""Several trees that share one policy: one per prompt, and per opening that an environment draws before the response.

A context is all that precedes a response: a prompt and, where there is one, the opening that the environment draws for
it. Each context is the root of its own tree; nodes of a depth are numbered context by context. An environment's tokens
are thus in no objective and no ratio, as in training (theory/turns.py), but rewards depend on them.

Letters beyond theory/exact/tree.py: C contexts. Paper: MiniRL (arXiv 2512.01374) Eq. 1 averages over prompts x ~ D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.exact.tree import MAX_RESPONSES, Paths, PrefixTree


@dataclass(frozen=True)
class Forest(PrefixTree):
    """One tree per context. `probabilities` are those of the contexts, and sum to 1; `prompts` the prompt of each.

    Raises ValueError for probabilities that are not a distribution, for lists of different lengths, for prompts that
    are not numbered from 0 without a gap, and for a forest of more than MAX_RESPONSES.
    """

    probabilities: tuple[float, ...] = (1.0,)
    prompts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if len(self.probabilities) != len(self.prompts):
            raise ValueError(
                f"prompts: expected one for each of {len(self.probabilities)} contexts, got {len(self.prompts)}"
            )
        if not all(p > 0 for p in self.probabilities) or not math.isclose(sum(self.probabilities), 1.0):
            raise ValueError(f"probabilities: expected positive numbers with the sum 1, got {self.probabilities}")
        if set(self.prompts) != set(range(max(self.prompts) + 1)):
            raise ValueError(f"prompts: expected the numbers from 0 without a gap, got {self.prompts}")
        # Last, as it counts the responses of all contexts.
        super().__post_init__()

    @staticmethod
    def uniform(tree: PrefixTree, num_prompts: int, num_openings: int = 1) -> Forest:
        """A forest of equally likely prompts, each with equally likely openings; contexts are prompt-major."""
        C = num_prompts * num_openings
        if C * tree.num_responses > MAX_RESPONSES:  # before a list of them is made
            raise ValueError(
                f"expected at most {MAX_RESPONSES:,} responses to enumerate, got {C * tree.num_responses:,} "
                f"({num_prompts:,} prompts, {num_openings:,} openings of each, {tree.num_responses:,} responses)"
            )
        prompts = tuple(p for p in range(num_prompts) for _ in range(num_openings))
        return Forest(tree.num_tokens, tree.max_length, tree.has_end, (1 / C,) * C, prompts)

    @staticmethod
    @lru_cache(maxsize=8)
    def of_one(tree: PrefixTree) -> Forest:
        """A forest of one context. Equal trees get the same one, since a study walks over it many times."""
        return Forest(tree.num_tokens, tree.max_length, tree.has_end)

    @property
    def num_contexts(self) -> int:
        """C."""
        return len(self.prompts)

    @cached_property
    def tree(self) -> PrefixTree:
        """The tree of one context."""
        return PrefixTree(self.num_tokens, self.max_length, self.has_end)

    @cached_property
    def roots(self) -> Float[Tensor, " C"]:
        """The probability of each context."""
        return torch.tensor(self.probabilities, dtype=torch.float64)

    # -- sizes

    def num_nodes(self, depth: int) -> int:
        """The nodes of a depth, over all contexts: C W^depth."""
        return self.num_contexts * self.num_continuing**depth

    @property
    def num_responses(self) -> int:
        """C Y."""
        return self.num_contexts * super().num_responses

    @cached_property
    def context_of_response(self) -> Int[Tensor, " Y"]:
        """The context of every response."""
        return torch.arange(self.num_contexts).repeat_interleave(self.tree.num_responses)

    @cached_property
    def prompt_of_response(self) -> Int[Tensor, " Y"]:
        """The prompt of every response."""
        return torch.tensor(self.prompts)[self.context_of_response]

    def context_of_node(self, depth: int) -> Int[Tensor, " n"]:
        """The context of each node of a depth."""
        return torch.arange(self.num_contexts).repeat_interleave(self.num_continuing**depth)

    # -- responses, by number: those of the first context in the order of its tree, then those of the second

    def paths(self, start: int, stop: int) -> Paths:
        """The paths of the responses numbered from `start` to `stop` (exclusive)."""
        index_B, num = torch.arange(start, stop), self.tree.num_responses
        whole = self._one_context
        within_B, context_B = index_B % num, index_B // num
        mask_BT = whole.is_response_BT[within_B]
        width_T = torch.tensor([self.num_continuing**t for t in range(self.max_length)])
        # At depth t the nodes of context c start at c W^t; positions after the end stay at node 0.
        nodes_BT = whole.nodes_BT[within_B] + (context_B[:, None] * width_T).masked_fill(~mask_BT, 0)
        return Paths(nodes_BT, whole.tokens_BT[within_B], mask_BT)

    @cached_property
    def _one_context(self) -> Paths:
        return self.tree.paths(0, self.tree.num_responses)

    @cached_property
    def lengths(self) -> Int[Tensor, " Y"]:
        """Tokens of every response, the end token included."""
        return self.tree.lengths.repeat(self.num_contexts)

    def prefixes(self, depth: int) -> Int[Tensor, "n t"]:
        """The tokens of each node of a depth, without its context."""
        return self.tree.prefixes(depth).repeat(self.num_contexts, 1)

    # -- all responses together, kept for repeated walks over the forest

    @cached_property
    def whole(self) -> Paths:
        """The paths of all responses."""
        return self.paths(0, self.num_responses)

    @cached_property
    def node_BT(self) -> Int[Tensor, "B T"]:
        """The node of each position of each response, numbered over all depths; after the end that of node 0."""
        return self.whole.nodes_BT + self.first_nodes_T

    @cached_property
    def edge_BT(self) -> Int[Tensor, "B T"]:
        """The edge of each position of each response, numbered over all depths."""
        return self.node_BT * self.num_tokens + self.whole.tokens_BT

    def values_BT(self, edges: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, "B T"]:
        """The value of each edge on each path; 0 after the end."""
        flat_E = torch.cat([x.reshape(-1) for x in edges])
        return torch.where(self.whole.is_response_BT, flat_E[self.edge_BT], 0.0)

    # -- probabilities, the context's included

    def log_probabilities(self, logp: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Y"]:
        """log-probability of every context and response; they sum to 1 in probability over the forest."""
        return self.log_probability_of(self.values_BT(logp))

    def log_probability_of(self, logp_BT: Float[Tensor, "B T"]) -> Float[Tensor, " Y"]:
        """The same from the log-probability of every token on each path."""
        return logp_BT.sum(1) + self.roots.log()[self.context_of_response]
