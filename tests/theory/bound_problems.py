"""Exact problems that the tests of theory/bounds share: random ones with the corners, and the page of docs/bounds.md.

Letters: theory/exact/tree.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from theory.bounds import BOUNDS, Bound
from theory.exact.levels import disturbed, logit_noise
from theory.exact.policies import LinearPolicy, TabularPolicy, TreePolicy, bigram, counts
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree
from theory.streams import stream

DISTANCES = ("apart", "near", "equal", "sharp", "discrepancy", "staleness", "forbidden")
KINDS = ("tabular", "bigram", "counts")


def draw_policy(kind: str, tree: PrefixTree, generator: torch.Generator, scale: float) -> TreePolicy:
    """Free logits at every prefix, or logits linear in features that prefixes share."""
    if kind == "tabular":
        return TabularPolicy.random(tree, generator, scale)
    return LinearPolicy.random(tree, generator, scale, bigram if kind == "bigram" else counts)


def draw_problem(kind: str, distance: str, seed: int, V: int, T: int, has_end: bool, rewards: str) -> Problem:
    """pi, old and mu as far apart as `distance` says; "forbidden" takes tokens from pi alone, and from all three.

    "discrepancy" has old = pi, "staleness" old = mu, "near" steps from 1 to 1e-8, "sharp" near-certain tokens.
    """
    generator = stream(seed, "bound problem", kind, distance)
    tree = PrefixTree(V, T, has_end)
    pi = draw_policy(kind, tree, generator, 8.0 if distance == "sharp" else 1.0)
    scale = 10.0 ** (-8 * float(torch.rand((), generator=generator))) if distance == "near" else 1.0
    scale = {"equal": 0.0, "sharp": 4.0}.get(distance, scale)
    logp = pi.logp()
    old = disturbed(logp, logit_noise(tree, generator), 0.0 if distance == "discrepancy" else scale)
    mu = disturbed(old, logit_noise(tree, generator), 0.0 if distance == "staleness" else scale)
    if distance == "forbidden":
        pi, old, mu = _forbid(pi, old, mu, generator)
    reward_Y = {
        "levels": torch.randint(3, (tree.num_responses,), generator=generator).double() / 2,
        "signed": torch.randint(-1, 2, (tree.num_responses,), generator=generator).double(),
        "constant": torch.full((tree.num_responses,), 0.7),
        "normal": torch.randn(tree.num_responses, generator=generator),
    }[rewards]
    return Problem(pi, mu, old, reward_Y)


def _forbid(pi: TreePolicy, old: list[Tensor], mu: list[Tensor], generator: torch.Generator) -> tuple:
    """Token 0 never at depth 0 under pi, old and mu; token 1 never at the last depth under pi. Others stay."""
    logits = [x.clone() for x in pi.logp()]
    logits[0][:, 0] = old[0][:, 0] = mu[0][:, 0] = -math.inf
    if len(logits) > 1:
        logits[-1][:, 1] = -math.inf
    renormalised = [[x.log_softmax(1) for x in edges] for edges in (old, mu)]
    return TabularPolicy(pi.tree, tuple(logits)), *renormalised


@dataclass(frozen=True)
class Case:
    """The seed of a problem: short to print, and the same problem every time."""

    kind: str
    distance: str
    seed: int
    V: int
    T: int
    has_end: bool
    rewards: str

    @property
    def problem(self) -> Problem:
        return draw_problem(**asdict(self))


@st.composite
def cases(draw: st.DrawFn, *rewards: str, forbidding: bool = False) -> Case:
    """Trees of 2 to 4 tokens and 1 to 5 steps, with and without an end; policies of every kind and distance."""
    has_end = draw(st.booleans())
    V = draw(st.integers(3 if has_end else 2, 4))
    # At most 81 responses or so: every example computes all bounds, and 81 show what 1000 do.
    T = draw(st.integers(1, {2: 5, 3: 4, 4: 3}[V]))
    distance = draw(st.sampled_from(DISTANCES if forbidding else DISTANCES[:-1]))
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 9999))
    return Case(kind, distance, seed, V, T, has_end, draw(st.sampled_from(rewards)))


def assert_holds(bound: Bound) -> None:
    """lhs <= rhs up to rounding, lhs >= 0, no NaN on either side, and the bound bears the name that it is found by."""
    assert bound.name in BOUNDS, bound.name
    # Sums of at most 4^5 float64 terms of order one; the largest excess seen is in the tests' docstrings.
    tolerance = 1e-12 * (1 + float(bound.lhs.abs().max()))
    assert bool(bound.holds(tolerance).all()), bound
    assert bool((bound.lhs >= -tolerance).all()), bound


def two_steps(delta: float) -> Problem:
    """Two steps of two tokens, pi even; mu leaves 1/2 by delta at the second step. R follows the sign of (W - w_1) g_1.

    All that the first-order gap's bounds give away is then nothing.
    """
    tree = PrefixTree(2, 2)
    pi = TabularPolicy(tree, (torch.zeros(1, 2), torch.zeros(2, 2)))
    half = torch.full((1, 2), 0.5)
    mu = [half.log(), torch.tensor([[0.5 + delta, 0.5 - delta]] * 2).log()]
    # Responses 00, 01, 10, 11: W < 1 after token 0, and g_1 changes its sign with the first token.
    return Problem(pi, mu, mu, torch.tensor([-1.0, 1.0, 1.0, -1.0]))


def one_step(pi: list[float], mu: list[float], rewards: list[float], old: list[float] | None = None) -> Problem:
    """A single token: pi, mu and old by their probabilities."""
    tree = PrefixTree(len(pi), 1)
    logs = [torch.tensor([x]).log() for x in (pi, mu, mu if old is None else old)]
    return Problem(TabularPolicy(tree, (logs[0],)), [logs[1]], [logs[2]], torch.tensor(rewards))
