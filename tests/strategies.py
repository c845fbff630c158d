"""Hypothesis strategies that the laws share, each with the corners where formulas break.

Letters: B responses, T positions, V vocabulary, P prompts, G responses per prompt, R router rows, E experts, K slots.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.objective_batches import Batch


@functools.cache  # a strategy is checked when it is first drawn from
def reals(*shape: int, low: float = -3.0, high: float = 3.0) -> st.SearchStrategy[Tensor]:
    """A float64 tensor of numbers in [low, high]: uniform, and one in six 0, an end, or equal to the first.

    All of it is one draw of bytes, five a number: a draw a number takes several times as long as most laws do.
    """
    count = math.prod(shape)
    return st.binary(min_size=5 * count, max_size=5 * count).map(lambda raw: _decoded(raw, shape, low, high))


def _decoded(raw: bytes, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    """A number's first byte says what it is (0 to 43: see above), the other four which, in steps of 2^-32."""
    bytes_N5 = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 5)
    kind_N = bytes_N5[:, 0] // 11
    x_N = low + (high - low) * (np.ascontiguousarray(bytes_N5[:, 1:]).view("<u4")[:, 0] / 2.0**32)
    for kind, value in enumerate((min(max(0.0, low), high), low, high, x_N[:1])):
        x_N = np.where(kind_N == kind, value, x_N)
    return torch.from_numpy(x_N.reshape(shape))


@functools.cache
def booleans(*shape: int) -> st.SearchStrategy[Tensor]:
    """A tensor of fair coins."""
    count = math.prod(shape)
    return st.binary(min_size=count, max_size=count).map(
        lambda raw: torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).reshape(shape) % 2 == 1)
    )


# ---- policies --------------------------------------------------------------------------------------------------------


@st.composite
def logits(draw: st.DrawFn, num_tokens: int, *batch: int, forbidding: bool = True) -> Tensor:
    """Logits (*batch, V): generic, all equal, near-deterministic, tied, or with -inf in some tokens, not in all."""
    corner = draw(st.sampled_from(["generic", "equal", "deterministic", "tied", *["forbidden"] * forbidding]))
    x = draw(reals(*batch, num_tokens))
    favourite = draw(st.integers(0, num_tokens - 1))
    if corner == "equal":
        x = torch.zeros_like(x)
    elif corner == "deterministic":
        x = x + 40.0 * (torch.arange(num_tokens) == favourite)
    elif corner == "tied":
        x = x.round()
    elif corner == "forbidden":
        forbidden = draw(booleans(num_tokens))
        forbidden[favourite] = False
        x = torch.where(forbidden, -math.inf, x)
    return x


@st.composite
def policy_pairs(draw: st.DrawFn, num_tokens: int, *batch: int, forbidding: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of two policies over the same tokens: independent, equal, or a small step apart."""
    p = draw(logits(num_tokens, *batch, forbidding=forbidding))
    how = draw(st.sampled_from(["independent", "equal", "near"]))
    if how == "independent":
        return p, draw(logits(num_tokens, *batch, forbidding=forbidding))
    step = draw(reals(*batch, num_tokens, low=-1e-3, high=1e-3)) if how == "near" else torch.zeros_like(p)
    return p, p + step


@st.composite
def router_logits(draw: st.DrawFn, num_rows: int = 4) -> tuple[Tensor, int]:
    """Router logits (R, E) and K: generic, or tied within and across the top-k; E = K and K = 1 among them."""
    num_experts = draw(st.integers(1, 6))
    num_slots = draw(st.one_of(st.just(1), st.just(num_experts), st.integers(1, num_experts)))
    x = draw(reals(num_rows, num_experts))
    how = draw(st.sampled_from(["generic", "tied", "equal"]))
    return {"generic": x, "tied": x.round(), "equal": torch.zeros_like(x)}[how], num_slots


# ---- rewards and masks -----------------------------------------------------------------------------------------------


@st.composite
def rewards(draw: st.DrawFn, min_responses: int = 2) -> Tensor:
    """Rewards (P, G): binary, real, or a group of one and the same value."""
    P, G = draw(st.integers(1, 3)), draw(st.integers(min_responses, 6))
    how = draw(st.sampled_from(["binary", "real", "equal"]))
    if how == "real":
        return draw(reals(P, G))
    if how == "binary":
        return draw(booleans(P, G)).double()
    return draw(reals(P, 1)).expand(P, G).clone()


@st.composite
def masks(draw: st.DrawFn, B: int, T: int) -> Tensor:
    """is_response (B, T): ragged from the left, full of holes, full, or one token; some rows may be empty."""
    how = draw(st.sampled_from(["ragged", "holes", "full", "one"]))
    if how == "holes":
        mask = draw(booleans(B, T))
    else:
        smallest = {"ragged": 0, "full": T, "one": 1}[how]
        largest = {"ragged": T, "full": T, "one": 1}[how]
        lengths = torch.tensor(draw(st.lists(st.integers(smallest, largest), min_size=B, max_size=B)))
        mask = torch.arange(T) < lengths[:, None]
    return mask


# ---- batches of sampled tokens ---------------------------------------------------------------------------------------


class Gaps(NamedTuple):
    """The largest distance of old from mu and of pi from old, in nats per token."""

    engine: float
    staleness: float


CORNERS = {
    "generic": Gaps(0.5, 0.5),
    "wide": Gaps(2.0, 2.0),
    "equal": Gaps(0.0, 0.0),
    "on_policy": Gaps(0.5, 0.0),
    "one_engine": Gaps(0.0, 0.5),
    "near": Gaps(1e-6, 1e-6),
    "extreme": Gaps(25.0, 25.0),
}
"""Extreme gaps stay such that the product of five tokens' weights and ratios is a finite float64."""

MODERATE = tuple(corner for corner in CORNERS if corner != "extreme")
"""The corners at which formulas on lists and on tensors round alike."""


@st.composite
def batches(draw: st.DrawFn, *, corners: tuple[str, ...] = tuple(CORNERS), B: int = 4, T: int = 5) -> Batch:
    """Sampled tokens with mu, old, pi, an advantage per response and a mask; log-probabilities are at most 0.

    One in four is near-deterministic: log-probabilities of -1e-9 and less.
    """
    gaps = CORNERS[draw(st.sampled_from(corners))]
    if draw(st.integers(0, 3)) == 0:
        mu, gaps = -draw(reals(B, T, low=0.0, high=1e-9)), Gaps(min(gaps.engine, 1e-9), min(gaps.staleness, 1e-9))
    else:
        mu = -draw(reals(B, T, low=0.0, high=3.0))
    old = (mu + draw(reals(B, T, low=-gaps.engine, high=gaps.engine))).clamp(max=0.0)
    pi = (old + draw(reals(B, T, low=-gaps.staleness, high=gaps.staleness))).clamp(max=0.0)
    advantages = draw(reals(B, low=-2.0, high=2.0))
    # Times a small weight, an advantage near 1e-308 is subnormal, where a product keeps fewer digits.
    advantages = torch.where(advantages.abs() < 1e-100, 0.0, advantages)
    return Batch(pi, old, mu, advantages, draw(masks(B, T)))


@dataclass(frozen=True)
class Cut:
    """An order of the rows of a batch, and where it is cut in two."""

    order: Tensor
    at: int


@st.composite
def cuts(draw: st.DrawFn, B: int = 4) -> Cut:
    """Any order of B rows, cut anywhere: an empty part is one of the cuts."""
    order = draw(st.permutations(range(B)))
    return Cut(torch.tensor(order), draw(st.integers(0, B)))
