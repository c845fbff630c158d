"""Policies on a prefix tree: their conditionals, and two operations on their gradients.

`pullback` turns one number per edge into sum_edges c(edge) d log pi(edge) / d theta, the form of any expected gradient;
`squared_norms` takes the same sum per response, for second moments. The parameters are one vector.

Letters beyond theory/exact/tree.py: F features of a prefix, Q parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.exact.tree import Paths, PrefixTree
from theory.temperature import tempered


@runtime_checkable
class TreePolicy(Protocol):
    """A policy with parameters, on every node of a tree."""

    @property
    def tree(self) -> PrefixTree:
        """The tree of its responses."""
        ...

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge, one float64 array per depth."""
        ...

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        ...

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """||sum_t c_t grad log pi_t||^2 of each path."""
        ...


def _residuals(cotangents_nV: Tensor, logp_nV: Tensor) -> Tensor:
    """Cotangents on log-probabilities as cotangents on logits: c - pi sum(c)."""
    return cotangents_nV - logp_nV.exp() * cotangents_nV.sum(1, keepdim=True)


@dataclass(frozen=True)
class TabularPolicy:
    """Free logits at every node: no parameter is shared, so gradients of different nodes are orthogonal.

    pi is the softmax of the logits over the temperature.
    """

    tree: PrefixTree
    logits: tuple[Float[Tensor, "_n V"], ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        shapes = [tuple(x.shape) for x in self.logits]
        expected = [(n, self.tree.num_tokens) for n in self.tree.sizes]
        if shapes != expected:
            raise ValueError(f"expected logits of shapes {expected}, got {shapes}")

    @staticmethod
    def random(
        tree: PrefixTree, generator: torch.Generator, scale: float = 1.0, temperature: float = 1.0
    ) -> TabularPolicy:
        """Independent logits ~ N(0, scale^2)."""
        draw = [torch.randn(n, tree.num_tokens, generator=generator, dtype=torch.float64) for n in tree.sizes]
        return TabularPolicy(tree, tuple(scale * x for x in draw), temperature)

    @property
    def parameters(self) -> Float[Tensor, " Q"]:
        """All logits, depth by depth."""
        return torch.cat([x.reshape(-1) for x in self.logits])

    def moved(self, step: Float[Tensor, " Q"]) -> TabularPolicy:
        """The policy at parameters + step."""
        sizes = [x.numel() for x in self.logits]
        parts = step.split(sizes)
        moved = [x + part.view_as(x) for x, part in zip(self.logits, parts, strict=True)]
        return TabularPolicy(self.tree, tuple(moved), self.temperature)

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge."""
        return [tempered(x, self.temperature).log_softmax(1) for x in self.logits]

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        pairs = zip(cotangents, self.logp(), strict=True)
        return torch.cat([_residuals(c, logp).reshape(-1) for c, logp in pairs]) / self.temperature

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """sum_t c_t^2 ||e_(y_t) - pi_t||^2 / temperature^2: the nodes of a path share no parameter."""
        # ||e_a - p||^2 = (1 - p_a)^2 + sum_(v != a) p_v^2, by expm1: 1 - p_a would lose the digits of a likely token.
        others_VV = 1.0 - torch.eye(self.tree.num_tokens, dtype=torch.float64)
        edges = [logp.expm1().square() + logp.exp().square() @ others_VV for logp in self.logp()]
        return (coefficients_BT.square() * self.tree.gather(edges, paths)).sum(1) / self.temperature**2


Features = Callable[[Int[Tensor, "n t"], PrefixTree], Float[Tensor, "n F"]]


def bigram(prefixes: Int[Tensor, "n t"], tree: PrefixTree) -> Float[Tensor, "n F"]:
    """One feature for each last token, and one for the empty prefix: parameters are shared over all positions."""
    # W, one past the last continuing token, stands for the empty prefix.
    last = prefixes[:, -1] if prefixes.shape[1] else torch.full((len(prefixes),), tree.num_continuing)
    return torch.nn.functional.one_hot(last, tree.num_continuing + 1).to(torch.float64)


def counts(prefixes: Int[Tensor, "n t"], tree: PrefixTree) -> Float[Tensor, "n F"]:
    """The features of `bigram`, and how often each token came before, as a share of T: a long memory, shared."""
    n, t = prefixes.shape
    histogram = torch.zeros(n, tree.num_continuing, dtype=torch.float64)
    if t:
        histogram.scatter_add_(1, prefixes, torch.ones(n, t, dtype=torch.float64))
    return torch.cat([bigram(prefixes, tree), histogram / tree.max_length], dim=1)


FEATURES: dict[str, Features] = {"bigram": bigram, "counts": counts}


# A few trees' worth: the policies of a study have one tree, and each is evaluated many times.
@lru_cache(maxsize=8)
def _of_nodes(features: Features, tree: PrefixTree) -> tuple[Float[Tensor, "_n F"], ...]:
    """The features of every node, one array per depth."""
    return tuple(features(tree.prefixes(t), tree) for t in range(tree.max_length))


@dataclass(frozen=True)
class LinearPolicy:
    """logits = features(prefix) @ theta, over the temperature: linear softmax, its parameters shared by every node."""

    tree: PrefixTree
    theta: Float[Tensor, "F V"]
    features: Features = bigram
    temperature: float = 1.0

    @staticmethod
    def random(
        tree: PrefixTree,
        generator: torch.Generator,
        scale: float = 1.0,
        features: Features = bigram,
        temperature: float = 1.0,
    ) -> LinearPolicy:
        """Independent entries of theta ~ N(0, scale^2)."""
        F = features(tree.prefixes(0), tree).shape[1]
        theta = scale * torch.randn(F, tree.num_tokens, generator=generator, dtype=torch.float64)
        return LinearPolicy(tree, theta, features, temperature)

    @property
    def parameters(self) -> Float[Tensor, " Q"]:
        """theta, row by row."""
        return self.theta.reshape(-1)

    def moved(self, step: Float[Tensor, " Q"]) -> LinearPolicy:
        """The policy at parameters + step."""
        return replace(self, theta=self.theta + step.view_as(self.theta))

    @property
    def _features(self) -> tuple[Float[Tensor, "_n F"], ...]:
        return _of_nodes(self.features, self.tree)

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge."""
        logits = (features_nF @ self.theta for features_nF in self._features)
        return [tempered(x, self.temperature).log_softmax(1) for x in logits]

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        total = torch.zeros_like(self.theta)
        for features_nF, c, logp in zip(self._features, cotangents, self.logp(), strict=True):
            total += features_nF.T @ _residuals(c, logp)
        return total.reshape(-1) / self.temperature

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """||sum_t c_t phi_t (e_(y_t) - pi_t)^T||^2 / temperature^2 of each path."""
        B, V = len(coefficients_BT), self.tree.num_tokens
        # Summed over steps before the square: nodes share parameters, so that their gradients are not orthogonal.
        total_BFV = torch.zeros(B, *self.theta.shape, dtype=torch.float64)
        for t, (features_nF, logp) in enumerate(zip(self._features, self.logp(), strict=True)):
            node_B, token_B = paths.nodes_BT[:, t], paths.tokens_BT[:, t]
            # At node 0 after the end, where the coefficient is 0.
            score_BV = torch.nn.functional.one_hot(token_B, V) - logp.exp()[node_B]
            total_BFV += torch.einsum("b,bf,bv->bfv", coefficients_BT[:, t], features_nF[node_B], score_BV)
        return total_BFV.flatten(1).square().sum(1) / self.temperature**2


@dataclass(frozen=True)
class JacobianPolicy:
    """Any policy whose log-probabilities and their Jacobian were computed elsewhere, such as a neural network's."""

    tree: PrefixTree
    values: tuple[Float[Tensor, "_n V"], ...]
    jacobians: tuple[Float[Tensor, "_n V Q"], ...]

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge."""
        return list(self.values)

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        parts = [torch.einsum("nv,nvq->q", c.to(J), J) for c, J in zip(cotangents, self.jacobians, strict=True)]
        return torch.stack(parts).sum(0)

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """||sum_t c_t grad log pi_t||^2 of each path."""
        Q = self.jacobians[0].shape[2]
        # At most 2^24 numbers at a time, whatever the number of parameters.
        size = max(1, 2**24 // Q)
        norms = []
        for start in range(0, len(coefficients_BT), size):
            rows = slice(start, start + size)
            # In the Jacobian's own type, which may be float32; widened for the sum of squares.
            total_BQ = torch.zeros(len(coefficients_BT[rows]), Q, dtype=self.jacobians[0].dtype)
            for t, J in enumerate(self.jacobians):
                edge_BQ = J[paths.nodes_BT[rows, t], paths.tokens_BT[rows, t]]
                total_BQ += coefficients_BT[rows, t, None].to(J) * edge_BQ
            norms.append(total_BQ.double().square().sum(1))
        return torch.cat(norms)
