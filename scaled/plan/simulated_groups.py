"""The groups in progress in a simulated run: without over-sampling one batch, with it those that rollouts continue.

As `theory.oversampling`, with lengths in place of tokens. A kept prefix costs nothing when it is continued: its prefill
is short beside decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from theory.algorithm import Oversampling

__all__ = ["Groups", "SimulatedGroup"]


@dataclass
class SimulatedGroup:
    """A prompt's responses: whole lengths, tokens of each that are left to sample, and the version of the oldest."""

    number: int
    lengths: list[int]
    left: list[int]
    version: int

    @property
    def is_complete(self) -> bool:
        """Whether all responses have ended."""
        return not any(self.left)


class Groups:
    """The groups of a run; `draw(n)` gives the lengths of group n, whichever rollout samples it."""

    def __init__(self, draw: Callable[[int], list[int]], num_prompts: int, over: Oversampling) -> None:
        self.draw, self.num_prompts, self.over = draw, num_prompts, over
        self.waiting: list[SimulatedGroup] = []
        self.next_number = 0

    def begin(self, version: int, num_engines: int) -> list[tuple[list[SimulatedGroup], int]]:
        """For each engine its groups that have not ended, and how many of them end its call.

        New groups of this version are begun until num_prompts + extra_prompts are in progress; none is, and no engine
        works, where enough are complete already.
        """
        need = self.num_prompts - sum(group.is_complete for group in self.waiting)
        if need <= 0:
            return [([], 0)] * num_engines
        while len(self.waiting) < self.num_prompts + self.over.extra_prompts:
            lengths = self.draw(self.next_number)
            self.waiting.append(SimulatedGroup(self.next_number, lengths, list(lengths), version))
            self.next_number += 1
        open_ = [group for group in self.waiting if not group.is_complete]
        # Contiguous, as even as can be, as on the cluster.
        parts = [[open_[i] for i in part] for part in np.array_split(np.arange(len(open_)), num_engines)]
        # Each engine's own share of `need`, rounded up, as in `RolloutGroup.generate`.
        return [(part, -(-need * len(part) // len(open_))) for part in parts]

    def end(self, next_version: int) -> list[int]:
        """The lengths of the batch: the oldest complete groups; of the others those too old then are given up."""
        # `waiting` is in the order of numbers, so the first complete groups are the oldest.
        batch = [group for group in self.waiting if group.is_complete][: self.num_prompts]
        taken = {group.number for group in batch}
        self.waiting = [
            group
            for group in self.waiting
            if group.number not in taken
            and self.over.unfinished == "keep"
            and next_version - group.version <= self.over.max_staleness
        ]
        return [length for group in batch for length in group.lengths]

    def copied(self) -> Groups:
        """The groups as they are now, for a checkpoint."""
        copy = Groups(self.draw, self.num_prompts, self.over)
        copy.waiting, copy.next_number = deepcopy(self.waiting), self.next_number
        return copy
