"""The cases of an audit: each is one policy with one reward, as a function from the two distances to a problem.

A builder makes them from a block of the config; this file has those of tabular and linear policies, a world adds more.
Paper: MiniRL (arXiv 2512.01374) Eq. 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lab.audit.config import AuditConfig, DiscrepancyBlock, LinearPolicies, TabularPolicies
from theory.exact.levels import REWARDS, Edges, disturbed, logit_noise, scale_at, token_kl
from theory.exact.policies import FEATURES, LinearPolicy, TabularPolicy
from theory.exact.problem import Problem, true_gradient
from theory.exact.tree import PrefixTree
from theory.streams import stream

MAX_REWARDS = 256
"""Most distinct rewards for groups of a finite size: each has its own mean gradient."""

MAX_DRAWS = 100
"""Most draws of a reward until it is not constant."""


@dataclass(frozen=True)
class Case:
    """One policy with one reward. `problem(discrepancy, staleness)` sets both distances, KL in nats per token.

    0 is no gap; a discrepancy of inf is the engine itself, if it has no dial. `keys` are its columns in the dataframe,
    `levels` the requested pairs of distances, `labels` the objectives.
    """

    keys: Mapping[str, Any]
    levels: Sequence[tuple[float, float]]
    labels: Sequence[str]
    problem: Callable[[float, float], Problem]


@dataclass(frozen=True)
class Cases:
    """The cases of one block of policies, and their number."""

    total: int
    each: Iterator[Case]


Builder = Callable[[AuditConfig, Any], Cases]


Block = TabularPolicies | LinearPolicies
Policy = TabularPolicy | LinearPolicy


def exact_cases(config: AuditConfig, block: Block) -> Cases:
    """Random policies, each with the noise, the direction and the rewards of its own seed."""
    discrepancy = block.discrepancy or config.discrepancy
    levels = [(d, s) for d in discrepancy.token_kl for s in config.staleness.token_kl]
    labels = [objective.name for objective in config.objectives_of(block)]

    def each() -> Iterator[Case]:
        for tree in block.trees():
            for seed in range(block.seeds):
                for reward in config.rewards:
                    keys = {"policy": block.label, "kind": block.label.partition(",")[0]} | tree_keys(tree)
                    # Two cases with equal keys would share the random stream of their groups (run.py).
                    keys |= {"seed": seed, "reward": reward, "engine": f"noise on {discrepancy.kind}", "mode": "none"}
                    yield Case(keys, levels, labels, _problem(config, block, tree, seed, reward))

    return Cases(len(block.lengths) * block.seeds * len(config.rewards), each())


def tree_keys(tree: PrefixTree) -> dict[str, Any]:
    """The columns that identify the tree."""
    return {"num_tokens": tree.num_tokens, "has_end": tree.has_end, "length": tree.max_length}


def draw_reward(config: AuditConfig, tree: PrefixTree, name: str, generator: torch.Generator) -> Float[Tensor, " Y"]:
    """The named reward of every response, drawn until it is not constant: a constant one has no gradient.

    Raises ValueError if it has too many distinct values to enumerate finite groups, and if it stays constant.
    """
    for _ in range(MAX_DRAWS):
        reward_Y = REWARDS[name](tree, generator)
        if reward_Y.min() < reward_Y.max():
            break
    else:
        raise ValueError(f"rewards: expected '{name}' to differ between responses, got {MAX_DRAWS} constant draws")
    num = len(reward_Y.unique())
    if num > MAX_REWARDS and any(group.size != "infinite" for group in config.groups):
        raise ValueError(
            f"rewards: expected at most {MAX_REWARDS} distinct rewards, got {num:,} of '{name}' at {tree.num_tokens} "
            f"tokens and length {tree.max_length}: shorten policies.lengths, or take infinite groups"
        )
    return reward_Y


def _problem(
    config: AuditConfig, block: Block, tree: PrefixTree, seed: int, reward: str
) -> Callable[[float, float], Problem]:
    """The problem of one policy and reward as a function of both distances."""
    names = (block.label, tree.max_length, seed)
    # A stream per part: another reward or distance leaves the policy and the noise as they are.
    old = _policy(block, tree, stream(config.seed, "audit", "policy", *names))
    logp_old = old.logp()
    reward_Y = draw_reward(config, tree, reward, stream(config.seed, "audit", "reward", reward, *names))
    engine = _engine(
        block.discrepancy or config.discrepancy, old, logp_old, stream(config.seed, "audit", "engine", *names)
    )
    learner = _learner(config, old, logp_old, reward_Y, stream(config.seed, "audit", "learner", *names))

    def problem(discrepancy: float, staleness: float) -> Problem:
        return Problem(learner(staleness), engine(discrepancy), logp_old, reward_Y)

    return problem


def _policy(block: Block, tree: PrefixTree, generator: torch.Generator) -> Policy:
    """A random policy at its temperature T, with parameters theta / T, whose gradients are T times as long."""
    scale = block.scale / (block.temperature or 1.0)
    if isinstance(block, TabularPolicies):
        return TabularPolicy.random(tree, generator, scale)
    return LinearPolicy.random(tree, generator, scale, FEATURES[block.features])


def _engine(
    discrepancy: DiscrepancyBlock, old: Policy, logp_old: Edges, generator: torch.Generator
) -> Callable[[float], Edges]:
    """mu at a given KL(mu || old), nats per token."""
    tree = old.tree
    if discrepancy.kind == "logits":
        noise = logit_noise(tree, generator)

        def at_scale(scale: float) -> Edges:
            return disturbed(logp_old, noise, scale)
    else:
        # One direction for every level, so that levels differ in distance alone.
        step_Q = _random_step(old, generator)

        def at_scale(scale: float) -> Edges:
            return old.moved(scale * step_Q).logp()

    # Cached: each discrepancy is paired with every staleness, and its scale is found by many evaluations.
    @cache
    def at_level(level: float) -> Edges:
        if level == 0:
            return logp_old
        return at_scale(_scale("discrepancy", lambda scale: token_kl(tree, at_scale(scale), logp_old), level))

    return at_level


def _learner(
    config: AuditConfig, old: Policy, logp_old: Edges, reward_Y: Tensor, generator: torch.Generator
) -> Callable[[float], Policy]:
    """pi at a given KL(old || pi), nats per token."""
    if config.staleness.direction == "random":
        step_Q = _random_step(old, generator)
    else:
        gradient_Q = true_gradient(Problem(old, logp_old, logp_old, reward_Y))
        # Scaled to the usual length of the random step, so that the bisection starts alike.
        step_Q = gradient_Q * math.sqrt(len(gradient_Q)) / gradient_Q.norm()

    @cache
    def at_level(level: float) -> Policy:
        if level == 0:
            return old

        def distance(scale: float) -> float:
            return token_kl(old.tree, logp_old, old.moved(scale * step_Q).logp())

        return old.moved(_scale("staleness", distance, level) * step_Q)

    return at_level


def _random_step(policy: Policy, generator: torch.Generator) -> Float[Tensor, " Q"]:
    return torch.randn(len(policy.parameters), generator=generator, dtype=torch.float64)


def _scale(name: str, distance: Callable[[float], float], level: float) -> float:
    try:
        return scale_at(distance, level)
    except ValueError as error:
        raise ValueError(f"{name}.token_kl: {error}") from error


BUILDERS: dict[str, Builder] = {"tabular": exact_cases, "linear": exact_cases}
"""The kinds of policies that need no world."""
