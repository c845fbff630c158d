"""Hours of a recipe, event by event: drawn lengths, engines that are slow or lost, ranks that die, checkpoints.

`compute` gives the time of one global step of mean lengths; here every response of every step has its own end, and the
step waits for the last. Rates are those of the plan, so that without chance both agree where no sequence waits for a
place in an engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import compute, passes
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import Gpu
from scaled.plan.parameters import CHECKPOINT_BYTES
from scaled.plan.simulated_engines import Events, SimulatedEngines
from theory.streams import derive_seed

YEAR = 365 * 24
"""The longest simulated time, in hours."""


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
        raise ValueError(f"--simulate: expected more than 0 and at most {YEAR} hours, got {hours:g}")
    gpus = max(config.training.num_ranks, config.rollout.num_engines * config.rollout.tensor_parallel)
    least = gpus * max(chance.restart_s, chance.engine_restart_s) / 3600
    if chance.gpu_hours_per_failure < least:
        raise ValueError(
            f"--failures: expected at least {least:g} GPU hours, in which {gpus} GPUs restart once, got "
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
        self.num_minibatches = config.algorithm.build().num_minibatches
        handed_over_s = compute.push_seconds(config, shape, tokens[0]) + compute.turn_seconds(config, shape)
        self.push_s = self.rates.push * handed_over_s
        self.save_s = self.rates.checkpoint * CHECKPOINT_BYTES * shape.num_parameters / (chance.save_gb_s * 1e9)
        # One stream for ranks and engines, drawn in the order of events: other scenarios have other failures, too.
        self.breaks = np.random.default_rng(derive_seed(seed, "failures"))
        self.engines = SimulatedEngines(
            self.env, config, shape, gpu, tokens, chance, self.rates, seed, day, self._until_failure
        )
        # Rollouts of the batch at hand and of those ahead, by step, and those that the last checkpoint has.
        self.sampling: dict[int, simpy.Process] = {}
        self.saved: dict[int, simpy.Process] = {}
        self.saved_groups = None if self.engines.groups is None else self.engines.groups.copied()
        # A repeated step has the same lengths.
        self.training_of = functools.lru_cache(self._training_of)

    def _until_failure(self, num_gpus: int) -> float:
        # Failures are a Poisson process in GPU hours.
        return float(self.breaks.exponential(3600 * self.chance.gpu_hours_per_failure / num_gpus))

    def ranks_die(self, main: simpy.Process) -> Events:
        """Interrupts `main` at every failure of a rank's GPU."""
        while True:
            yield self.env.timeout(self._until_failure(self.config.training.num_ranks))
            main.interrupt()

    def run(self) -> Events:
        """Steps from checkpoint to checkpoint, until the hours are over."""
        saved = 0
        while True:
            start, before = self.env.now, (dict(self.day.stages), self.day.sampled_s, self.day.idle_s)
            working = self.env.process(self.until_saved(saved))
            try:
                yield working
                saved += cast("int", working.value)
            except simpy.Interrupt:
                working.interrupt()
                # The steps since the last checkpoint are undone: their time is lost_s.
                self.day.stages, self.day.sampled_s, self.day.idle_s = before
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
        """The steps from `step` to the next checkpoint, in the order of `cluster.schedule`; returns their number."""
        start, num, checkpoint = self.env.now, 0, self.config.checkpoint
        try:
            while True:
                self._begin_sampling(step)
                yield from self._stage("rollout", self.sampling[step])
                del self.sampling[step]  # not before: a failure interrupts all that are under way
                yield from self._stage("training", self.env.timeout(self.training_s(step)))
                # The probe scores the next batch, so that the trainer waits for it (`Asynchronous.step`).
                if step + 1 in self.sampling:
                    yield from self._stage("rollout", self.sampling[step + 1])
                yield from self._stage("push", self.env.timeout(self.push_s))
                step, num = step + 1, num + 1
                self.day.num_steps += 1
                minutes = (self.env.now - start) / 60
                is_last = step == self.num_steps
                if is_last or step % checkpoint.every == 0 or minutes >= (checkpoint.every_minutes or math.inf):
                    # Batches in flight are a part of it.
                    yield from self._stage("rollout", self.env.all_of(list(self.sampling.values())))
                    yield from self._stage("checkpoint", self.env.timeout(self.save_s))
                    # All have ended: waiting for them once more after a failure takes no time.
                    self.saved = dict(self.sampling)
                    self.engines.forget(step)
                    self.saved_groups = None if self.engines.groups is None else self.engines.groups.copied()
                    return num
        except simpy.Interrupt:
            for one in self.sampling.values():
                if one.is_alive:
                    one.interrupt()
            self.sampling = dict(self.saved)
            # A copy again, as the next failure may come before the next checkpoint.
            self.engines.groups = None if self.saved_groups is None else self.saved_groups.copied()
            return 0

    def _begin_sampling(self, step: int) -> None:
        """Begins all rollouts up to that of batch step + k, one after the other."""
        last = step + self.config.schedule.steps_off
        for number in range(step, last + 1):
            if number not in self.sampling and (self.num_steps is None or number < self.num_steps):
                before = self.sampling.get(number - 1)
                # Two steps off and more, weights reach the engines while ranks train; before, ranks wait for that.
                load_s = self.push_s if number == last > step + 1 and step > 0 else 0.0
                self.sampling[number] = self.env.process(self._sampled(number, before, load_s))

    def _sampled(self, step: int, before: simpy.Process | None, load_s: float) -> Events:
        try:
            if before is not None:
                yield before
            if load_s:
                yield self.env.timeout(load_s)
        except simpy.Interrupt:
            return
        yield from self.engines.rollout(step)

    def _stage(self, name: str, event: simpy.Event) -> Events:
        start = self.env.now
        yield event
        self.day.stages[name] += self.env.now - start

    def training_s(self, step: int) -> float:
        """Seconds of the old pass and the updates on that step's sequences."""
        return self.training_of(tuple(self.engines.lengths(step)))

    def _training_of(self, found: tuple[int, ...]) -> float:
        size = len(found) // self.num_minibatches
        minibatches = [found[i : i + size] for i in range(0, len(found), size)]
        made = passes.passes_of(self.config, self.shape, found, minibatches)
        return self.rates.training * passes.training_seconds(
            self.config.training, self.shape.num_layers, self.gpu, made.score_flops + made.update_flops, made.num_micro
        )


__all__ = ["play", "play_steps"]
