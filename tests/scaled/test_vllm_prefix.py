"""Prefix caching and several turns: whatever is not computed again still has its own routes, or -1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sandbox.model.checkpoint import to_hf
from scaled.vllm_engine.engine import VllmEngine
from tests.contracts.worlds import same
from tests.sandbox.engines.turns_world import Talk
from tests.scaled import vllm_world as world
from theory.contracts import Prompt, Response, Rollouts, Sampling
from theory.turns import roll_out

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]

SAMPLING = Sampling(max_tokens=40, num_responses=4, seed=5)
TALKS = Sampling(max_tokens=150, num_responses=6, seed=6, num_features=4)
BLOCK = 32  # tokens of a cache block on a CPU


class SilentOnce(Talk):
    """Does not answer the first prompt."""

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        return None if prompt.id == "0" else super().observe(prompt, response)


@dataclass
class Uncached:
    """Responses of an engine without a prefix cache: in one turn, in several, and in several with one prompt silent."""

    once: Rollouts
    talks: Rollouts
    some_talks: Rollouts


@pytest.fixture(scope="module")
def uncached_engines(tmp_path_factory: pytest.TempPathFactory) -> Uncached:
    engine = world.engine(world.model(), tmp_path_factory.mktemp("vllm-uncached"))
    once = engine.generate(world.prompts(), SAMPLING)
    talks = roll_out(engine, Talk(), world.prompts(), TALKS, max_turns=3)
    some_talks = roll_out(engine, SilentOnce(), world.prompts(), TALKS, max_turns=3)
    engine.close()
    return Uncached(once, talks, some_talks)


@pytest.fixture(scope="module")
def uncached(uncached_engines: Uncached) -> Rollouts:
    return uncached_engines.once


@pytest.fixture(scope="module")
def engine(uncached_engines: Uncached, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    engine = world.engine(world.model(), tmp_path_factory.mktemp("vllm-cached"), prefix_caching=True)
    yield engine
    engine.close()


def test_a_prefix_cache_changes_nothing(engine, uncached):
    """With the cache on, cold and warm, tokens, log-probs and complete routes are those without it, bit for bit."""
    for _ in range(2):
        cached = engine.generate(world.prompts(), SAMPLING)
        assert same(cached, uncached)
        assert cached.experts.num_missing_rows == 0


def test_a_cached_prefix_without_routes_is_missing(engine, uncached):
    """Cached rows whose routes are not known are -1, whole blocks of them; every other row is what it was."""
    engine.generate(world.prompts(), SAMPLING)
    worker = engine._engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker._routes.forget_cache()
    masked = engine.generate(world.prompts(), SAMPLING)
    for b, response in enumerate(masked.responses):
        rows, known = masked.experts.rows(b), uncached.experts.rows(b)
        num_missing = (len(response.prompt.tokens) - 1) // BLOCK * BLOCK
        assert (rows[:num_missing] == -1).all()
        assert torch.equal(rows[num_missing:], known[num_missing:])
    assert masked.experts.num_missing_rows == 4 * (96 + 64)
    # The bits of everything else do not hang on the record.
    assert all(torch.equal(a.logp_mu, b.logp_mu) for a, b in zip(masked.responses, uncached.responses, strict=True))
    engine.load_weights(to_hf(world.model()), version=0)


def test_a_second_turn_has_the_routes_of_the_first(engine):
    """A prompt that holds an earlier prompt and response finds their rows in the cache, and they are the trainer's."""
    first = engine.generate(world.prompts(), SAMPLING)
    turns = [Prompt(f"{b}", (*r.prompt.tokens, *r.tokens.tolist(), 7, 8, 9), "") for b, r in enumerate(first.responses)]
    second = engine.generate(turns, Sampling(max_tokens=10, seed=9))
    assert second.experts.num_missing_rows == 0
    for b, response in enumerate(first.responses):
        num_rows = response.num_tokens - 1
        assert torch.equal(second.experts.rows(b)[:num_rows], first.experts.rows(b))
    assert (world.abs_diff(world.model(), second) <= 1e-5).all()
    natural = world.trainer_scores(world.model(), second).natural
    assert torch.equal(natural.experts, second.experts.experts)


def test_turns_are_the_trainers_and_the_cache_changes_nothing(engine, uncached_engines):
    """Conversations with the cache are those without it, bit for bit; the trainer finds their log-probs and routes."""
    talks = roll_out(engine, Talk(), world.prompts(), TALKS, max_turns=3)
    assert same(talks, uncached_engines.talks)
    assert talks.experts.num_missing_rows == 0
    num_turns = [int((r.tokens[r.is_response] == world.STOP).sum()) for r in talks.responses]
    assert max(num_turns) >= 2 and any(not r.is_response.all() for r in talks.responses)
    assert all(len(r.tokens) <= TALKS.max_tokens for r in talks.responses)
    assert (world.abs_diff(world.model(), talks) <= 1e-5).all()
    scores = world.trainer_scores(world.model(), talks, talks.features.feature_rows)
    assert torch.equal(scores.natural.experts, talks.experts.experts)
    # float32 sums in another order, on inputs and logits of order 1.
    assert torch.allclose(scores.features.logits, talks.features.logits, atol=1e-4)


def test_a_turn_does_not_depend_on_which_others_go_on(uncached_engines):
    """Where the first prompt's conversations end after a turn, every other one is what it is where they continue."""
    some, every, G = uncached_engines.some_talks, uncached_engines.talks, TALKS.num_responses
    others = range(G, len(every))
    assert same(some.select(others), every.select(others))
    assert any(not r.is_response.all() for r in every.responses[:G]), "expected the first prompt's to continue"
    assert any(not r.is_response.all() for r in every.responses[G:]), "expected others to continue"


def test_new_weights_forget_cached_keys_and_routes(engine):
    """After a push, prompts that were cached under the old weights have the new weights' log-probs and routes."""
    engine.generate(world.prompts(), SAMPLING)
    engine.load_weights(to_hf(world.model(seed=1)), version=1)
    try:
        fresh = engine.generate(world.prompts(), SAMPLING)
        assert (world.abs_diff(world.model(seed=1), fresh) <= 1e-5).all()
        assert torch.equal(world.trainer_scores(world.model(seed=1), fresh).natural.experts, fresh.experts.experts)
    finally:
        engine.load_weights(to_hf(world.model()), version=0)
