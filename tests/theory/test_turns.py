"""Laws of rollouts in turns: what is merged, whose draws are whose, what the budget cuts, which rows are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theory.algorithm import Algorithm
from theory.contracts import Environment, Prompt, Response, RolloutEngine, Rollouts, Sampling
from theory.objectives import preset
from theory.old_pass import feature_rows
from theory.routing.features import RouterFeatures, draw_sampling_rows, sampling_rows
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.step_metrics import rollout_metrics
from theory.streams import derive_seed, stream
from theory.turns import roll_out, sampled_tokens

STOP, OBSERVED = 1, 9
PROMPTS = [Prompt("a", (2, 3), "0"), Prompt("b", (4,), "1"), Prompt("c", (5, 6, 7), "2"), Prompt("d", (2,), "3")]


def logp_of(prefix: Sequence[int], token: int) -> float:
    """The engine's number for a token after a prefix: any number that no other prefix has."""
    return -(1 + derive_seed(0, "logp", *prefix, token) % 10_000) / 100


class Engine:
    """A policy over tokens 1 to 5 that ends a turn with probability 1/3; it keeps the contract, drawn by drawn token.

    Its routes say in which call a row was computed, its features of which prefix a row is, its versions count calls.
    """

    def __init__(self, has_record: bool = True):
        self.calls: list[tuple[list[Prompt], Sampling]] = []
        self.has_record = has_record

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        self.calls.append((list(prompts), sampling))
        responses = []
        for b in range(len(prompts) * sampling.num_responses):
            draw = sampling.draws[b] if sampling.draws else None
            limit = sampling.max_tokens if draw is None else draw.max_tokens
            own = stream(derive_seed(sampling.seed, b) if draw is None else draw.seed, "test")
            prompt, tokens = prompts[b // sampling.num_responses], []
            while len(tokens) < limit and STOP not in tokens:
                has_ended = torch.rand((), generator=own) < 1 / 3
                tokens.append(STOP if has_ended else int(torch.randint(2, 6, (), generator=own)))
            logp = [logp_of((*prompt.tokens, *tokens[:t]), token) for t, token in enumerate(tokens)]
            finish = "stop" if STOP in tokens else "length"
            is_response = torch.ones(len(tokens), dtype=torch.bool)
            numbers = torch.tensor(tokens), torch.tensor(logp)
            responses.append(Response(prompt, *numbers, is_response, finish, 50 - len(self.calls)))
        return Rollouts(tuple(responses), self._record(responses), self._features(responses, sampling))

    def load_weights(self, named_tensors, version: int) -> None:
        raise AssertionError("a rollout hands no weights over")

    def _record(self, responses: list[Response]) -> RoutingRecord | None:
        if not self.has_record:
            return None
        rows = [torch.tensor([[[s, 60 + len(self.calls)]] for s in range(r.num_tokens - 1)]) for r in responses]
        rows = [r.reshape(-1, 1, 2).to(torch.int8) for r in rows]
        return RoutingRecord(torch.cat(rows), offsets_of([len(r) for r in rows]), (4,), 100)

    def _features(self, responses: list[Response], sampling: Sampling) -> RouterFeatures | None:
        if sampling.num_features == 0:
            return None
        own = [sampling_rows(len(r.prompt.tokens), r.is_response) for r in responses]
        rows = draw_sampling_rows(own, sampling.num_features, stream(sampling.seed, "rows"))
        marks = torch.cat(rows)[:, None, None].double()
        return RouterFeatures(torch.cat(rows), offsets_of([len(r) for r in rows]), marks, marks + 0.5, (4,))


class Echo:
    """Answers the first `num_answers[prompt]` turns with as many tokens as the last turn's first one says, less two."""

    def __init__(self, *num_answers: int):
        self.num_answers = num_answers

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        return PROMPTS[:num_prompts]

    def held_out(self) -> Sequence[Prompt]:
        return ()

    def reward(self, prompt: Prompt, response: Response) -> float:
        return 0.0

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        assert response.prompt == prompt
        num_turns = int((response.tokens[response.is_response] == STOP).sum())
        if num_turns > self.num_answers[int(prompt.answer)]:
            return None
        return (OBSERVED,) * max(int(response.tokens[0]) - 2, 0)


class Plain:
    """The same without turns."""

    prompts, held_out, reward = Echo.prompts, Echo.held_out, Echo.reward


SAMPLING = Sampling(max_tokens=30, num_responses=3, seed=7, num_features=4)


def mixed(engine: Engine | None = None, **changes: Any) -> Rollouts:
    """Conversations of one to five turns."""
    return roll_out(engine or Engine(), Echo(3, 0, 4, 1), PROMPTS, replace(SAMPLING, **changes), max_turns=5)


def turns_of(response: Response) -> list[tuple[int, int]]:
    """[start, stop) of every turn: up to its end token, and past the observation."""
    spans, start = [], 0
    for t, token in enumerate(response.tokens.tolist()):
        if not response.is_response[t]:
            start = t + 1
        elif token == STOP or t + 1 == len(response.tokens):
            spans.append((start, t + 1))
            start = t + 1
    return spans


def test_a_task_without_turns_gets_what_the_engine_gave() -> None:
    """One call with the caller's own prompts and sampling, and its very rollouts, however many turns are allowed."""
    engine = Engine()
    assert isinstance(engine, RolloutEngine) and isinstance(Echo(0), Environment)
    assert not isinstance(Plain(), Environment)
    rollouts = roll_out(engine, Plain(), PROMPTS, SAMPLING, max_turns=4)
    assert engine.calls == [(PROMPTS, SAMPLING)]
    again = Engine().generate(PROMPTS, SAMPLING)
    for a, b in zip(rollouts.responses, again.responses, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_mu, b.logp_mu)


answers = st.tuples(*[st.integers(0, 4)] * 4)


@given(answers=answers, max_turns=st.integers(1, 5), max_tokens=st.integers(1, 25), seed=st.integers(0, 99))
def test_what_mu_sampled_and_what_came_back(answers, max_turns: int, max_tokens: int, seed: int) -> None:
    """Sampled tokens have the log-prob of their whole prefix; the others are the task's answers, with log-prob 0."""
    task = Echo(*answers)
    sampling = replace(SAMPLING, max_tokens=max_tokens, seed=seed)
    for b, response in enumerate(roll_out(Engine(), task, PROMPTS, sampling, max_turns).responses):
        prompt = PROMPTS[b // 3]
        assert response.prompt is prompt
        tokens = response.tokens.tolist()
        assert response.logp_mu[~response.is_response].tolist() == [0.0] * tokens.count(OBSERVED)
        assert response.is_response.tolist() == [token != OBSERVED for token in tokens]
        expected = [logp_of((*prompt.tokens, *tokens[:t]), tokens[t]) for t in response.is_response.nonzero()[:, 0]]
        assert response.logp_mu[response.is_response].tolist() == torch.tensor(expected).tolist()
        for start, stop in turns_of(response)[1:]:
            assert start > 0 and STOP not in tokens[start : stop - 1]


@given(answers=answers, max_turns=st.integers(1, 5), max_tokens=st.integers(1, 25), seed=st.integers(0, 99))
def test_the_budget_counts_everything_after_the_prompt(answers, max_turns: int, max_tokens: int, seed: int) -> None:
    """A response never exceeds max_tokens or max_turns and ends with a sampled token; it says "length" just where
    max_tokens left no room for its turn or for the next, and "turns" where max_turns alone cut it."""
    task, sampling = Echo(*answers), replace(SAMPLING, max_tokens=max_tokens, seed=seed)
    for response in roll_out(Engine(), task, PROMPTS, sampling, max_turns).responses:
        turns, has_ended = turns_of(response), int(response.tokens[-1]) == STOP
        assert 1 <= len(response.tokens) <= max_tokens and len(turns) <= max_turns and response.is_response[-1]
        observation = task.observe(response.prompt, response)
        has_room = has_ended and len(response.tokens) + len(observation or ()) < max_tokens
        is_over = has_ended and observation is None
        assert response.finish == ("stop" if is_over else "turns" if has_room else "length")
        if not has_ended:
            assert len(response.tokens) == max_tokens
        elif response.finish == "turns":
            assert len(turns) == max_turns


def test_a_row_is_of_the_turn_that_sampled_its_successor() -> None:
    """S - 1 rows; turn n's end before its last token, and the observation's rows are those of the turn that read it."""
    rollouts = mixed()
    record = rollouts.experts
    assert record is not None and record.layer_numbers == (4,)
    longest = 0
    for b, response in enumerate(rollouts.responses):
        num_prompt, turns = len(response.prompt.tokens), turns_of(response)
        calls = [
            next(n for n, (_, stop) in enumerate(turns, 1) if s + 1 < num_prompt + stop)
            for s in range(response.num_tokens - 1)
        ]
        assert record.rows(b)[:, 0, 0].tolist() == list(range(response.num_tokens - 1))
        assert (record.rows(b)[:, 0, 1] - 60).tolist() == calls
        # Weights may change between turns: the version is the smallest, here that of the last call.
        assert response.version == 50 - len(turns)
        longest = max(longest, len(turns))
    assert longest == 5
    assert mixed(Engine(has_record=False)).experts is None


def test_a_response_does_not_depend_on_which_others_go_on() -> None:
    """Where the other prompts' conversations end at once, or continue longer, a response keeps all its bits."""
    whole = roll_out(Engine(), Echo(3, 1, 4, 2), PROMPTS, SAMPLING, max_turns=5)
    for kept in range(4):
        for others in (0, 4):
            counts = [others] * 4
            counts[kept] = (3, 1, 4, 2)[kept]
            again = roll_out(Engine(), Echo(*counts), PROMPTS, SAMPLING, max_turns=5)
            for b in range(3 * kept, 3 * kept + 3):
                a, c = whole.responses[b], again.responses[b]
                assert torch.equal(a.tokens, c.tokens) and torch.equal(a.logp_mu, c.logp_mu) and a.finish == c.finish


def test_turns_and_responses_draw_apart() -> None:
    """All seeds of all turns differ: of the first call, and of every response in every later one."""
    engine = Engine()
    roll_out(engine, Echo(4, 4, 4, 4), PROMPTS, replace(SAMPLING, max_tokens=200), max_turns=5)
    first, *later = [sampling for _, sampling in engine.calls]
    assert first == replace(SAMPLING, max_tokens=200) and len(later) == 4
    seeds = [first.seed, *(s.seed for s in later), *(draw.seed for s in later for draw in s.draws)]
    assert len(set(seeds)) == len(seeds) == 5 + 4 * 12
    for prompts, sampling in engine.calls[1:]:
        assert sampling.num_responses == 1 and sampling.temperature == SAMPLING.temperature
        assert sampling.max_tokens == max(draw.max_tokens for draw in sampling.draws)
        for prompt, draw in zip(prompts, sampling.draws, strict=True):
            original = PROMPTS[int(prompt.answer)]
            assert draw.max_tokens + len(prompt.tokens) - len(original.tokens) == 200


def test_turns_are_counted_where_a_recipe_has_them() -> None:
    """turns/mean counts what mu said between observations (an empty one parts nothing); one turn has no such metric."""
    rollouts = mixed()
    turns = [sum(sampled for sampled, _ in groupby(r.is_response.tolist())) for r in rollouts.responses]
    rewards_B = torch.zeros(len(turns))
    assert len(set(turns)) > 2
    assert rollout_metrics(rollouts, rewards_B, max_turns=5)["turns/mean"] == sum(turns) / len(turns)
    assert "turns/mean" not in rollout_metrics(rollouts, rewards_B, max_turns=1)


@pytest.mark.parametrize(("max_tokens", "max_turns"), [(60, 1), (60, 3), (9, 9), (9, 2)])
def test_only_max_tokens_cuts_at_the_length_limit(max_tokens: int, max_turns: int) -> None:
    """clip_ratio counts responses that would be longer with more tokens, and not those that max_turns cut."""
    cut = []
    for tokens in (max_tokens, 10 * max_tokens):
        sampling = replace(SAMPLING, max_tokens=tokens)
        cut.append(roll_out(Engine(), Echo(4, 4, 4, 4), PROMPTS, sampling, max_turns))
    pairs = list(zip(*(r.responses for r in cut), strict=True))
    longer = [len(a.tokens) < len(b.tokens) or a.finish != b.finish for a, b in pairs]
    found = rollout_metrics(cut[0], torch.zeros(len(pairs)), max_turns)["response_length/clip_ratio"]
    assert found == sum(longer) / len(longer) and any(r.finish != "stop" for r in cut[0].responses)


def test_features_stand_on_sampled_tokens_alone() -> None:
    """At most num_features rows, all of them predicting sampled tokens, with the values of their own turn."""
    rollouts = mixed()
    features = rollouts.features
    assert features is not None and features.hidden is not None
    for b, response in enumerate(rollouts.responses):
        rows = features.rows_of(b).tolist()
        own = sampling_rows(len(response.prompt.tokens), response.is_response).tolist()
        assert rows == sorted(set(rows)) and set(rows) <= set(own) and len(rows) == min(4, len(own))
    assert torch.equal(features.hidden[:, 0, 0], features.rows.double())
    assert torch.equal(features.logits[:, 0, 0], features.rows + 0.5)
    assert mixed(num_features=0).features is None


def test_features_are_uniform_over_all_turns() -> None:
    """Every pair of a response's sampling rows is drawn equally often, whichever turns they are of.

    Turns of 2, 1 and 3 tokens: 15 pairs, 300 draws; chi-square with 14 degrees of freedom between its 0.1% and its
    99.9% quantile, 2.9 and 36.1; the streams are fixed.
    """

    class Fixed(Engine):
        def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
            self.calls.append((list(prompts), sampling))
            tokens = torch.tensor([[4, STOP], [STOP], [3, 3, STOP]][len(self.calls) - 1])
            is_response = torch.ones(len(tokens), dtype=torch.bool)
            response = Response(prompts[0], tokens, torch.zeros(len(tokens)), is_response, "stop", 0)
            return Rollouts((response,), None, self._features([response], sampling))

    own = [1, 2, 5, 8, 9, 10]  # prompt of 2, turn of 2, two observed, one, two observed, turn of 3
    counts = dict.fromkeys(combinations(own, 2), 0)
    for seed in range(300):
        sampling = Sampling(max_tokens=20, seed=seed, num_features=2)
        rollouts = roll_out(Fixed(), Echo(2, 0, 0, 0), PROMPTS[:1], sampling, max_turns=3)
        assert rollouts.features is not None
        counts[tuple(rollouts.features.rows.tolist())] += 1
    chi_square = sum((count - 20) ** 2 / 20 for count in counts.values())
    assert len(counts) == 15 and 2.9 < chi_square < 36.1


def test_the_loops_own_feature_rows_leave_observations_out() -> None:
    """Where the engine drew none, rows are drawn among those that predict sampled tokens: all of them, if few."""
    rollouts = mixed(num_features=0)
    algorithm = Algorithm(preset("minirl"), mode="Pr2")
    assert any(not r.is_response.all() for r in rollouts.responses)
    for response, rows in zip(rollouts.responses, feature_rows(0, algorithm, rollouts, seed=0), strict=True):
        tokens, first = response.tokens.tolist(), len(response.prompt.tokens) - 1
        assert rows.tolist() == [first + t for t, token in enumerate(tokens) if token != OBSERVED]


@given(answers=answers, seed=st.integers(0, 99))
def test_a_written_response_is_masked_as_a_sampled_one(answers, seed: int) -> None:
    """From the tokens alone the task says which are observations, and refuses one that it would not have made."""
    task, sampling = Echo(*answers), replace(SAMPLING, seed=seed, max_tokens=60)
    for response in roll_out(Engine(), task, PROMPTS, sampling, max_turns=9).responses:
        tokens = response.tokens.tolist()
        mask = sampled_tokens(task, response.prompt, tokens, STOP)
        assert torch.equal(mask, response.is_response)
        assert sampled_tokens(Plain(), response.prompt, tokens, STOP).all()
        if OBSERVED in tokens:
            tokens[tokens.index(OBSERVED)] = 3
            with pytest.raises(ValueError, match=r"expected the observation \(9"):
                sampled_tokens(task, response.prompt, tokens, STOP)
