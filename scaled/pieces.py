"""A rollout's prompts in pieces, and which engine gets the next piece: one that has room for it. The cluster's driver
and the plan's simulation ask the same `Handout`.

A response draws from a seed of its own, so neither the pieces nor the engines that sample them change a draw. Where a
call ends early (`Sampling.enough`), what it samples would depend on the engines' pace: there each engine has one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

SHARED_BY = 8
"""Prompts of few responses share a piece, which then has at most so many: a piece takes two calls of some milliseconds,
which would add up for single responses."""


@dataclass(frozen=True)
class PromptPiece:
    """Some prompts of a call, by their places in it, and the number of their responses.

    `home` is the one engine that may sample it; None where any may.
    """

    number: int
    prompts: tuple[int, ...]
    num_responses: int
    home: int | None = None


def in_pieces(homes: Sequence[int | None], num_responses: int, num_engines: int) -> list[PromptPiece]:
    """All prompts in pieces of consecutive ones with the same home; `num_responses` are those of one prompt."""
    size = max(1, min(SHARED_BY // num_responses, len(homes) // num_engines))
    by_home: dict[int | None, list[int]] = {}
    for p, home in enumerate(homes):
        by_home.setdefault(home, []).append(p)
    cut = [(home, own[i : i + size]) for home, own in by_home.items() for i in range(0, len(own), size)]
    return [PromptPiece(k, tuple(part), len(part) * num_responses, home) for k, (home, part) in enumerate(cut)]


def in_shares(groups: Sequence[int], num_responses: int, num_engines: int) -> list[PromptPiece]:
    """One piece for each engine: even shares of the groups, none of which is split. groups: that of each prompt."""
    members: dict[int, list[int]] = {}
    for p, group in enumerate(groups):
        members.setdefault(group, []).append(p)
    each, found = list(members.values()), []
    # Contiguous, with sizes that differ by at most one.
    for i, own in enumerate(np.array_split(np.arange(len(each)), num_engines)):
        part = tuple(p for k in own for p in each[k])
        if part:
            found.append(PromptPiece(len(found), part, len(part) * num_responses, i))
    return found


class Handout:
    """The pieces that no engine has, and those that each has in flight.

    An engine gets pieces while at most `max_num_seqs` of its responses are unfinished: then it decodes as many as it
    can, and up to one more piece waits in it. The pieces of a lost engine are handed out again, before all others.
    """

    def __init__(self, pieces: Sequence[PromptPiece], num_engines: int, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.held: list[dict[int, PromptPiece]] = [{} for _ in range(num_engines)]
        self._unfinished = [0] * num_engines
        self._waiting: dict[int | None, deque[PromptPiece]] = {}
        for piece in pieces:
            self._waiting.setdefault(piece.home, deque()).append(piece)

    def has_more(self, engine: int) -> bool:
        """Whether a piece waits that this engine may sample."""
        return bool(self._waiting.get(engine) or self._waiting.get(None))

    def deal(self, engines: Collection[int]) -> dict[int, list[PromptPiece]]:
        """The next pieces of these engines, each to the one with the fewest unfinished responses."""
        given: dict[int, list[PromptPiece]] = {i: [] for i in engines}
        while able := [i for i in given if self._unfinished[i] <= self.max_num_seqs and self.has_more(i)]:
            i = min(able, key=lambda i: self._unfinished[i])
            piece = (self._waiting.get(i) or self._waiting[None]).popleft()
            given[i].append(piece)
            self.held[i][piece.number] = piece
            self._unfinished[i] += piece.num_responses
        return given

    def ended(self, engine: int, numbers: Collection[int], num_unfinished: int) -> None:
        """These pieces have ended; so many of the engine's other responses have not."""
        for number in numbers:
            del self.held[engine][number]
        self._unfinished[engine] = num_unfinished

    def lost(self, engine: int) -> None:
        """The engine's pieces in flight are lost with it."""
        for piece in sorted(self.held[engine].values(), key=lambda piece: piece.number, reverse=True):
            self._waiting.setdefault(piece.home, deque()).appendleft(piece)
        self.held[engine], self._unfinished[engine] = {}, 0


__all__ = ["Handout", "PromptPiece", "in_pieces", "in_shares"]
