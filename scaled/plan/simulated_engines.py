"""The engines of a simulated cluster: each decodes pieces of a batch, is slow or lost, and waits for the others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import cast

import numpy as np
import simpy

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.pieces import Cut, PromptPiece, in_pieces, in_shares
from scaled.plan import compute, in_progress, passes
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import Gpu
from scaled.plan.simulated_groups import Groups, SimulatedGroup
from scaled.plan.simulated_rollout import Decoding, SimulatedRollout
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
        # As in `RolloutGroup.generate`: with features each engine has a share of the groups.
        self.has_shares = chance.has_fixed_shares or (over is not None and algorithm.passes.rollout == "predicted")
        # Over-sampling's lengths by step, back to the last checkpoint: after a failure training repeats those steps.
        self._batches: dict[int, list[int]] = {}
        self._until_failure = lambda: until_failure(config.rollout.tensor_parallel)
        # An engine on GPUs of its own fails alone; one that shares GPUs fails with their rank (`simulation`).
        own = config.cluster.placement == "separate"
        self.failure = [self._until_failure() if own else math.inf for _ in range(self.block.num_engines)]
        # The plan's, of all sequences on average, whichever are in progress.
        context = in_progress.rollout_load(config, *tokens).context if chance.is_length_drawn else tokens[0] / 2
        # Cached, because it is called whenever a response ends.
        self.decode = functools.cache(
            lambda active: rates.rollout * compute.decode_step_seconds(config, shape, gpu, active, context)
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

    def _pieces(self, step: int) -> tuple[list[tuple[PromptPiece, Sequence[SimulatedGroup], int]], Cut | None]:
        """The pieces of that step, the groups of each, and how many of them must be complete to end it; the cut."""
        num, G = self.block.num_engines, self.group_size
        if self.groups is not None:
            return self._open_pieces(self.groups, max(0, step - self.steps_off))
        lengths = self.lengths(step)
        groups = [SimulatedGroup(p, own, list(own), step) for p, own in enumerate(_in_groups(lengths, G))]
        if self.has_shares:
            pieces = in_shares(range(len(groups)), G, num)
        else:
            pieces = in_pieces([None] * len(groups), G, num)
        return [(piece, [groups[p] for p in piece.prompts], len(piece.prompts)) for piece in pieces], None

    def _open_pieces(
        self, groups: Groups, version: int
    ) -> tuple[list[tuple[PromptPiece, Sequence[SimulatedGroup], int]], Cut | None]:
        """The same of the groups in progress, which go on with that version."""
        if self.has_shares:
            shares = groups.begin(version, self.block.num_engines)
            found = [(PromptPiece(i, (), _num_open(own), i), own, enough) for i, (own, enough) in enumerate(shares)]
            return [one for one in found if one[2]], None
        ((open_, need),) = groups.begin(version, 1)
        return [(PromptPiece(i, (i,), _num_open([one])), [one], 1) for i, one in enumerate(open_)], Cut(need)

    def rollout(self, step: int) -> Events:
        """All engines sample pieces until none is left; the rollout ends with the last of them."""
        num = self.block.num_engines
        # Drawn by seed and step alone, so that scenarios differ by their changes and not by their draws.
        slow = np.random.default_rng(derive_seed(self.seed, "engines", step)).normal(0.0, self.chance.slow_std, num)
        pieces, cut = self._pieces(step)
        work = SimulatedRollout(self.env, pieces, num, self.block.max_num_seqs, cut)
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
        work.end()
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
        decoding, waited = Decoding(self.block.max_num_seqs), 0.0
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
                    token_s, before = self.decode(len(decoding.active)) * slow, self.env.now
                    seconds = decoding.tokens_to_next_end * token_s
                    is_lost = before + seconds > self.failure[number]
                    # It may have failed before this rollout began: hence max.
                    timer = self.env.timeout(max(0.0, self.failure[number] - before) if is_lost else seconds)
                    # Of a cut engines hear at once, which `pieces.HEARD_AFTER` says of the cluster to some steps.
                    yield timer if work.cut is None else timer | work.changed
                    if not timer.processed:
                        decoding.tokens += (self.env.now - before) / token_s
                        decoding.cut(work)
                    elif is_lost:
                        work.lost(number)
                        decoding = Decoding(self.block.max_num_seqs)
                        self.day.num_engine_failures += 1
                        yield self.env.timeout(self.chance.engine_restart_s)
                        self.failure[number] = self.env.now + self._until_failure()
                    else:
                        work.ended(number, decoding.step(work), decoding.num_unfinished)
                        decoding.cut(work)
                decoding.begin(work, work.handout.deal([number])[number])
        except simpy.Interrupt:
            pass  # `left` may be half changed: `simulation` puts the checkpoint's groups back
        return self.env.now - start - waited


def _num_open(groups: Sequence[SimulatedGroup]) -> int:
    return sum(left > 0 for group in groups for left in group.left)


def _in_groups(lengths: Sequence[int], size: int) -> list[list[int]]:
    return [list(lengths[i : i + size]) for i in range(0, len(lengths), size)]


__all__ = ["Events", "SimulatedEngines"]
