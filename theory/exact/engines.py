"""Errors of an inference engine, as maps from the policy that was rolled out to the mu that sampled.

Each error has a dial, 0 for none, which is set once, at the first policy, so that mu starts at a stated distance;
training then changes the distance. An error of fresh noise has many mu, all equally likely.

Letters: theory/exact/tree.py. Paper: MiniRL (arXiv 2512.01374) Eq. 5 and sec. 4.3, whose FP8 engine these take apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from theory.exact.levels import Edges, disturbed, logit_noise, scale_at, token_kl
from theory.exact.policies import TreePolicy
from theory.exact.tree import PrefixTree
from theory.names import unknown_name


@runtime_checkable
class MovablePolicy(TreePolicy, Protocol):
    """A policy that can be trained: its parameters are one vector, and `moved` gives the policy at others."""

    @property
    def parameters(self) -> Float[Tensor, " Q"]:
        """The parameters."""
        ...

    def moved(self, step: Float[Tensor, " Q"]) -> MovablePolicy:
        """The policy at parameters + step."""
        ...


def _itself(policy: MovablePolicy) -> TreePolicy:
    return policy


@dataclass(frozen=True)
class Rollout:
    """All responses of one mu: the policies that sampled and scored them, and the one whose gradients are taken.

    `trained(pi)` is the policy whose gradients an update takes at pi's weights: pi itself, or pi under routes that are
    replayed. `router_shift(pi)` is the distance of its routers from old's at every node, in nats; None without routers.
    """

    logp_mu: Edges
    logp_old: Edges
    trained: Callable[[MovablePolicy], TreePolicy] = _itself
    router_shift: Callable[[MovablePolicy], Sequence[Float[Tensor, " _n"]] | None] = lambda policy: None


@runtime_checkable
class RollsOut(Protocol):
    """An engine of exact training."""

    def roll_out(self, sampling: MovablePolicy, policy: MovablePolicy) -> Sequence[Rollout]:
        """The rollouts of an engine that holds the weights of `sampling`, for a trainer that is at `policy`.

        Each is as likely as the others: there is one for every draw of an engine's noise.
        """
        ...

    def learn(self, rollouts: Sequence[Rollout], trained: Sequence[TreePolicy]) -> float | None:
        """One step, on each rollout's trained policy, of whatever learns beside the policy, such as a route predictor.

        Returns its loss before the step; None where nothing learns. Called at every update on a rollout but the first.
        """
        ...


@dataclass(frozen=True)
class Engine:
    """An engine error with its dial set. `samplers(policy)` are the mu of one rollout, each as likely as the others."""

    name: str
    scale: float
    samplers: Callable[[MovablePolicy], Sequence[Edges]]

    def roll_out(self, sampling: MovablePolicy, policy: MovablePolicy) -> list[Rollout]:
        """A rollout from every sampler; gradients are those of the policy itself."""
        # The trainer scores with its present weights, so that an engine's lag is part of mu's distance from old.
        old = policy.logp()
        return [Rollout(mu, old) for mu in self.samplers(sampling)]

    def learn(self, rollouts: Sequence[Rollout], trained: Sequence[TreePolicy]) -> None:
        """Nothing: no part of these errors learns."""


Dial = Callable[[MovablePolicy, float], Sequence[Edges]]
"""The samplers of a policy at a scale >= 0."""

NUM_DRAWS = 16
"""Samplers of an engine with fresh noise; the trajectory states the standard error that so few leave."""


def _fixed(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """log p + scale e, e a normal draw per edge, made once: an error that depends on the context and never changes."""
    noise = logit_noise(first.tree, generator)
    return lambda policy, scale: [disturbed(policy.logp(), noise, scale)]


def _fresh(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """The same with new noise in every pass: the expectation over it is a mean over NUM_DRAWS draws."""
    # Drawn once, so that an engine that is asked again for the same policy gives the same mu.
    noises = [logit_noise(first.tree, generator) for _ in range(NUM_DRAWS)]
    return lambda policy, scale: [disturbed(policy.logp(), noise, scale) for noise in noises]


def _low_rank(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """log p + scale a(node) b: every context errs along one direction of the vocabulary, by its own amount."""
    V = first.tree.num_tokens
    along_V = torch.randn(V, generator=generator, dtype=torch.float64)
    noise = [torch.randn(n, 1, generator=generator, dtype=torch.float64) * along_V for n in first.tree.sizes]
    return lambda policy, scale: [disturbed(policy.logp(), noise, scale)]


def _shared(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """log p + scale b: the same error in every context, as from a wrong bias of the last layer."""
    along_V = torch.randn(first.tree.num_tokens, generator=generator, dtype=torch.float64)
    noise = [along_V.expand(n, -1) for n in first.tree.sizes]
    return lambda policy, scale: [disturbed(policy.logp(), noise, scale)]


def _weights(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """The policy at theta + scale e, e one normal draw per parameter, made once."""
    noise = torch.randn(first.parameters.shape, generator=generator, dtype=torch.float64)
    return lambda policy, scale: [policy.moved(scale * noise).logp()]


def _sharper(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """(1 + scale) log p: a temperature below 1 that the trainer does not know of."""
    return lambda policy, scale: [_tempered(policy.logp(), 1 + scale)]


def _flatter(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """log p / (1 + scale): a temperature above 1 that the trainer does not know of."""
    return lambda policy, scale: [_tempered(policy.logp(), 1 / (1 + scale))]


def _top_p(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """The likeliest tokens that hold a share 1 - scale of the probability, renormalised; the others are not sampled."""
    return lambda policy, scale: [[_nucleus(logp_nV, 1 - scale) for logp_nV in policy.logp()]]


def _rounded(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """theta rounded to a grid whose step is scale times its largest entry: INT8 is 1/127, INT4 1/7."""
    return lambda policy, scale: [_on_grid(policy, scale * policy.parameters.abs().max())]


def _floating(first: MovablePolicy, generator: torch.Generator) -> Dial:
    """theta rounded to a floating grid whose step is scale times the power of two below each entry: FP8 is 1/8 (E4M3)
    or 1/4 (E5M2), here without a smallest or a largest exponent.
    """

    def samplers(policy: MovablePolicy, scale: float) -> list[Edges]:
        theta = policy.parameters
        # frexp's mantissa is in [1/2, 1), so that the power of two below an entry is half of 2^exponent.
        step = torch.ldexp(torch.full_like(theta, scale / 2), torch.frexp(theta).exponent)
        return [_on_grid(policy, step)]

    return samplers


ERRORS: dict[str, Callable[[MovablePolicy, torch.Generator], Dial]] = {
    "fixed": _fixed,
    "fresh": _fresh,
    "low_rank": _low_rank,
    "shared": _shared,
    "weights": _weights,
    "sharper": _sharper,
    "flatter": _flatter,
    "top_p": _top_p,
    "rounded": _rounded,
    "floating": _floating,
}
"""The engine errors by name; a draw of each is made once, from the generator."""

BY_SCALE = ("top_p", "rounded", "floating")
"""The errors whose KL jumps as tokens or weights change: they are set by a scale, not by a level."""


def engine(name: str, scale: float, first: MovablePolicy, generator: torch.Generator) -> Engine:
    """The named error at this scale; "exact" is none, whatever the scale. Raises ValueError for an unknown name."""
    if name == "exact":
        return Engine(name, 0.0, lambda policy: [policy.logp()])
    if name not in ERRORS:
        raise unknown_name("engine error", name, ("exact", *ERRORS))
    if not scale >= 0:
        raise ValueError(f"{name}: expected a scale >= 0, got {scale}")
    dial = ERRORS[name](first, generator)
    return Engine(name, scale, lambda policy: dial(policy, scale))


def engine_at(name: str, level: float, first: MovablePolicy, generator: torch.Generator) -> Engine:
    """The named error at the scale where KL(mu || pi) of the first policy is `level`, nats per token.

    Raises ValueError for an error that steps over levels as it grows (BY_SCALE).
    """
    if name in BY_SCALE:
        raise ValueError(f"{name}: expected a scale, since its KL jumps as tokens or weights change; got level {level}")
    if name == "exact":
        return engine(name, 0.0, first, generator)
    if name not in ERRORS:
        raise unknown_name("engine error", name, ("exact", *ERRORS))
    # One dial for the search and the engine: another draw of noise would be at another distance.
    dial, logp = ERRORS[name](first, generator), first.logp()

    def distance(scale: float) -> float:
        return mean_kl(first.tree, dial(first, scale), logp)

    scale = scale_at(distance, level)
    return Engine(name, scale, lambda policy: dial(policy, scale))


def mean_kl(tree: PrefixTree, samplers: Sequence[Edges], logp: Edges) -> float:
    """The mean of KL(mu || pi) per token over the samplers, nats."""
    return sum(token_kl(tree, mu, logp) for mu in samplers) / len(samplers)


def _on_grid(policy: MovablePolicy, step: Float[Tensor, "*Q"]) -> Edges:
    """log pi at theta rounded to multiples of `step`, one for all entries or one for each."""
    theta = policy.parameters
    # A step of 0, as at scale 0, is no rounding, and nothing can be divided by it.
    rounded = torch.where(step > 0, (theta / step).round() * step, theta)
    return policy.moved(rounded - theta).logp()


def _tempered(logp: Edges, factor: float) -> list[Float[Tensor, "_n V"]]:
    return [(factor * logp_nV).log_softmax(1) for logp_nV in logp]


def _nucleus(logp_nV: Float[Tensor, "n V"], share: float) -> Float[Tensor, "n V"]:
    ordered_nV, order_nV = logp_nV.sort(dim=1, descending=True)
    # The mass in front of a token, so that the one that reaches the share stays.
    before_nV = ordered_nV.exp().cumsum(1) - ordered_nV.exp()
    # The likeliest token always stays, also at a share of 0, where the comparison would drop it.
    # A share of 1 drops nothing: rounding may put the mass in front of a rare token at 1.
    cut_nV = torch.where((before_nV < share) | (share == 1), ordered_nV, -math.inf)
    cut_nV[:, 0] = ordered_nV[:, 0]
    # empty_like: order_nV is a permutation, so that every place is written.
    return torch.empty_like(logp_nV).scatter_(1, order_nV, cut_nV).log_softmax(1)
