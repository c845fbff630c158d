"""The engines of a simulated cluster: each decodes its share of a batch, is slow or lost, and waits for the others."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Generator, Sequence
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import compute, passes
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import Gpu
from theory.streams import derive_seed

Events = Generator[simpy.Event, None, None]


class SimulatedEngines:
    """All engines as processes of the simulation; `tokens` are the mean and the longest length of a sequence.

    What they waited and how often they were lost is counted in `day`; `until_failure` draws the seconds until one of so
    many GPUs fails.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: ScaledRun,
        shape: ModelShape,
        gpu: Gpu,
        tokens: tuple[int, int],
        chance: Chance,
        rates: Rates,
        seed: int,
        day: Day,
        until_failure: Callable[[int], float],
    ) -> None:
        self.env, self.block, self.day = env, config.rollout, day
        self.tokens, self.chance, self.seed = tokens, chance, seed
        algorithm = config.algorithm.build()
        self.num_responses = algorithm.num_prompts * algorithm.num_responses
        self._until_failure = lambda: until_failure(config.rollout.tensor_parallel)
        # An engine on GPUs of its own fails alone; one that shares them goes down with their rank.
        own = config.cluster.placement == "separate"
        self.failure = [self._until_failure() if own else math.inf for _ in range(self.block.num_engines)]
        self.decode = functools.cache(
            lambda active: rates.rollout * compute.decode_step_seconds(config, shape, gpu, active, tokens[0] / 2)
        )

    def lengths(self, step: int) -> list[int]:
        """The tokens of that step's sequences, in the order of its prompts."""
        mean, longest = self.tokens
        if not self.chance.is_length_drawn:
            return [mean] * self.num_responses
        u = np.random.default_rng(derive_seed(self.seed, "lengths", step)).random(self.num_responses)
        return passes.quantiles(u, mean, longest)

    def rollout(self, step: int) -> Events:
        """All engines sample their shares; the last one ends it."""
        found, num = self.lengths(step), self.block.num_engines
        slow = np.random.default_rng(derive_seed(self.seed, "engines", step)).normal(0.0, self.chance.slow_std, num)
        engines = [self.env.process(self.engine(i, found[i::num], math.exp(slow[i]))) for i in range(num)]
        start = self.env.now
        try:
            yield self.env.all_of(engines)
        except simpy.Interrupt:
            for one in engines:
                if one.is_alive:
                    one.interrupt()
            return
        self.day.idle_s += sum(self.env.now - start - cast("float", one.value) for one in engines) / num

    def engine(self, number: int, lengths: Sequence[int], slow: float) -> Generator[simpy.Event, None, float]:
        """One engine's share, at most max_num_seqs together, in order; returns the seconds it took.

        A lost engine starts the responses that it was decoding again.
        """
        # active: a heap of (token count of the engine at which a response ends, its length).
        start, waiting, active, tokens = self.env.now, list(reversed(lengths)), [], 0
        try:
            while waiting or active:
                while waiting and len(active) < self.block.max_num_seqs:
                    length = waiting.pop()
                    heapq.heappush(active, (tokens + length, length))
                # Until the next response ends, the batch and so the time per token are constant.
                seconds = (active[0][0] - tokens) * self.decode(len(active)) * slow
                if self.env.now + seconds > self.failure[number]:
                    # max: it may have failed before this rollout began.
                    yield self.env.timeout(max(0.0, self.failure[number] - self.env.now))
                    waiting += [length for _, length in active]
                    active, self.day.num_engine_failures = [], self.day.num_engine_failures + 1
                    yield self.env.timeout(self.chance.engine_restart_s)
                    self.failure[number] = self.env.now + self._until_failure()
                    continue
                yield self.env.timeout(seconds)
                tokens = active[0][0]
                while active and active[0][0] == tokens:
                    heapq.heappop(active)
        except simpy.Interrupt:
            pass
        return self.env.now - start


__all__ = ["Events", "SimulatedEngines"]
