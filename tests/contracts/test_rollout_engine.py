"""Every rollout engine keeps the RolloutEngine contract, whatever its defects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contracts import worlds
from theory.contracts import RolloutEngine, Sampling
from theory.routing.passes import RoutingPlan

SAMPLING = Sampling(max_tokens=10, num_responses=8, seed=5, num_features=4)


@pytest.fixture(scope="module")
def weights():
    return worlds.model()


@pytest.fixture(scope="module", params=worlds.ROLLOUT_ENGINES)
def engine(request, weights):
    return worlds.ROLLOUT_ENGINES[request.param](weights)


@pytest.fixture(scope="module")
def rollouts(engine):
    """The engine's first samples, for the laws of one generation; with features, on which no token depends."""
    return engine.generate(worlds.prompts(), SAMPLING)


def test_responses_are_grouped_and_well_formed(engine, rollouts):
    """P x G responses, group-adjacent; they end at the first stop token or at the limit, and say which."""
    assert isinstance(engine, RolloutEngine)
    prompts = worlds.prompts()
    assert [r.prompt.id for r in rollouts.responses] == [p.id for p in prompts for _ in range(SAMPLING.num_responses)]
    for response in rollouts.responses:
        assert 1 <= len(response.tokens) <= SAMPLING.max_tokens
        assert not torch.isin(response.tokens[:-1], torch.tensor(worlds.STOPS)).any()
        assert response.finish == ("stop" if int(response.tokens[-1]) in worlds.STOPS else "length")
        assert response.finish == "stop" or len(response.tokens) == SAMPLING.max_tokens
        assert response.is_response.all()
        assert (response.logp_mu <= 0).all()
    # A test over responses of one length would not see ragged ones go wrong.
    assert len({len(r.tokens) for r in rollouts.responses}) > 3
    assert {r.finish for r in rollouts.responses} == {"stop", "length"}
    assert {int(r.tokens[-1]) for r in rollouts.responses if r.finish == "stop"} == set(worlds.STOPS)


def test_record_has_one_row_an_input_token(rollouts):
    """S tokens give S - 1 complete rows over all MoE layers (the last sampled token was never an input)."""
    record = rollouts.experts
    assert record is not None
    assert record.num_rows_B == [r.num_tokens - 1 for r in rollouts.responses]
    assert record.layer_numbers == (0, 1, 2)
    assert record.num_missing_rows == 0


def test_the_seed_names_the_draw(engine, rollouts):
    """The same seed gives the same bits, whether features are asked for or not, another seed other tokens."""
    again = engine.generate(worlds.prompts(), Sampling(max_tokens=10, num_responses=8, seed=5))
    other = engine.generate(worlds.prompts(), Sampling(max_tokens=10, num_responses=8, seed=6))
    assert worlds.same(rollouts, again)
    assert torch.equal(rollouts.experts.experts, again.experts.experts)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(again.responses, other.responses, strict=True))


def test_load_weights_replaces_the_policy(engine, rollouts, weights):
    """After load_weights the engine samples from the new weights and says their version; loading back undoes it."""
    other = worlds.training_engine(worlds.model(seed=1))
    engine.load_weights(other.named_tensors(), version=7)
    changed = engine.generate(worlds.prompts(), SAMPLING)
    engine.load_weights(worlds.training_engine(weights).named_tensors(), version=0)
    after = engine.generate(worlds.prompts(), SAMPLING)
    assert {r.version for r in changed.responses} == {7}
    assert {r.version for r in after.responses} == {0}
    assert not worlds.same(rollouts, changed)
    assert worlds.same(rollouts, after)


def test_features_are_drawn_evenly_over_the_response(rollouts):
    """Features stand on at most num_features of the rows that predict response tokens."""
    assert rollouts.features is not None
    for b, response in enumerate(rollouts.responses):
        rows = rollouts.features.rows_of(b).tolist()
        own = range(len(response.prompt.tokens) - 1, response.num_tokens - 1)
        assert len(rows) == min(4, len(own))
        assert set(rows) <= set(own)


def test_greedy_decoding_takes_the_likeliest_token(engine):
    """At temperature 0 every token is mu's likeliest, and logp_mu is that of temperature 1."""
    sampling = Sampling(max_tokens=8, num_responses=2, temperature=0.0, seed=0, num_top=1)
    found = engine.generate(worlds.prompts(), sampling)
    assert found.temperature == 1 and found.top is not None
    for b, response in enumerate(found.responses):
        ids, logp = found.top.rows(b)
        assert torch.equal(ids[:, 0].long(), response.tokens) and torch.equal(logp[:, 0], response.logp_mu)


def test_greedy_limit_takes_the_most_likely_token(engine):
    """As the temperature goes to 0 the sampled tokens' log-probs exceed those at temperature 1 on average."""
    cold = engine.generate(worlds.prompts(), Sampling(max_tokens=8, num_responses=8, temperature=1e-4, seed=0))
    warm = engine.generate(worlds.prompts(), Sampling(max_tokens=8, num_responses=8, temperature=1.0, seed=0))
    mean = [torch.cat([r.logp_mu for r in x.responses]).mean() for x in (cold, warm)]
    assert mean[0] > mean[1]


def test_only_engines_that_keep_the_link_equal_the_trainer(engine, rollouts, weights):
    """trainer == engine, bit for bit in log-probs, holds for `exact`, whose routes are equal too, and where no defect
    breaks it: it holds for a sampler that draws from something else than it scores."""
    scores = worlds.training_engine(weights).score(rollouts, RoutingPlan("natural"))
    batch = rollouts.padded()
    equal = torch.equal(scores.logp_BT[batch.is_response_BT], batch.logp_mu_BT[batch.is_response_BT])
    assert equal == all("trainer" not in defect.breaks for defect in engine.defects)
    if not engine.defects:
        assert torch.equal(scores.natural.experts, rollouts.experts.experts)


def test_exact_engine_is_batch_invariant(weights):
    """The exact engine gives a response the same tokens, log-probs and routes alone and in any batch."""
    engine = worlds.rollout_engine("exact", weights)
    prompts, sampling = worlds.prompts(6), replace(SAMPLING, max_tokens=24, num_responses=3)
    together = engine.generate(prompts, sampling)
    for num in (1, 2, 5):
        part = engine.generate(prompts[:num], sampling)
        assert worlds.same(part, together.select(range(3 * num)))
        assert torch.equal(part.experts.experts, together.select(range(3 * num)).experts.experts)


def test_sampled_frequencies_follow_mu(weights):
    """Over 4,000 draws of the first token, frequencies meet exp(logp_mu) within 4 binomial standard errors."""
    engine = worlds.rollout_engine("exact", weights)
    n = 4000
    rollouts = engine.generate(worlds.prompts(1), Sampling(max_tokens=1, num_responses=n, seed=3))
    tokens = torch.stack([r.tokens[0] for r in rollouts.responses])
    for token in tokens.unique().tolist():
        p = rollouts.responses[int((tokens == token).nonzero()[0])].logp_mu[0].exp().item()
        frequency = (tokens == token).float().mean().item()
        assert abs(frequency - p) <= 4 * (p * (1 - p) / n) ** 0.5 + 1 / n
