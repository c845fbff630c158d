"""Laws of handing out a rollout's prompts in pieces: at any pace of the engines, and whichever of them are lost.

The engines here are counters in this process, and the driver's loop is the real one.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scaled.cluster import rollout_group
from scaled.cluster.engine_calls import Lines, _Call
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.transfer import Meter, unpack
from scaled.pieces import Handout, PromptPiece, in_pieces, in_shares
from theory.contracts import Draw, Prompt, Response, Rollouts, Sampling


class Decoder:
    """An engine that adds a token to each of its `places` oldest responses in a step."""

    def __init__(self, places: int):
        self.places, self.most, self.decoded = places, 0, 0
        self.pieces: dict[int, tuple[list[Response], list[int]]] = {}

    @property
    def num_unfinished(self) -> int:
        return sum(num > 0 for _, left in self.pieces.values() for num in left)

    def begin(self, number: int, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> None:
        G = sampling.num_responses
        seeds = [d.seed for d in sampling.draws] or list(range(first_response, first_response + len(prompts) * G))
        made = [response(prompts[b // G], seed) for b, seed in enumerate(seeds)]
        self.pieces[number] = made, [len(one.tokens) for one in made]
        self.most = max(self.most, self.num_unfinished)

    def sample(self, room: int = 0, most: int | None = None, steps: int | None = None) -> list[tuple[int, Rollouts]]:
        num_steps = 0
        while not (ended := self._ended(most)) and self.num_unfinished > room and num_steps != steps:
            active = [(left, b) for _, left in self.pieces.values() for b, num in enumerate(left) if num]
            for left, b in active[: self.places]:
                left[b] -= 1
            num_steps += 1
            self.decoded += len(active[: self.places])
        return [(n, Rollouts(tuple(self.pieces.pop(n)[0]))) for n in ended]

    def _ended(self, most: int | None) -> list[int]:
        for made, left in self.pieces.values():
            for b, one in enumerate(made):
                if left[b] and most is not None and len(one.tokens) - left[b] >= most:
                    made[b], left[b] = beginning(one, len(one.tokens) - left[b]), 0
        return [n for n, (_, left) in self.pieces.items() if not any(left)]


LONG = 10**6
"""The seed of a response of 40 tokens; others have 1 to 5."""


def response(prompt: Prompt, seed: int) -> Response:
    """The response that draws from this seed: its length and tokens follow from it."""
    T = 40 if seed == LONG else 1 + seed * 7 % 5
    return Response(prompt, torch.full((T,), seed), torch.zeros(T), torch.ones(T, dtype=torch.bool), "stop", 0)


def beginning(whole: Response, num: int) -> Response:
    """The response's first tokens, where it has more."""
    if len(whole.tokens) <= num:
        return whole
    return replace(
        whole,
        tokens=whole.tokens[:num],
        logp_mu=whole.logp_mu[:num],
        is_response=whole.is_response[:num],
        finish="abort",
    )


class Driver(RolloutGroup):
    """The group without Ray: engines answer in the order of `paces`, whose numbers from LOST on are losses."""

    LOST = 100

    def __init__(self, num_engines: int, places: int, paces: Sequence[int] = ()):
        self.max_num_seqs, self.paces = places, deque(paces)
        self.actors, self.meter, self._homes = list(range(num_engines)), Meter(), {}
        self._one_at_a_time = threading.Lock()
        self.engines = [Decoder(places) for _ in range(num_engines)]
        self.begun: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()
        """The prompts that engines had in flight as they were lost."""

    def _ask(self, i: int, method: str, arguments: tuple[Any, ...]) -> _Call:
        parcel, room, most, steps = arguments
        for number, prompts, *rest in unpack(parcel):
            self.begun.update(prompt.id for prompt in prompts)
            self.engines[i].begin(number, prompts, *rest)
        # At a loss all of these are in flight: the answer with those that have ended does not arrive.
        held = [one.prompt.id for responses, _ in self.engines[i].pieces.values() for one in responses]
        return _Call(method, [(self.engines[i].sample(room, most, steps), self.engines[i].num_unfinished), set(held)])

    def _wait(self, lines: Lines) -> tuple[int, _Call, str | None, Any]:
        waiting = [i for i, line in lines.items() if line]
        pace = self.paces.popleft() if self.paces else 0
        i = waiting[pace % len(waiting)]
        call = lines[i].popleft()
        if pace < self.LOST:
            return i, call, None, call.references[0]
        self.in_flight.update(call.references[1])
        return i, call, "lost", None

    def _replaced(self, i: int, reason: str) -> deque[_Call]:
        self.engines[i] = Decoder(self.max_num_seqs)
        return deque([_Call("start", [None, set()])])

    def _opened(self, parcel: Any, stored: Sequence[Any], i: int) -> tuple[list[tuple[int, Rollouts]], int]:
        return parcel


def prompts(num: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (2, 3), "") for i in range(num)]


SIZES = {"num": st.integers(1, 12), "G": st.integers(1, 4), "engines": st.integers(1, 4), "places": st.integers(1, 12)}
PACES = st.lists(st.one_of(st.integers(0, 11), st.integers(Driver.LOST, Driver.LOST + 3)), max_size=20)


@given(**SIZES, paces=PACES, has_draws=st.booleans())
def test_every_prompt_is_answered_once_and_in_order(
    num: int, G: int, engines: int, places: int, paces: list[int], has_draws: bool
) -> None:
    """The responses are those of one engine that is asked for all, in order, at any pace and with any losses; and only
    what a lost engine had in flight is begun again."""
    driver = Driver(engines, places, paces)
    draws = tuple(Draw(3 * b + 1, 8) for b in range(num * G)) if has_draws else ()
    sampling = Sampling(max_tokens=8, num_responses=G, draws=draws)
    found = driver.generate(prompts(num), sampling)
    alone = Decoder(1)
    alone.begin(0, prompts(num), sampling)
    ((_, whole),) = alone.sample()
    assert len(found) == num * G
    for a, b in zip(found.responses, whole.responses, strict=True):
        assert a.prompt == b.prompt and torch.equal(a.tokens, b.tokens)
    assert driver.begun == Counter(p.id for p in prompts(num)) + driver.in_flight


@given(**SIZES, paces=st.lists(st.integers(0, 11), max_size=20))
def test_an_engine_holds_what_it_decodes_and_one_piece(
    num: int, G: int, engines: int, places: int, paces: list[int]
) -> None:
    """No engine ever has more unfinished responses than places and one more piece."""
    driver = Driver(engines, places, paces)
    driver.generate(prompts(num), Sampling(max_tokens=8, num_responses=G))
    largest = max(piece.num_responses for piece in in_pieces([None] * num, G, engines))
    assert all(one.most <= places + largest for one in driver.engines)


def test_the_next_piece_goes_to_the_engine_that_becomes_free() -> None:
    """Of 40 prompts an engine that answers nine times as often begins most, and the other what it had at first."""
    driver = Driver(2, 4, [0, 0, 0, 0, 0, 0, 0, 0, 0, 1] * 12)
    driver.generate(prompts(40), Sampling(max_tokens=8, num_responses=4))
    fast, slow = (Counter(driver._homes.values())[i] for i in (0, 1))
    assert fast + slow == 40 and slow < 10


@given(num=st.integers(1, 60), G=st.integers(1, 9), engines=st.integers(1, 5), data=st.data())
def test_pieces_hold_every_prompt_once(num: int, G: int, engines: int, data: st.DataObject) -> None:
    """Pieces are of one home, consecutive without homes, and none is so large that an engine would have none."""
    homes = data.draw(st.lists(st.sampled_from([None, *range(engines)]), min_size=num, max_size=num))
    pieces = in_pieces(homes, G, engines)
    assert sorted(p for piece in pieces for p in piece.prompts) == list(range(num))
    assert all({homes[p] for p in piece.prompts} == {piece.home} for piece in pieces)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    free = in_pieces([None] * num, G, engines)
    assert [p for piece in free for p in piece.prompts] == list(range(num)) and len(free) >= min(num, engines)


# An engine has two tokens of a response, or three and its end, when the other one's group ends the call after one.
@example(order=[0, 1], spare=0, engines=2, places=4, paces=[0], heard_after=2)
@example(order=[0, 1], spare=0, engines=2, places=4, paces=[0], heard_after=5)
@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    spare=st.integers(0, 5),
    engines=st.integers(1, 4),
    places=st.integers(1, 12),
    paces=PACES,
    heard_after=st.integers(1, 5),
)
def test_an_early_end_depends_on_no_pace(
    order: list[int], spare: int, engines: int, places: int, paces: list[int], heard_after: int
) -> None:
    """Any number of engines at any pace and with any losses leaves each response its tokens of the step at which enough
    groups are complete in one engine that decodes all side by side; and only what was in flight is begun again.

    Responses of a group need not be neighbours, and a group that goes on has fewer than the others.
    """
    num, enough = len(order), 1 + spare % len(set(order))
    draws = tuple(Draw(seed, 8, group=group) for seed, group in enumerate(order))
    whole = [response(prompt, seed) for seed, prompt in enumerate(prompts(num))]
    ends: dict[int, int] = {}
    for one, group in zip(whole, order, strict=True):
        ends[group] = max(ends.get(group, 0), len(one.tokens))
    last = sorted(ends.values())[enough - 1]
    driver = Driver(engines, places, paces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_group, "HEARD_AFTER", heard_after)
        found = driver.generate(prompts(num), Sampling(max_tokens=8, draws=draws, enough=enough))
    for a, b in zip(found.responses, (beginning(one, last) for one in whole), strict=True):
        assert a.prompt == b.prompt and a.finish == b.finish and torch.equal(a.tokens, b.tokens)
        assert len(a.logp_mu) == len(a.is_response) == len(a.tokens)
    assert driver.begun == Counter(p.id for p in prompts(num)) + driver.in_flight


def test_an_early_end_spares_the_tail() -> None:
    """Two engines, one with two groups of 40 tokens and one with two of one token: where two groups are enough, the
    first decodes no more than the steps after which it hears of that."""
    driver = Driver(2, 4, [1])
    draws = tuple(Draw(seed, 40, group=p) for p, seed in enumerate((LONG, 0, LONG, 0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_group, "HEARD_AFTER", 3)
        found = driver.generate(prompts(4), Sampling(max_tokens=40, draws=draws, enough=2))
    assert [len(one.tokens) for one in found.responses] == [1, 1, 1, 1]
    assert [one.decoded for one in driver.engines] == [2 * 3, 2]


def test_features_keep_fixed_shares() -> None:
    """With features, whose rows depend on the end of a response, each engine has one piece and `enough` of its own."""
    asked: list[tuple[int, int]] = []
    driver = Driver(2, 8)
    real = driver._asked

    def noted(piece: PromptPiece, *rest: Any) -> tuple[Any, ...]:
        found = real(piece, *rest)
        asked.append((len(piece.prompts), found[2].enough))
        return found

    driver._asked = noted
    draws = tuple(Draw(seed, 8, group=seed) for seed in range(5))
    driver.generate(prompts(5), Sampling(max_tokens=8, draws=draws, enough=3, num_features=1))
    assert asked == [(3, 2), (2, 2)]


def test_shares_hold_whole_groups() -> None:
    """Whole groups in even shares, each for one engine: what `enough` cuts does not depend on the engines' pace."""
    first, second = in_shares([0, 0, 1, 2, 2, 2, 3, 4, 4], 1, 2)
    assert first.prompts == (0, 1, 2, 3, 4, 5) and second.prompts == (6, 7, 8) and (first.home, second.home) == (0, 1)
    assert [piece.home for piece in in_shares([7], 1, 3)] == [0]
    handout = Handout([first, second], 2, 1)
    assert handout.deal([1]) == {1: [second]} and not handout.has_more(1) and handout.has_more(0)
    handout.lost(1)
    assert handout.deal([0, 1]) == {0: [first], 1: [second]}


@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_batch_that_fits_is_spread_evenly(num: int) -> None:
    """Where engines have room for all, none of them has two pieces more than another."""
    given_ = Handout(in_pieces([None] * num, 16, 3), 3, 512).deal(range(3))
    sizes = [len(pieces) for pieces in given_.values()]
    assert sum(sizes) == num and max(sizes) - min(sizes) <= 1
