"""A small network as a policy on a tree: nothing is linear and every parameter is shared, as in a language model.

One hidden layer of tanh reads the context and all tokens so far. One pass gives the log-probabilities of all nodes, and
its graph any number of pullbacks. Letters: theory/exact/policies.py; C contexts, N all nodes, H hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from theory.exact.forest import Forest
from theory.exact.tree import Paths, PrefixTree
from theory.temperature import tempered

CHUNK = 8192
"""Paths whose norms are computed at a time."""


def placed(prefixes: Int[Tensor, "n t"], forest: PrefixTree) -> Float[Tensor, "n F"]:
    """One-hot features of every node of a depth: its prompt, the prompt's opening, its depth, and each token so far.

    Positions still to come are 0. Raises ValueError for a tree without contexts.
    """
    if not isinstance(forest, Forest):
        raise ValueError(f"placed: expected a forest, whose nodes have a context, got {type(forest).__name__}")
    V, T = forest.num_tokens, forest.max_length
    n, t = prefixes.shape
    prompts_C = torch.tensor(forest.prompts)
    # An opening's number is the count of earlier contexts with its prompt.
    same_CC = (prompts_C[:, None] == prompts_C).long()
    openings_C = same_CC.tril().sum(1) - 1
    known_CF = torch.cat([one_hot(prompts_C), one_hot(openings_C)], dim=1)
    later = torch.zeros(n, (T - t) * V, dtype=torch.int64)
    depth = one_hot(torch.full((n,), t), T)
    tokens = one_hot(prefixes, V).flatten(1)
    return torch.cat([known_CF[forest.context_of_node(t)], depth, tokens, later], dim=1).double()


def node_features(forest: Forest) -> Float[Tensor, "N F"]:
    """`placed` of every node, depth by depth."""
    return torch.cat([placed(forest.prefixes(t), forest) for t in range(forest.max_length)])


@dataclass(frozen=True)
class NetworkPolicy:
    """logits = tanh(features W + b) U + c, over the temperature; `parameters` are W, b, U and c in one vector."""

    tree: Forest
    parameters: Float[Tensor, " Q"]
    inputs: Float[Tensor, "N F"]
    num_hidden: int
    temperature: float = 1.0

    @staticmethod
    def random(
        forest: Forest, generator: torch.Generator, scale: float = 1.0, num_hidden: int = 32, temperature: float = 1.0
    ) -> NetworkPolicy:
        """Entries of W ~ N(0, 2/F), of U ~ N(0, scale^2/H), which gives logits of about that scale; b and c are 0."""
        inputs = node_features(forest)
        F, H, V = inputs.shape[1], num_hidden, forest.num_tokens
        W = torch.randn(F, H, generator=generator, dtype=torch.float64) * (2 / F) ** 0.5
        U = torch.randn(H, V, generator=generator, dtype=torch.float64) * scale / H**0.5
        flat = torch.cat([W.reshape(-1), torch.zeros(H).double(), U.reshape(-1), torch.zeros(V).double()])
        return NetworkPolicy(forest, flat, inputs, num_hidden, temperature)

    def moved(self, step: Float[Tensor, " Q"]) -> NetworkPolicy:
        """The policy at parameters + step."""
        return replace(self, parameters=self.parameters + step)

    @cached_property
    def _graph(self) -> tuple[Float[Tensor, " Q"], Float[Tensor, "N V"]]:
        """The parameters as a leaf, and log pi of every node as a function of them."""
        # A leaf of its own: the policy's parameters stay plain numbers.
        leaf = self.parameters.detach().clone().requires_grad_()
        F, H, V = self.inputs.shape[1], self.num_hidden, self.tree.num_tokens
        W, b, U, c = leaf.split([F * H, H, H * V, V])
        hidden = torch.tanh(torch.addmm(b, self.inputs, W.view(F, H)))
        return leaf, tempered(torch.addmm(c, hidden, U.view(H, V)), self.temperature).log_softmax(1)

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge."""
        return list(self._graph[1].detach().split(list(self.tree.sizes)))

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        # The graph is kept for the next pullback.
        leaf, logp_NV = self._graph
        return torch.autograd.grad(logp_NV, leaf, torch.cat(list(cotangents)), retain_graph=True)[0]

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """||sum_t c_t grad log pi_t||^2 of each path.

        grad log pi_t has the parts r h^T and r of U and c, d x^T and d of W and b: h the hidden units,
        r = (e_y - pi) / temperature, d = (1 - h^2) U r. So the inner product of two tokens' gradients is
        (h.h' + 1)(r.r') + (x.x' + 1)(d.d'), and no gradient is formed.
        """
        F, H, V = self.inputs.shape[1], self.num_hidden, self.tree.num_tokens
        W, b, U, _ = self.parameters.split([F * H, H, H * V, V])
        hidden_NH, logp_NV = torch.tanh(torch.addmm(b, self.inputs, W.view(F, H))), torch.cat(self.logp())
        norms = []
        for nodes_BT, tokens_BT, c_BT in zip(
            (paths.nodes_BT + self.tree.first_nodes_T).split(CHUNK),
            paths.tokens_BT.split(CHUNK),
            coefficients_BT.double().split(CHUNK),
            strict=True,
        ):
            h_BTH, x_BTF = hidden_NH[nodes_BT], self.inputs[nodes_BT]
            # After the end c is 0: node 0 stands there, and adds nothing.
            r_BTV = c_BT[..., None] / self.temperature * (one_hot(tokens_BT, V) - logp_NV[nodes_BT].exp())
            d_BTH = (1 - h_BTH.square()) * (r_BTV @ U.view(H, V).T)
            outer = (h_BTH @ h_BTH.mT + 1) * (r_BTV @ r_BTV.mT)
            norms.append((outer + (x_BTF @ x_BTF.mT + 1) * (d_BTH @ d_BTH.mT)).sum((1, 2)))
        return torch.cat(norms)
