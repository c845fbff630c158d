"""The engines of a simulated cluster: each decodes its share of a batch, is slow or lost, and waits for the others."""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import compute, passes
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import Gpu
from scaled.plan.simulated_groups import Groups, SimulatedGroup
from theory.streams import derive_seed

Events = Generator[simpy.Event, None, None]


class SimulatedEngines:
    """All engines, as processes of the simulation.

    tokens: mean and longest length of a sequence, in tokens. day: takes the seconds of rollouts and of waiting, and the
    number of lost engines. until_failure(n): draws the seconds until one of n GPUs fails.
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
        self.group_size, self.steps_off = algorithm.num_responses, config.schedule.steps_off
        over = algorithm.oversampling
        self.groups = None if over is None else Groups(self._group, algorithm.num_prompts, over)
        # Over-sampling's lengths by step, back to the last checkpoint: after a failure training repeats those steps.
        self._batches: dict[int, list[int]] = {}
        self._until_failure = lambda: until_failure(config.rollout.tensor_parallel)
        # An engine on GPUs of its own fails alone; one that shares GPUs fails with their rank (`simulation`).
        own = config.cluster.placement == "separate"
        self.failure = [self._until_failure() if own else math.inf for _ in range(self.block.num_engines)]
        # Cached, because it is called whenever a response ends. The context is half the mean length, as in the plan.
        self.decode = functools.cache(
            lambda active: rates.rollout * compute.decode_step_seconds(config, shape, gpu, active, tokens[0] / 2)
        )

    def lengths(self, step: int) -> list[int]:
        """The tokens of that step's sequences, group by group; with over-sampling, known only after its rollout."""
        return self._drawn(self.num_responses, step) if self.groups is None else self._batches[step]

    def forget(self, step: int) -> None:
        """Drops the lengths of the steps before this one, which no restart repeats."""
        self._batches = {number: found for number, found in self._batches.items() if number >= step}

    def _group(self, number: int) -> list[int]:
        """The tokens of that group's sequences."""
        return self._drawn(self.group_size, "group", number)

    def _drawn(self, num: int, *names: str | int) -> list[int]:
        mean, longest = self.tokens
        if not self.chance.is_length_drawn:
            return [mean] * num
        u = np.random.default_rng(derive_seed(self.seed, "lengths", *names)).random(num)
        return passes.quantiles(u, mean, longest)

    def _work(self, step: int) -> list[tuple[list[SimulatedGroup], int]]:
        """For each engine its groups of that step, and how many of them must be complete to end its share."""
        num = self.block.num_engines
        if self.groups is not None:
            return self.groups.begin(max(0, step - self.steps_off), num)
        found = self.lengths(step)
        # Without over-sampling every sequence is a group of its own, as all of them must end.
        alone = [[SimulatedGroup(0, [length], [length], step) for length in found[i::num]] for i in range(num)]
        return [(groups, len(groups)) for groups in alone]

    def rollout(self, step: int) -> Events:
        """All engines sample their shares; the rollout ends with the last of them."""
        num = self.block.num_engines
        # Drawn by seed and step alone, so that scenarios differ by their changes and not by their draws.
        slow = np.random.default_rng(derive_seed(self.seed, "engines", step)).normal(0.0, self.chance.slow_std, num)
        shares = enumerate(self._work(step))
        engines = [self.env.process(self.engine(i, *share, math.exp(slow[i]))) for i, share in shares]
        start = self.env.now
        try:
            yield self.env.all_of(engines)
        except simpy.Interrupt:
            for one in engines:
                if one.is_alive:  # simpy refuses to interrupt a process that has ended
                    one.interrupt()
            return
        self.day.sampled_s += self.env.now - start
        self.day.idle_s += sum(self.env.now - start - cast("float", one.value) for one in engines) / num
        if self.groups is not None:
            self._batches[step] = self.groups.end(step + 1)

    def engine(
        self, number: int, groups: Sequence[SimulatedGroup], enough: int, slow: float
    ) -> Generator[simpy.Event, None, float]:
        """One engine's share, sampled until `enough` groups are complete; returns the seconds that it took.

        Responses begin in order, at most max_num_seqs at a time; `slow` multiplies the time of each token. A lost
        engine samples its whole share again, from the tokens that it had when this rollout began: `RolloutGroup`
        repeats the call, whose finished responses were in the lost process.
        """
        asked = [(group, r, left) for group in groups for r, left in enumerate(group.left) if left]
        waiting = deque((group, r) for group, r, _ in asked)
        # A heap of (decoding steps of the engine when a response ends, a number that breaks ties, group, response).
        active: list[tuple[int, int, SimulatedGroup, int]] = []
        start, tokens, begun, complete = self.env.now, 0, count(), 0
        try:
            while complete < enough:
                while waiting and len(active) < self.block.max_num_seqs:
                    group, r = waiting.popleft()
                    heapq.heappush(active, (tokens + group.left[r], next(begun), group, r))
                # Until the next response ends, the batch and therefore the time per token are constant.
                seconds = (active[0][0] - tokens) * self.decode(len(active)) * slow
                if self.env.now + seconds > self.failure[number]:
                    # It may have failed before this rollout began: hence max.
                    yield self.env.timeout(max(0.0, self.failure[number] - self.env.now))
                    for group, r, left in asked:
                        group.left[r] = left
                    waiting, active, complete = deque((group, r) for group, r, _ in asked), [], 0
                    self.day.num_engine_failures += 1
                    yield self.env.timeout(self.chance.engine_restart_s)
                    self.failure[number] = self.env.now + self._until_failure()
                    continue
                yield self.env.timeout(seconds)
                tokens = active[0][0]
                while active and active[0][0] == tokens:
                    *_, group, r = heapq.heappop(active)
                    group.left[r] = 0
                    complete += group.is_complete
            # Over-sampling does not wait for these responses: a later rollout continues them from here.
            for end, _, group, r in active:
                group.left[r] = end - tokens
        except simpy.Interrupt:
            pass  # `left` may be half changed: `simulation` puts the checkpoint's groups back
        return self.env.now - start


__all__ = ["Events", "SimulatedEngines"]
