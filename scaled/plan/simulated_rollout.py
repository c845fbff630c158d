"""One rollout of a simulated cluster: its pieces, as `Handout` gives them out, and what an engine decodes of them."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count

import simpy

from scaled.pieces import Cut, Handout, PromptPiece
from scaled.plan.simulated_groups import SimulatedGroup


class SimulatedRollout:
    """The pieces of one rollout, which `handout` gives to the engines; `groups` are those of each piece's prompts.

    enough: the number of a piece's groups that end it. cut: the end of the whole rollout, if it comes early.
    """

    def __init__(
        self,
        env: simpy.Environment,
        pieces: Sequence[tuple[PromptPiece, Sequence[SimulatedGroup], int]],
        num_engines: int,
        max_num_seqs: int,
        cut: Cut | None = None,
    ) -> None:
        self.env, self.changed, self.cut = env, env.event(), cut
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

    def complete(self, number: int) -> None:
        """A group of that piece is complete: with a cut, the only one."""
        if self.cut is not None:
            before = self.cut.most
            self.cut.complete(max(left for _, _, left in self.asked[number]))
            if self.cut.most != before:
                self._wake()

    def end(self) -> None:
        """Leaves every response at the cut, where there is one: tokens beyond it are dropped."""
        if self.cut is not None and self.cut.most is not None:
            for asked in self.asked.values():
                for group, r, left in asked:
                    group.left[r] = max(0, left - self.cut.most)

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


class Decoding:
    """The responses that an engine decodes, at most `places` at a time, and those that wait in it."""

    def __init__(self, places: int) -> None:
        # Decoding steps of the engine; a part of one where it hears of a cut.
        self.tokens = 0.0
        self.places, self._begun = places, count()
        # A heap of (decoding steps when a response ends or is cut, a number that breaks ties, piece, group, r, decoding
        # steps when it began).
        self.active: list[tuple[float, int, int, SimulatedGroup, int, float]] = []
        self._waiting: deque[tuple[int, SimulatedGroup, int]] = deque()
        self._complete: Counter[int] = Counter()
        self._open: Counter[int] = Counter()

    @property
    def num_unfinished(self) -> int:
        return len(self.active) + len(self._waiting)

    @property
    def tokens_to_next_end(self) -> float:
        return float(self.active[0][0] - self.tokens)

    def begin(self, work: SimulatedRollout, pieces: Sequence[PromptPiece]) -> None:
        """Adds the pieces' responses, and fills free places in order."""
        for piece in pieces:
            asked = work.asked[piece.number]
            self._waiting.extend((piece.number, group, r) for group, r, _ in asked)
            self._open[piece.number] = len(asked)
        while self._waiting and len(self.active) < self.places:
            number, group, r = self._waiting.popleft()
            end = self.tokens + _up_to(group.left[r], work.cut)
            heapq.heappush(self.active, (end, next(self._begun), number, group, r, self.tokens))

    def cut(self, work: SimulatedRollout) -> None:
        """No response goes on beyond the rollout's cut."""
        if work.cut is not None and work.cut.most is not None:
            self.active = [
                (max(self.tokens, begun + _up_to(group.left[r], work.cut)), k, number, group, r, begun)
                for _, k, number, group, r, begun in self.active
            ]
            heapq.heapify(self.active)

    def step(self, work: SimulatedRollout) -> list[int]:
        """Decodes until the next response ends; the pieces that have then ended."""
        self.tokens, ended = self.active[0][0], []
        while self.active and self.active[0][0] == self.tokens:
            _, _, number, group, r, _ = heapq.heappop(self.active)
            self._open[number] -= 1
            # A response that the cut ends has more left; `SimulatedRollout.end` counts its tokens.
            if group.left[r] == _up_to(group.left[r], work.cut):
                group.left[r] = 0
                if group.is_complete:
                    self._complete[number] += 1
                    work.complete(number)
            if not self._open[number] or self._complete[number] == work.enough[number]:
                ended.append(number)
        for number in dict.fromkeys(ended):
            self._end(number)
        return list(dict.fromkeys(ended))

    def _end(self, piece: int) -> None:
        # Over-sampling does not wait for these responses: a later rollout continues them from here.
        for end, _, number, group, r, _ in self.active:
            if number == piece:
                group.left[r] = int(end - self.tokens)
        self.active = [one for one in self.active if one[2] != piece]
        heapq.heapify(self.active)
        self._waiting = deque(one for one in self._waiting if one[0] != piece)


def _up_to(left: int, cut: Cut | None) -> int:
    return left if cut is None or cut.most is None else min(left, cut.most)


__all__ = ["Decoding", "SimulatedRollout"]
