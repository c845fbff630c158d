"""Laws of over-sampling: which groups a step takes, what it keeps and gives up, how stale that is, and its bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from theory.algorithm import Algorithm, Oversampling
from theory.collection import Collected, collect
from theory.contracts import Prompt, Response, RolloutEngine, Rollouts, Sampling
from theory.joining import Parts, join
from theory.objectives import preset
from theory.oversampling import Backlog, OpenGroups, StartedGroup, continued
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.step_metrics import token_lag_metrics
from theory.streams import derive_seed, stream

STOP, LONGEST = 1, 200
P, G, EXTRA = 4, 2, 3


@cache
def length_of(seed: int) -> int:
    """The length of the whole response of that stream: geometric with mean 10."""
    u = float(torch.rand((), generator=stream(seed, "length"), dtype=torch.float64))
    return min(LONGEST, 1 + int(math.log(u) / math.log(0.9)))


@dataclass
class Lockstep:
    """Ends a response with probability 1/10 after every token, drawn from its own stream; a token says its position.

    Responses after the first `room` of a call get no token before the others have ended.
    """

    version: int = 0
    room: int = 1000
    calls: list[Sampling] = field(default_factory=list)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        self.calls.append(sampling)
        own = [length_of(draw.seed) - draw.first for draw in sampling.draws]
        groups, lengths = OpenGroups(sampling), [0] * len(own)
        while any(have < want for have, want in zip(lengths, own, strict=True)) and not groups.are_enough_complete:
            running = [b for b, have in enumerate(lengths) if have < own[b]][: self.room]
            for b in running:
                lengths[b] += 1
            groups.end([b for b in running if lengths[b] == own[b]])
        responses = []
        for prompt, draw, want, have in zip(prompts, sampling.draws, own, lengths, strict=True):
            assert draw.first == len(prompt.tokens) - 1
            tokens = torch.arange(draw.first, draw.first + have) + 2
            finish = "abort" if have < want else "length" if draw.first + want == LONGEST else "stop"
            sampled = torch.ones_like(tokens, dtype=torch.bool)
            responses.append(Response(prompt, tokens, -1.0 / tokens, sampled, finish, self.version))
        return Rollouts(tuple(responses))

    def load_weights(self, named_tensors, version: int) -> None:
        self.version = version


class Numbered:
    """Prompt n says its number; a response is right if it has an even number of tokens."""

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        return [Prompt(str(step), (step,), "")] * num_prompts

    def held_out(self) -> Sequence[Prompt]:
        return ()

    def reward(self, prompt: Prompt, response: Response) -> float:
        assert prompt == response.prompt
        return float(len(response.tokens) % 2 == 0)


def algorithm(unfinished: str = "keep", max_staleness: int = 100, **changes) -> Algorithm:
    over = Oversampling(extra_prompts=EXTRA, unfinished=unfinished, max_staleness=max_staleness)  # type: ignore[arg-type]
    settings = {"objective": preset("minirl"), "num_prompts": P, "num_responses": G, "max_tokens": LONGEST}
    return Algorithm(**{**settings, "oversampling": over, **changes})


def steps(recipe: Algorithm, num: int, engine: Lockstep | None = None) -> list[Collected]:
    """The rollouts of the first steps; the version of step s is s."""
    engine, found, backlog = Lockstep() if engine is None else engine, [], None
    assert isinstance(engine, RolloutEngine)
    for step in range(num):
        engine.load_weights((), step)
        found.append(collect(step, recipe, engine, Numbered(), seed=5, backlog=backlog))
        backlog = found[-1].backlog
    return found


def numbers(collected: Collected) -> list[int]:
    return [int(r.prompt.id) for r in collected.rollouts.responses[::G]]


def whole(number: int) -> list[int]:
    """The lengths of a group's responses, sampled without interruption."""
    return [length_of(derive_seed(5, "rollout", number, i)) for i in range(G)]


# -- the groups


def test_a_call_ends_with_its_last_needed_group() -> None:
    """Of P + extra groups the call ends at the P-th smallest length of a group; all of the others' tokens are kept."""
    (found,) = steps(algorithm(), 1)
    ends = {n: max(whole(n)) for n in range(P + EXTRA)}
    last = sorted(ends.values())[P - 1]
    assert numbers(found) == [n for n, end in ends.items() if end <= last][:P]
    assert found.backlog is not None and found.backlog.next_number == P + EXTRA
    for group in found.backlog.groups:
        assert [len(r.tokens) for r in group.responses] == [min(n, last) for n in whole(group.number)]


def test_every_group_is_trained_on_once_and_whole() -> None:
    """Kept responses lose and repeat nothing: over many steps each group number is in one batch or in the backlog, the
    oldest complete ones first, and every trained response has the tokens, 2, 3, ..., of an uninterrupted one."""
    found = steps(algorithm(), 60)
    trained, left = [n for collected in found for n in numbers(collected)], found[-1].backlog
    assert left is not None
    assert sorted([*trained, *(group.number for group in left.groups)]) == list(range(left.next_number))
    for collected in found:
        assert collected.rewards_PG.shape == (P, G) and numbers(collected) == sorted(numbers(collected))
        for b, response in enumerate(collected.rollouts.responses):
            n = len(response.tokens)
            assert n == whole(int(response.prompt.id))[b % G] and response.finish in ("stop", "length")
            assert response.tokens.tolist() == list(range(2, n + 2))
            assert torch.equal(response.logp_mu, -1.0 / response.tokens)
    assert any(len(r.versions) > 2 for collected in found for r in collected.rollouts.responses)


def test_versions_are_those_of_the_steps_that_sampled() -> None:
    """A response's versions are those of the steps, in order, each from the token at which its step began; the oldest
    is its version, and no step's tokens are missing."""
    engine = Lockstep()
    found = steps(algorithm(), 30, engine)
    # What each step's call began with is in its draws: (seed, first) -> step.
    began: dict[int, list[tuple[int, int]]] = {}
    for step, call in enumerate(engine.calls):
        for draw in call.draws:
            began.setdefault(draw.seed, []).append((draw.first, step))
    assert len(engine.calls) == 30
    several = 0
    for collected in found:
        for b, response in enumerate(collected.rollouts.responses):
            expected = began[derive_seed(5, "rollout", int(response.prompt.id), b % G)]
            versions = response.versions or ((0, response.version),)
            assert list(versions) == expected and response.version == expected[0][1]
            assert response.version_T.tolist() == [
                max(step for first, step in expected if first <= t) for t in range(len(response.tokens))
            ]
            several += len(expected) > 1
    assert several > 5


@pytest.mark.parametrize("max_staleness", [1, 2, 5])
def test_staleness_is_bounded_and_the_rest_is_counted(max_staleness: int) -> None:
    """No trained token is more than max_staleness versions old. What is begun is trained on, kept, or counted as
    dropped: responses and tokens add up."""
    found = steps(algorithm(max_staleness=max_staleness), 60)
    lags = [token_lag_metrics(c.rollouts, step)["staleness/token_lag_max"] for step, c in enumerate(found)]
    assert max(lags) == max_staleness
    left = found[-1].backlog
    assert left is not None
    dropped = sum(c.metrics["sampling/dropped_responses"] for c in found)
    assert left.next_number * G == len(found) * P * G + len(left.groups) * G + dropped
    assert found[-1].metrics["sampling/kept_responses"] == len(left.groups) * G
    assert (dropped > 0) == (max_staleness < 5)
    trained = {n for c in found for n in numbers(c)} | {group.number for group in left.groups}
    lost = [n for n in range(left.next_number) if n not in trained]
    assert len(lost) * G == dropped
    tokens = sum(c.metrics["sampling/dropped_tokens"] for c in found)
    assert (tokens > 0) == (dropped > 0) and tokens <= sum(sum(whole(n)) for n in lost)


def test_dropping_leaves_no_state() -> None:
    """Under drop every step begins afresh: a step from its own number alone is the step of the whole run."""
    found = steps(algorithm("drop"), 5)
    for step, collected in enumerate(found):
        alone = collect(step, algorithm("drop"), Lockstep(version=step), Numbered(), seed=5)
        assert numbers(alone) == numbers(collected)
        assert collected.backlog is not None and collected.backlog.groups == ()
        assert min(numbers(collected)) >= step * (P + EXTRA) > max([-1, *(n for c in found[:step] for n in numbers(c))])
        assert collected.metrics["sampling/dropped_responses"] == EXTRA * G
        assert collected.metrics["sampling/kept_responses"] == 0


def test_complete_groups_need_no_call() -> None:
    """Complete groups that wait count, and the oldest are taken: where they are enough, no call is made and no group is
    begun; the others wait on."""
    begun = [StartedGroup(n, Numbered().prompts(n, 1)[0]) for n in range(10, 10 + P + 2)]
    ended = continued(Lockstep(), begun, P + 2, algorithm(), 5, call=0)
    engine = Lockstep()
    found = collect(0, algorithm(), engine, Numbered(), seed=5, backlog=Backlog(50, tuple(ended)))
    assert engine.calls == [] and numbers(found) == [10, 11, 12, 13]
    assert found.backlog is not None and found.backlog.next_number == 50
    assert [a is b for a, b in zip(found.backlog.groups, ended[P:], strict=True)] == [True, True]
    fewer = collect(0, algorithm(), engine, Numbered(), seed=5, backlog=Backlog(50, tuple(ended[:3])))
    assert len(engine.calls) == 1 and engine.calls[0].enough == 1 and numbers(fewer)[:3] == [10, 11, 12]


def test_a_response_without_tokens_begins_later() -> None:
    """An engine with room for few responses leaves some without a token: their versions begin with their first token,
    and the record of a later part has their prompts' rows."""
    found = steps(algorithm(), 20, Lockstep(room=3))
    trained = [r for c in found for r in c.rollouts.responses]
    assert all(r.version_T.tolist() == sorted(r.version_T.tolist()) for r in trained)
    assert all(len({v for _, v in r.versions}) == len(r.versions) for r in trained)
    assert all(r.version == int(r.version_T.min()) for r in trained)
    assert any(not len(r.tokens) for c in found if c.backlog is not None for g in c.backlog.groups for r in g.responses)
    prompt = Prompt("a", (3, 4, 5), "")

    def part(tokens: list[int], of: Prompt, expert: int, version: int) -> Rollouts:
        response = Response(
            of, torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)),
            torch.ones(len(tokens), dtype=torch.bool), "abort", version,
        )  # fmt: skip
        rows = torch.full((response.num_tokens - 1, 1, 1), expert, dtype=torch.int8)
        return Rollouts((response,), RoutingRecord(rows, offsets_of([len(rows)]), (0,), 8))

    first, second = part([6, 7], prompt, 1, 3), part([8], replace(prompt, tokens=(3, 4, 5, 6, 7)), 2, 4)
    joined = join([Parts(0, prompt, [(first, 0), (second, 0)])], Sampling(max_tokens=9))
    assert joined.experts is not None
    assert joined.experts.experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2]
    assert joined.responses[0].version_T.tolist() == [3, 3, 4] and joined.responses[0].version == 3


def test_dynamic_sampling_goes_on_until_groups_are_mixed() -> None:
    """With rounds, a step takes groups until P have mixed rewards; what it has not looked at stays in the backlog.

    Spare groups of equal rewards are counted as dropped.
    """
    recipe = algorithm(dynamic_sampling_rounds=6)
    found = steps(recipe, 10)
    seen: list[int] = []
    for collected in found:
        mixed = [len(set(rewards.tolist())) > 1 for rewards in collected.rewards_PG]
        assert all(mixed) and collected.metrics["sampling/kept_group_fraction"] == 1.0
        seen += numbers(collected)
    assert max(c.metrics["sampling/rounds"] for c in found) > 1
    left = found[-1].backlog
    assert left is not None and len(seen) == len(set(seen)) == 10 * P
    assert not set(seen) & {group.number for group in left.groups}
    alike = [n for n in range(left.next_number) if n not in seen and n not in {g.number for g in left.groups}]
    assert alike and all(len({length % 2 for length in whole(n)}) == 1 for n in alike)
    dropped = {name: sum(c.metrics[f"sampling/dropped_{name}"] for c in found) for name in ("responses", "tokens")}
    assert dropped == {"responses": len(alike) * G, "tokens": sum(sum(whole(n)) for n in alike)}


# -- the bias


def mean_length(unfinished: str, num: int = 400, max_staleness: int = 1000) -> float:
    """Mean length of the trained responses over many steps, after the first 20."""
    found = steps(algorithm(unfinished, max_staleness), num)[20:]
    return sum(len(r.tokens) for c in found for r in c.rollouts.responses) / (len(found) * P * G)


@pytest.mark.slow
def test_dropping_the_tail_selects_short_responses() -> None:
    """Lengths are geometric with mean 10, and 3 of 7 groups are unfinished when a step ends. The means below are those
    of docs/decisions/0013-partial-rollouts.md: dropping selects short responses, keeping them does not (four standard
    errors of 3040 responses are 0.69), and keeping them for few versions lies between."""
    found = {bound: mean_length("keep", max_staleness=bound) for bound in (1, 2, 3, 1000)}
    assert mean_length("drop") == pytest.approx(6.23, abs=0.01)
    assert list(found.values()) == pytest.approx([8.25, 9.27, 9.77, 10.09], abs=0.01)
    assert abs(found[1000] - 10) < 4 * 90**0.5 / 3040**0.5


# -- metrics and errors


def test_token_lags_by_hand() -> None:
    """Two responses scored at version 9: lags 3, 3, 1 and 0; an observation does not count."""
    prompt = Prompt("a", (3,), "")
    mask = torch.tensor([True, True, False, True])
    first = Response(prompt, torch.arange(4), torch.zeros(4), mask, "stop", 6, ((0, 6), (3, 8)))
    second = Response(prompt, torch.arange(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "stop", 9)
    assert first.version_T.tolist() == [6, 6, 6, 8] and second.version_T.tolist() == [9]
    assert token_lag_metrics(Rollouts((first, second)), 9) == {
        "staleness/token_lag_mean": 7 / 4,
        "staleness/token_lag_max": 3.0,
        "staleness/stale_token_fraction": 3 / 4,
        "staleness/mixed_response_fraction": 1 / 2,
    }


def test_what_does_not_fit_is_one_line() -> None:
    """Turns, a predictor that mu's logits hold, and no extra prompts are refused by name."""
    with pytest.raises(ValueError, match=r"^oversampling: expected none where max_turns is above 1.* got 3 .* 2$"):
        algorithm(max_turns=2)
    with pytest.raises(ValueError, match=r"^oversampling.unfinished: expected drop under Pr3 .*, got keep$"):
        algorithm(mode="Pr3")
    assert algorithm("drop", mode="Pr3").mode == "Pr3"
    with pytest.raises(ValueError, match="extra_prompts: expected extra_prompts >= 1, got 0"):
        Oversampling(extra_prompts=0)
    with pytest.raises(ValueError, match=r"^sampling.enough: expected 0 without draws.* got 2$"):
        Sampling(max_tokens=3, enough=2).limits(4)
