"""Conversations for the contract suite's tiny model: a task that answers, and engines that say what they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sandbox.engines.prefix_cache import CachedPrefix, PrefixCache
from sandbox.model import MoE
from tests.contracts import worlds
from theory.contracts import NamedTensors, Prompt, Response, RolloutEngine, Rollouts, Sampling
from theory.streams import stream

VOCABULARY = 5
"""So few tokens that a turn ends soon."""


def model(seed: int = 0, **options) -> MoE:
    """The contract suite's model over fewer tokens."""
    return MoE(replace(worlds.model_config(**options), vocab_size=VOCABULARY), stream(seed, "turns-model"))


def prompts(num: int = 4) -> list[Prompt]:
    """Prompts of different lengths."""
    draws = stream(0, "turns-prompts")
    lengths = [9, 3, 12, 1]
    return [
        Prompt(str(i), tuple(torch.randint(2, VOCABULARY, (lengths[i % 4],), generator=draws).tolist()), "")
        for i in range(num)
    ]


class Talk(worlds.EvenTokens):
    """Answers every turn but the third with 0 to 3 tokens that depend on what was sampled; one in four is the last."""

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        total = int(response.tokens.sum()) + sum(prompt.tokens)
        num_turns = int((response.tokens[response.is_response] == worlds.STOP).sum())
        if num_turns == 3 or total % 4 == 3:
            return None
        return tuple(2 + (total + i) % 3 for i in range(total % 5 - 1))


class Watched:
    """An engine that keeps what every call gave, and may be handed other weights between two calls."""

    def __init__(self, engine: RolloutEngine, between: Sequence[NamedTensors] = ()):
        self.engine, self.between = engine, list(between)
        self.calls: list[Rollouts] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        self.calls.append(self.engine.generate(prompts, sampling))
        if self.between:
            self.engine.load_weights(self.between.pop(0), version=len(self.calls))
        return self.calls[-1]

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.engine.load_weights(named_tensors, version)


class Counting(PrefixCache):
    """A prefix cache that remembers how many tokens of each prompt it found, and of how many."""

    def __init__(self, *limits: int):
        super().__init__(*limits)
        self.found: list[tuple[int, int]] = []

    def find(self, prompt: tuple[int, ...]) -> CachedPrefix | None:
        hit = super().find(prompt)
        self.found.append((0 if hit is None else hit.length, len(prompt)))
        return hit


def assert_same(a: Rollouts, b: Rollouts) -> None:
    """Equal bit for bit: tokens, log-probs, masks, ends, versions, routes, features and likeliest tokens."""
    assert a.temperature == b.temperature
    for x, y in zip(a.responses, b.responses, strict=True):
        assert x.prompt == y.prompt and (x.finish, x.version, x.versions) == (y.finish, y.version, y.versions)
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.is_response, y.is_response)
        assert torch.equal(x.logp_mu, y.logp_mu)
    assert (a.experts is None) == (b.experts is None) and (a.features is None) == (b.features is None)
    if a.experts is not None and b.experts is not None:
        assert torch.equal(a.experts.offsets, b.experts.offsets) and torch.equal(a.experts.experts, b.experts.experts)
    if a.features is not None and b.features is not None:
        assert a.features.hidden is not None and b.features.hidden is not None
        assert torch.equal(a.features.rows, b.features.rows) and torch.equal(a.features.offsets, b.features.offsets)
        assert torch.equal(a.features.hidden, b.features.hidden)
        assert torch.equal(a.features.logits, b.features.logits)
    assert (a.top is None) == (b.top is None)
    if a.top is not None and b.top is not None:
        assert torch.equal(a.top.ids, b.top.ids) and torch.equal(a.top.logp, b.top.logp)
