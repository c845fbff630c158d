"""Over-sampling on a real vLLM: calls that end early, and responses that later calls and other weights continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from sandbox.model.checkpoint import to_hf
from scaled.vllm_engine.engine import VllmEngine
from tests.scaled import vllm_world as world
from theory.algorithm import Algorithm, Oversampling
from theory.contracts import Draw, Rollouts, Sampling
from theory.objectives import preset
from theory.oversampling import StartedGroup, continued
from theory.streams import derive_seed

pytestmark = [pytest.mark.slow, *(pytest.mark.filterwarnings(w) for w in world.WARNINGS)]

P, G = 5, 2
# Float32 sums in another order: a part's first pass is a prefill, a decoding step elsewhere.
TOLERANCE = 1e-5
RECIPE = Algorithm(
    objective=preset("minirl", centering="top_k", centering_k=3), num_prompts=3, num_responses=G, max_tokens=40,
    oversampling=Oversampling(extra_prompts=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine with room for 8 of the 10 responses: the last group may have no token when a call ends."""
    engine = world.engine(world.model(), tmp_path_factory.mktemp("vllm"), max_num_seqs=8)
    yield engine
    engine.close()


def groups() -> list[StartedGroup]:
    return [StartedGroup(n, prompt) for n, prompt in enumerate(world.prompts((3, 9, 5, 40, 2)))]


def grown(engine: VllmEngine, enough: Sequence[int], start: Sequence[StartedGroup]) -> list[StartedGroup]:
    found = list(start)
    for call, number in enumerate(enough):
        found = continued(engine, found, number, RECIPE, seed=2, call=call)
    return found


def together(found: Sequence[StartedGroup]) -> Rollouts:
    return Rollouts.concat([group.rollouts for group in found if group.rollouts is not None])


def test_parts_at_one_version_are_the_whole(engine: VllmEngine) -> None:
    """A response in up to five parts, all from the same weights, has the tokens, routes and likeliest tokens of the one
    sampled at a go, and its log-probabilities to float32 rounding: each token draws by its own position."""
    parts, whole = (together(grown(engine, enough, groups())) for enough in (range(1, P + 1), [P]))
    lengths = [len(r.tokens) for r in whole.responses]
    assert len(set(lengths)) > 4
    for a, b in zip(parts.responses, whole.responses, strict=True):
        assert torch.equal(a.tokens, b.tokens) and a.finish == b.finish != "abort"
        assert (a.logp_mu - b.logp_mu).abs().max() <= TOLERANCE
    assert parts.experts is not None and whole.experts is not None and parts.experts.num_missing_rows == 0
    assert torch.equal(parts.experts.experts, whole.experts.experts)
    assert parts.top is not None and whole.top is not None and torch.equal(parts.top.ids, whole.top.ids)


def test_a_call_ends_once_enough_groups_have(engine: VllmEngine) -> None:
    """With enough = 2 two groups have ended and another has not; unfinished responses are the whole ones' beginnings,
    with a row for every token but the last, and the engine is idle for the next call."""
    cut, whole = grown(engine, [2], groups()), grown(engine, [P], groups())
    assert 2 <= sum(group.is_complete for group in cut) < P
    a, b = together(cut), together(whole)
    assert a.experts is not None and b.experts is not None
    for i, (short, long) in enumerate(zip(a.responses, b.responses, strict=True)):
        n = len(short.tokens)
        assert torch.equal(short.tokens, long.tokens[:n])
        assert short.finish == (long.finish if n == len(long.tokens) else "abort")
        if n:
            assert torch.equal(a.experts.rows(i), b.experts.rows(i)[: short.num_tokens - 1])
    assert not engine._engine.has_unfinished_requests()


def test_responses_end_where_a_call_is_cut(engine: VllmEngine) -> None:
    """A piece that is called for three steps has not ended; cut at five tokens it has the first five of each response,
    or the whole of a shorter one, with their routes, and the engine is idle."""
    whole = together(grown(engine, [P], groups()))
    draws = tuple(Draw(derive_seed(2, "rollout", n, g), 40, group=n) for n in range(P) for g in range(G))
    prompts = [group.prompt for group in groups() for _ in range(G)]
    engine.begin(7, prompts, Sampling(max_tokens=40, draws=draws, num_top=3, enough=P))
    assert engine.sample(steps=3) == [] and engine.num_unfinished > 0
    ((number, cut),) = engine.sample(most=5)
    assert number == 7 and not engine._engine.has_unfinished_requests()
    assert cut.experts is not None and whole.experts is not None
    for b, (short, long) in enumerate(zip(cut.responses, whole.responses, strict=True)):
        assert torch.equal(short.tokens, long.tokens[:5])
        assert short.finish == (long.finish if len(long.tokens) <= 5 else "abort")
        assert torch.equal(cut.experts.rows(b), whole.experts.rows(b)[: short.num_tokens - 1])


def test_each_part_is_its_versions(engine: VllmEngine) -> None:
    """Responses begun at version 0 and continued at version 1: every token's log-probability is that of its own
    version's weights, to float32 rounding, and not the other's; so is every row of routes."""
    old, new = world.model(), world.model(seed=1)
    try:
        first = grown(engine, [1], groups())
        engine.load_weights(to_hf(new), version=1)
        rollouts = together(grown(engine, [P], first))
    finally:
        engine.load_weights(to_hf(old), version=0)
    scores = [world.trainer_scores(model, rollouts) for model in (old, new)]
    several = 0
    for b, response in enumerate(rollouts.responses):
        n, version_T = len(response.tokens), response.version_T
        gap = torch.stack([(s.logp_BT[b, :n] - response.logp_mu).abs() for s in scores])
        assert gap.gather(0, version_T[None]).max() <= TOLERANCE
        assert gap.gather(0, 1 - version_T[None]).mean() > 0.01
        num_prompt = len(response.prompt.tokens)
        assert rollouts.experts is not None and all(s.natural is not None for s in scores)
        rows = [s.natural.rows(b) for s in scores]  # type: ignore[union-attr]
        row_version = torch.cat([version_T[:1].expand(num_prompt - 1), version_T])
        for row, version in enumerate(row_version.tolist()):
            assert torch.equal(rollouts.experts.rows(b)[row].long(), rows[version][row].long())
        several += len(response.versions) == 2
    assert several > 2
