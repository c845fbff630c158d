"""Hours of a recipe, event by event: drawn lengths, engines that are slow or lost, ranks that die, checkpoints.

`compute` gives the time of one global step of mean lengths; here every response of every step has its own end, and the
step waits for the last. Rates are those of the plan, so that without chance both agree.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import compute, passes
from scaled.plan.hardware import Gpu
from scaled.plan.memory import CHECKPOINT_BYTES
from theory.streams import derive_seed

YEAR = 365 * 24
"""The longest simulated time, in hours."""


@dataclass(frozen=True)
class Chance:
    """The chances that the plan's one step leaves out.

    gpu_hours_per_failure: mean GPU hours between two failures; Llama 3 (arXiv 2407.21783) sec. 3.3.4 had 419 in 54 days
    on 16,384 GPUs. restart_s: until ranks continue from their checkpoint; engine_restart_s: until a lost engine
    samples again. slow_std: standard deviation of the logarithm of an engine's time in a rollout. save_gb_s: GB/s of a
    checkpoint. is_length_drawn: whether lengths are drawn; else every sequence has the mean.
    """

    gpu_hours_per_failure: float = 54 * 24 * 16_384 / 419
    restart_s: float = 600.0
    engine_restart_s: float = 180.0
    slow_std: float = 0.05
    save_gb_s: float = 2.0
    is_length_drawn: bool = True


@dataclass(frozen=True)
class Rates:
    """Seconds of each stage relative to the plan's, in (0, inf); 1 is the plan's own."""

    rollout: float = 1.0
    training: float = 1.0
    push: float = 1.0
    checkpoint: float = 1.0


@dataclass
class Day:
    """The simulated hours: steps that count, and the seconds of each of their stages.

    idle_s: seconds that an engine waits for the others in a rollout, a mean over engines. lost_s: work since the last
    checkpoint that a dead rank took with it; down_s: restarts of ranks. The stages, both and a step that was under
    way at the end add up to the hours.
    """

    hours: float
    num_steps: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    idle_s: float = 0.0
    lost_s: float = 0.0
    down_s: float = 0.0
    num_failures: int = 0
    num_engine_failures: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of the hours per step that counts, in (0, inf]."""
        return 3600 * self.hours / self.num_steps if self.num_steps else math.inf


STAGES = ("rollout", "training", "push", "checkpoint")
"""One step off, `rollout` is the time that training waits for it."""


def play(
    config: ScaledRun,
    shape: ModelShape,
    gpu: Gpu,
    hours: float,
    mean_tokens: int,
    longest_tokens: int,
    chance: Chance | None = None,
    seed: int = 0,
    rates: Rates | None = None,
) -> Day:
    """The recipe's simulated `hours`. Equal arguments give equal results; step k has the same lengths in all scenarios.

    Raises ValueError unless `hours` are more than 0 and at most a year's, and where the cluster fails more often than
    it restarts: no step would ever end.
    """
    chance = chance or Chance()
    if not 0 < hours <= YEAR:
        raise ValueError(f"hours: expected more than 0 and at most {YEAR}, got {hours:g}")
    gpus = max(config.training.num_ranks, config.rollout.num_engines * config.rollout.tensor_parallel)
    least = gpus * max(chance.restart_s, chance.engine_restart_s) / 3600
    if chance.gpu_hours_per_failure < least:
        raise ValueError(
            f"GPU hours between two failures: expected at least {least:g}, a restart of the cluster's {gpus} GPUs, got "
            f"{chance.gpu_hours_per_failure:g}"
        )
    played = _Play(config, shape, gpu, (mean_tokens, longest_tokens), chance, seed, Day(hours), rates)
    main = played.env.process(played.run())
    played.env.process(played.ranks_die(main))
    played.env.run(until=3600 * hours)
    return played.day


def play_steps(
    config: ScaledRun,
    shape: ModelShape,
    gpu: Gpu,
    num_steps: int,
    mean_tokens: int,
    longest_tokens: int,
    chance: Chance,
    seed: int = 0,
    rates: Rates | None = None,
) -> Day:
    """A run of `num_steps` steps, the last with a checkpoint, in which no rank dies; `hours` is its duration."""
    played = _Play(config, shape, gpu, (mean_tokens, longest_tokens), chance, seed, Day(0.0), rates, num_steps)

    def whole() -> Events:
        step = 0
        while step < num_steps:
            step += yield from played.until_saved(step)

    played.env.run(played.env.process(whole()))
    played.day.hours = played.env.now / 3600
    return played.day


Events = Generator[simpy.Event, None, None]


class _Play:
    """The cluster, as processes of a discrete-event simulation; seconds are its unit of time."""

    def __init__(
        self,
        config: ScaledRun,
        shape: ModelShape,
        gpu: Gpu,
        tokens: tuple[int, int],
        chance: Chance,
        seed: int,
        day: Day,
        rates: Rates | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.env, self.day, self.chance = simpy.Environment(), day, chance
        self.rates, self.num_steps = rates or Rates(), num_steps
        self.config, self.shape, self.gpu, self.tokens, self.seed = config, shape, gpu, tokens, seed
        algorithm = config.algorithm.build()
        self.num_responses = algorithm.num_prompts * algorithm.num_responses
        self.num_minibatches = algorithm.num_minibatches
        self.push_s = self.rates.push * (compute.push_seconds(config, shape) + compute.turn_seconds(config, shape))
        self.sampling: simpy.Process | None = None
        self.save_s = self.rates.checkpoint * CHECKPOINT_BYTES * shape.num_parameters / (chance.save_gb_s * 1e9)
        self.breaks = np.random.default_rng(derive_seed(seed, "failures"))
        # An engine on GPUs of its own fails alone; one that shares them goes down with their rank.
        own = config.cluster.placement == "separate"
        self.engine_failure = [
            self._until_failure(config.rollout.tensor_parallel) if own else math.inf
            for _ in range(config.rollout.num_engines)
        ]
        # A repeated step has the same lengths.
        self.training_of = functools.lru_cache(self._training_of)
        self.decode = functools.cache(
            lambda active: self.rates.rollout * compute.decode_step_seconds(config, shape, gpu, active, tokens[0] / 2)
        )

    def _until_failure(self, num_gpus: int) -> float:
        # Failures are a Poisson process in GPU hours.
        return float(self.breaks.exponential(3600 * self.chance.gpu_hours_per_failure / num_gpus))

    def lengths(self, step: int) -> list[int]:
        """The tokens of that step's sequences, in the order of its prompts."""
        mean, longest = self.tokens
        if not self.chance.is_length_drawn:
            return [mean] * self.num_responses
        u = np.random.default_rng(derive_seed(self.seed, "lengths", step)).random(self.num_responses)
        return passes.quantiles(u, mean, longest)

    def ranks_die(self, main: simpy.Process) -> Events:
        """Interrupts `main` at every failure of a rank's GPU."""
        while True:
            yield self.env.timeout(self._until_failure(self.config.training.num_ranks))
            main.interrupt()

    def run(self) -> Events:
        """Steps from checkpoint to checkpoint, until the hours are over."""
        saved = 0
        while True:
            start, before = self.env.now, (dict(self.day.stages), self.day.idle_s)
            working = self.env.process(self.until_saved(saved))
            try:
                yield working
                saved += cast("int", working.value)
            except simpy.Interrupt:
                working.interrupt()
                # The steps since the last checkpoint are undone: their time is lost_s.
                self.day.stages, self.day.idle_s = before
                self.day.num_steps, self.day.num_failures = saved, self.day.num_failures + 1
                self.day.lost_s += self.env.now - start
                yield from self._restart()

    def _restart(self) -> Events:
        """Waits for the ranks' restart; a failure during it starts it again."""
        while True:
            start = self.env.now
            try:
                yield self.env.timeout(self.chance.restart_s)
                self.day.down_s += self.env.now - start
                return
            except simpy.Interrupt:
                self.day.num_failures += 1
                self.day.down_s += self.env.now - start

    def until_saved(self, step: int) -> Generator[simpy.Event, None, int]:
        """The steps from `step` to the next checkpoint; returns their number.

        One step off, the next rollout begins with training, and a push waits for both.
        """
        start, num, checkpoint = self.env.now, 0, self.config.checkpoint
        try:
            while True:
                sampling = self.sampling or self.env.process(self.rollout(step))
                self.sampling = sampling
                yield from self._stage("rollout", sampling)
                self.sampling = None
                is_last = step + 1 == self.num_steps
                if self.config.schedule.kind == "one_step_off" and not is_last:
                    self.sampling = self.env.process(self.rollout(step + 1))
                yield from self._stage("training", self.env.timeout(self.training_s(step)))
                if self.sampling is not None:
                    yield from self._stage("rollout", self.sampling)
                yield from self._stage("push", self.env.timeout(self.push_s))
                step, num = step + 1, num + 1
                self.day.num_steps += 1
                minutes = (self.env.now - start) / 60
                if is_last or num == checkpoint.every or minutes >= (checkpoint.every_minutes or math.inf):
                    yield from self._stage("checkpoint", self.env.timeout(self.save_s))
                    return num
        except simpy.Interrupt:
            if self.sampling is not None and self.sampling.is_alive:
                self.sampling.interrupt()
            self.sampling = None
            return 0

    def _stage(self, name: str, event: simpy.Event) -> Events:
        start = self.env.now
        yield event
        self.day.stages[name] += self.env.now - start

    def training_s(self, step: int) -> float:
        """Seconds of the old pass and the updates on that step's sequences."""
        return self.training_of(tuple(self.lengths(step)))

    def _training_of(self, found: tuple[int, ...]) -> float:
        size = len(found) // self.num_minibatches
        minibatches = [found[i : i + size] for i in range(0, len(found), size)]
        made = passes.passes_of(self.config, self.shape, found, minibatches)
        return self.rates.training * passes.training_seconds(
            self.config.training, self.gpu, made.score_flops + made.update_flops, made.num_micro
        )

    def rollout(self, step: int) -> Events:
        """All engines sample their shares; the last one ends it."""
        found, num = self.lengths(step), self.config.rollout.num_engines
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
                while waiting and len(active) < self.config.rollout.max_num_seqs:
                    length = waiting.pop()
                    heapq.heappush(active, (tokens + length, length))
                # Until the next response ends, the batch and so the time per token are constant.
                seconds = (active[0][0] - tokens) * self.decode(len(active)) * slow
                if self.env.now + seconds > self.engine_failure[number]:
                    # max: it may have failed before this rollout began.
                    yield self.env.timeout(max(0.0, self.engine_failure[number] - self.env.now))
                    waiting += [length for _, length in active]
                    active, self.day.num_engine_failures = [], self.day.num_engine_failures + 1
                    yield self.env.timeout(self.chance.engine_restart_s)
                    until = self._until_failure(self.config.rollout.tensor_parallel)
                    self.engine_failure[number] = self.env.now + until
                    continue
                yield self.env.timeout(seconds)
                tokens = active[0][0]
                while active and active[0][0] == tokens:
                    heapq.heappop(active)
        except simpy.Interrupt:
            pass
        return self.env.now - start


__all__ = ["STAGES", "Chance", "Day", "Rates", "play", "play_steps"]
