"""A rollout's prompts in pieces, and which engine gets the next piece: one that has room for it. The cluster's driver
and the plan's simulation ask the same `Handout`, and the same `Cut` where a rollout ends early (`Sampling.enough`).

A response draws from a seed of its own, so neither the pieces nor the engines that sample them change a draw.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

SHARED_BY = 8
"""Prompts of few responses share a piece, which then has at most so many: a piece takes two calls of some milliseconds,
which would add up for single responses."""

HEARD_AFTER = 128
"""Decoding steps of an engine between two of its calls where the others may lower a `Cut`: the round trip takes some
milliseconds, and the tokens beyond the cut are lost."""


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


def in_groups(groups: Sequence[int], num_responses: int) -> list[PromptPiece]:
    """A piece for each group, which any engine may sample. groups: that of each prompt."""
    members: dict[int, list[int]] = {}
    for p, group in enumerate(groups):
        members.setdefault(group, []).append(p)
    return [PromptPiece(k, tuple(own), len(own) * num_responses) for k, own in enumerate(members.values())]


def in_shares(groups: Sequence[int], num_responses: int, num_engines: int) -> list[PromptPiece]:
    """One piece for each engine: even shares of the groups, none of which is split. groups: that of each prompt."""
    each, found = in_groups(groups, num_responses), []
    # Contiguous, with sizes that differ by at most one.
    for i, own in enumerate(np.array_split(np.arange(len(each)), num_engines)):
        part = tuple(p for k in own for p in each[k].prompts)
        if part:
            found.append(PromptPiece(len(found), part, len(part) * num_responses, i))
    return found


class Cut:
    """The end of a call that needs `enough` complete groups: it is where that many would be complete if all responses
    had been decoded side by side, so that it depends neither on the engines' pace nor on their number.
    """

    def __init__(self, enough: int):
        self.enough, self._ends = enough, list[int]()

    def complete(self, num_tokens: int) -> None:
        """A group is complete, whose longest response has sampled so many tokens in this call."""
        insort(self._ends, num_tokens)

    @property
    def most(self) -> int | None:
        """No response needs more tokens of this call than these; None before `enough` groups are complete.

        It falls where a shorter group is complete later. Once every response has ended or has so many, it is the end.
        """
        return self._ends[self.enough - 1] if len(self._ends) >= self.enough else None


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


__all__ = ["HEARD_AFTER", "Cut", "Handout", "PromptPiece", "in_groups", "in_pieces", "in_shares"]
