"""Small exact problems that the tests of theory/exact share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theory.exact.policies import LinearPolicy, TabularPolicy, counts
from theory.exact.problem import Problem
from theory.exact.tree import Paths, PrefixTree
from theory.streams import stream


@dataclass(frozen=True)
class World:
    problem: Problem
    old: LinearPolicy | TabularPolicy
    mu: LinearPolicy | TabularPolicy

    @property
    def tree(self) -> PrefixTree:
        return self.problem.target.tree

    @property
    def paths(self) -> Paths:
        return self.tree.paths(0, self.tree.num_responses)


def make_world(
    kind: str = "bigram", V: int = 3, T: int = 3, has_end: bool = True, seed: int = 0, distance: float = 0.3
) -> World:
    """A random policy, an old one a step away, a mu one more step away, and rewards that are 0, 0.5 or 1."""
    generator = stream(seed, "exact", kind, str(V), str(T))
    tree = PrefixTree(V, T, has_end)
    if kind == "tabular":
        target = TabularPolicy.random(tree, generator)
    elif kind == "counts":
        target = LinearPolicy.random(tree, generator, features=counts)
    else:
        target = LinearPolicy.random(tree, generator)

    def step() -> Tensor:
        return distance * torch.randn(target.parameters.shape, generator=generator, dtype=torch.float64)

    old = target.moved(step())
    mu = old.moved(step())
    reward_Y = torch.randint(3, (tree.num_responses,), generator=generator).double() / 2
    return World(Problem(target, mu.logp(), old.logp(), reward_Y), old, mu)


def log_probabilities(policy: LinearPolicy | TabularPolicy, flat: Tensor, paths: Paths) -> Tensor:
    """log pi of every token of the paths as a function of the parameter vector, written out a response at a time.

    It shares nothing with the tree's arithmetic: prefixes are read from the tokens.
    """
    tree, rows = policy.tree, []
    for tokens, mask in zip(paths.tokens_BT.tolist(), paths.is_response_BT.tolist(), strict=True):
        values = []
        for t in range(tree.max_length):
            if not mask[t]:
                values.append(flat.new_zeros(()))
                continue
            values.append(_logits(policy, flat, tokens[:t]).log_softmax(0)[tokens[t]])
        rows.append(torch.stack(values))
    return torch.stack(rows)


def _logits(policy: LinearPolicy | TabularPolicy, flat: Tensor, prefix: list[int]) -> Tensor:
    tree = policy.tree
    if isinstance(policy, TabularPolicy):
        node = 0
        for token in prefix:
            node = node * tree.num_continuing + token
        before = sum(tree.num_continuing**t for t in range(len(prefix)))
        start = (before + node) * tree.num_tokens
        return flat[start : start + tree.num_tokens]
    features = policy.features(torch.tensor([prefix], dtype=torch.int64).view(1, len(prefix)), tree)[0]
    return features @ flat.view(len(features), tree.num_tokens)
