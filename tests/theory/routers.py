"""Pairs of routers, kernels and their corners, which the tests of theory/bounds share.

Letters beyond theory/contracts.py: A routes of one token.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import policy_pairs
from theory.streams import stream

ROUNDING = 1e-13
"""Float64 sums of at most 4^6 terms of order one: lhs - rhs was at most 1.3e-15 in 6,000 examples, times 75."""

seeds = st.integers(0, 9999)


@st.composite
def router_pairs(
    draw: st.DrawFn, tokens: tuple[int, int] = (1, 3), layers: tuple[int, int] = (1, 3), most_experts: int = 4
) -> tuple[Tensor, Tensor]:
    """Logits (T, L, E) of two routers: apart, equal or near; tied, near-certain, with forbidden experts; E = 1 too."""
    T, L, E = draw(st.integers(*tokens)), draw(st.integers(*layers)), draw(st.integers(1, most_experts))
    return draw(policy_pairs(E, T, L, forbidding=True))


def draw_logits(seed: int, *shape: int) -> Tensor:
    """Standard normal logits."""
    return torch.randn(shape, generator=stream(seed, "logits"))


def draw_kernels(seed: int, *shape: int) -> Tensor:
    """Random kernels around a random mean."""
    generator = stream(seed, "kernels")
    return torch.randn(shape, generator=generator) + 3 * torch.randn(shape[-1], generator=generator)


def bernoulli(*heads: float) -> Tensor:
    """Logits of two experts per layer, the first of which has the given probability; the shape is (layers, 2)."""
    p = torch.tensor(heads)
    return torch.stack([p, 1 - p], dim=-1).log()


def opposite(p_A: Tensor, q_A: Tensor) -> Tensor:
    """The worst kernels: +1 on routes that p prefers, -1 on the others."""
    return torch.where(p_A >= q_A, 1.0, -1.0)[..., None]
