"""The engines of a simulated cluster: each decodes pieces of a batch, is slow or lost, and waits for the others."""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.pieces import Handout, PromptPiece, in_pieces, in_shares
from scaled.plan import compute, passes
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import Gpu
from scaled.plan.simulated_groups import Groups, SimulatedGroup
from theory.streams import derive_seed

Events = Generator[simpy.Event, None, None]


class SimulatedRollout:
    """The pieces of one rollout, which `handout` gives to the engines; `groups` are those of each piece's prompts.

    enough: the number of a piece's groups that end it.
    """

    def __init__(
        self,
        env: simpy.Environment,
        pieces: Sequence[tuple[PromptPiece, Sequence[SimulatedGroup], int]],
        num_engines: int,
        max_num_seqs: int,
    ) -> None:
        self.env, self.changed = env, env.event()
        self.handout = Handout([piece for piece, _, _ in pieces], num_engines, max_num_seqs)
        self.enough = {piece.number: enough for piece, _, enough in pieces}
        # What the responses had left to sample when the rollout began: a lost engine's pieces begin there again.
        self.asked = {
            piece.number: [(group, r, left) for group in groups for r, left in enumerate(group.left) if left]
            for piece, groups, _ in pieces
        }
        self.num_open = len(pieces)

    def ended(self, engine: int, numbers: Sequence[int], num_unfinished: int) -> None:
        """Counts these pieces of the engine as ended; so many of its other responses are unfinished."""
        self.handout.ended(engine, numbers, num_unfinished)
        self.num_open -= len(numbers)
        if not self.num_open:
            self._wake()

    def lost(self, engine: int) -> None:
        """The engine's pieces in flight go to whichever engine has room; those that have ended are kept."""
        for number in self.handout.held[engine]:
            for group, r, left in self.asked[number]:
                group.left[r] = left
        self.handout.lost(engine)
        self._wake()

    def _wake(self) -> None:
        before, self.changed = self.changed, self.env.event()
        before.succeed()


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

    def _pieces(self, step: int) -> list[tuple[PromptPiece, Sequence[SimulatedGroup], int]]:
        """The pieces of that step, the groups of each, and how many of them must be complete to end it."""
        num, G = self.block.num_engines, self.group_size
        if self.groups is not None:
            shares = self.groups.begin(max(0, step - self.steps_off), num)
            sizes = [sum(left > 0 for group in own for left in group.left) for own, _ in shares]
            found = [(PromptPiece(i, (), sizes[i], i), own, enough) for i, (own, enough) in enumerate(shares)]
            return [one for one in found if one[2]]
        lengths = self.lengths(step)
        groups = [SimulatedGroup(p, own, list(own), step) for p, own in enumerate(_in_groups(lengths, G))]
        if self.chance.has_fixed_shares:
            pieces = in_shares(range(len(groups)), G, num)
        else:
            pieces = in_pieces([None] * len(groups), G, num)
        return [(piece, [groups[p] for p in piece.prompts], len(piece.prompts)) for piece in pieces]

    def rollout(self, step: int) -> Events:
        """All engines sample pieces until none is left; the rollout ends with the last of them."""
        num = self.block.num_engines
        # Drawn by seed and step alone, so that scenarios differ by their changes and not by their draws.
        slow = np.random.default_rng(derive_seed(self.seed, "engines", step)).normal(0.0, self.chance.slow_std, num)
        work = SimulatedRollout(self.env, self._pieces(step), num, self.block.max_num_seqs)
        first = work.handout.deal(range(num))
        engines = [self.env.process(self.engine(i, work, first[i], math.exp(slow[i]))) for i in range(num)]
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
        self, number: int, work: SimulatedRollout, first: Sequence[PromptPiece], slow: float
    ) -> Generator[simpy.Event, None, float]:
        """One engine's pieces, the `first` ones given; returns the seconds in which it did not wait for the others.

        Responses begin in order, at most max_num_seqs at a time; `slow` multiplies the time of each token. The pieces
        that a lost engine had in flight begin again, here or elsewhere.
        """
        decoding, waited = _Decoding(self.block.max_num_seqs), 0.0
        start = self.env.now
        try:
            decoding.begin(work, first)
            while work.num_open:
                if not decoding.active:
                    before = self.env.now
                    yield work.changed
                    waited += self.env.now - before
                else:
                    # Until the next response ends, the batch and therefore the time per token are constant.
                    seconds = decoding.tokens_to_next_end * self.decode(len(decoding.active)) * slow
                    if self.env.now + seconds > self.failure[number]:
                        # It may have failed before this rollout began: hence max.
                        yield self.env.timeout(max(0.0, self.failure[number] - self.env.now))
                        work.lost(number)
                        decoding = _Decoding(self.block.max_num_seqs)
                        self.day.num_engine_failures += 1
                        yield self.env.timeout(self.chance.engine_restart_s)
                        self.failure[number] = self.env.now + self._until_failure()
                    else:
                        yield self.env.timeout(seconds)
                        work.ended(number, decoding.step(work), decoding.num_unfinished)
                decoding.begin(work, work.handout.deal([number])[number])
        except simpy.Interrupt:
            pass  # `left` may be half changed: `simulation` puts the checkpoint's groups back
        return self.env.now - start - waited


class _Decoding:
    """The responses that an engine decodes, at most `places` at a time, and those that wait in it."""

    def __init__(self, places: int) -> None:
        self.places, self.tokens, self._begun = places, 0, count()
        # A heap of (decoding steps of the engine when a response ends, a number that breaks ties, piece, group, r).
        self.active: list[tuple[int, int, int, SimulatedGroup, int]] = []
        self._waiting: deque[tuple[int, SimulatedGroup, int]] = deque()
        self._complete: Counter[int] = Counter()

    @property
    def num_unfinished(self) -> int:
        return len(self.active) + len(self._waiting)

    @property
    def tokens_to_next_end(self) -> int:
        return self.active[0][0] - self.tokens

    def begin(self, work: SimulatedRollout, pieces: Sequence[PromptPiece]) -> None:
        """Adds the pieces' responses, and fills free places in order."""
        self._waiting.extend((piece.number, group, r) for piece in pieces for group, r, _ in work.asked[piece.number])
        while self._waiting and len(self.active) < self.places:
            number, group, r = self._waiting.popleft()
            heapq.heappush(self.active, (self.tokens + group.left[r], next(self._begun), number, group, r))

    def step(self, work: SimulatedRollout) -> list[int]:
        """Decodes until the next response ends; the pieces that have then ended."""
        self.tokens, ended = self.active[0][0], []
        while self.active and self.active[0][0] == self.tokens:
            *_, number, group, r = heapq.heappop(self.active)
            group.left[r] = 0
            self._complete[number] += group.is_complete
            if group.is_complete and self._complete[number] == work.enough[number]:
                ended.append(number)
        for number in ended:
            self._end(number)
        return ended

    def _end(self, piece: int) -> None:
        # Over-sampling does not wait for these responses: a later rollout continues them from here.
        for end, _, number, group, r in self.active:
            if number == piece:
                group.left[r] = end - self.tokens
        self.active = [one for one in self.active if one[2] != piece]
        heapq.heapify(self.active)
        self._waiting = deque(one for one in self._waiting if one[0] != piece)


def _in_groups(lengths: Sequence[int], size: int) -> list[list[int]]:
    return [list(lengths[i : i + size]) for i in range(0, len(lengths), size)]


__all__ = ["Events", "SimulatedEngines", "SimulatedRollout"]
