"""The training engine keeps its contract: pi starts as old, replay is exact, state resumes to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import worlds
from theory.contracts import MiniBatch, Rollouts, Sampling, TrainingEngine
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings

SAMPLING = Sampling(max_tokens=16, num_responses=4, seed=2)


@pytest.fixture(scope="module")
def weights():
    return worlds.model()


@pytest.fixture(scope="module")
def rollouts(weights) -> Rollouts:
    return worlds.rollout_engine("fp8-and-noise", weights).generate(worlds.prompts(), SAMPLING)


def minibatch(rollouts: Rollouts, logp_old_BT: torch.Tensor) -> MiniBatch:
    advantages_B = torch.tensor([(-1.0) ** b * (1 + b % 3) for b in range(len(rollouts))])
    return MiniBatch(rollouts, logp_old_BT, advantages_B, index=0, num_minibatches=1)


@pytest.mark.parametrize("source", ["natural", "replay"])
def test_pi_is_old_before_the_first_update(weights, rollouts, source):
    """The gradient pass of the first update gives the old pass's log-probs bit for bit, replayed or not."""
    engine = worlds.training_engine(weights)
    assert isinstance(engine, TrainingEngine)
    routing = RoutingPlan(source, record=rollouts.experts if source == "replay" else None)
    scores = engine.score(rollouts, routing)
    stats = engine.update(minibatch(rollouts, scores.logp_BT), preset("minirl"), routing)
    assert torch.equal(stats.logp_pi_BT, scores.logp_BT)
    assert stats.metrics["actor/ratio_mean"] == 1.0
    assert stats.metrics["actor/pg_clipfrac"] == 0.0


def test_recorded_old_route_replays_to_the_same_bits(weights, rollouts):
    """R2's first mini-batch: replaying the old pass's experts leaves the target policy untouched (MiniRL Tab. 1)."""
    engine = worlds.training_engine(weights)
    natural = engine.score(rollouts, RoutingPlan("natural"))
    replayed = engine.score(rollouts, RoutingPlan("replay", record=natural.experts))
    assert torch.equal(natural.logp_BT, replayed.logp_BT)
    assert torch.equal(natural.experts.experts, replayed.experts.experts)


def test_replay_uses_the_record_and_keeps_what_it_would_have_chosen(weights, rollouts):
    """R3: the experts used are mu's on every row; the natural ones differ somewhere, as the engine is noisy."""
    engine = worlds.training_engine(weights)
    scores = engine.score(rollouts, RoutingPlan("replay", record=rollouts.experts))
    assert torch.equal(scores.experts.experts, rollouts.experts.experts)
    assert not torch.equal(scores.natural.experts, rollouts.experts.experts)


def test_zero_predictor_is_natural_routing(weights, rollouts):
    """With W_p = 0, Pr2's old pass has the bits of R2's: same experts, gates and log-probs (Pr2 Eq. 4-6)."""
    engine = worlds.training_engine(weights, PredictorSettings(1.0))
    predicted = RoutingPlan("predicted", gates="predicted", predictor=engine.predictor_weights())
    natural = engine.score(rollouts, RoutingPlan("natural"))
    assert torch.equal(engine.score(rollouts, predicted).logp_BT, natural.logp_BT)


@pytest.mark.parametrize("micro_batch_size", [1, 5])
def test_scores_do_not_depend_on_micro_batches(weights, rollouts, micro_batch_size):
    """Scores and records are the same bits for every micro-batch size."""
    whole = worlds.training_engine(weights).score(rollouts, RoutingPlan("natural"))
    parts = worlds.training_engine(weights, micro_batch_size=micro_batch_size).score(rollouts, RoutingPlan("natural"))
    assert torch.equal(whole.logp_BT, parts.logp_BT)
    assert torch.equal(whole.entropy_BT, parts.entropy_BT)
    assert torch.equal(whole.natural.experts, parts.natural.experts)


@pytest.mark.parametrize("name", ["minirl", "grpo", "grpo_dapo", "gspo"])
def test_updates_do_not_depend_on_micro_batches(weights, rollouts, name):
    """The gradient norm and metrics of an update are those of the whole mini-batch, to float32 summation order."""
    norms, metrics = [], []
    for size in (128, 3):
        engine = worlds.training_engine(weights, micro_batch_size=size)
        scores = engine.score(rollouts, RoutingPlan("natural"))
        stats = engine.update(minibatch(rollouts, scores.logp_BT), preset(name), RoutingPlan("natural"))
        norms.append(stats.metrics["actor/grad_norm"])
        metrics.append(stats.metrics)
    # 16 responses in 6 micro-batches: float32 sums in another order agree to a few units of 2^-24 each.
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-7)


def test_update_climbs_the_objective(weights, rollouts):
    """A small step along the update raises the REINFORCE objective on the same data."""
    engine = worlds.training_engine(weights, learning_rate=1e-4)
    scores = engine.score(rollouts, RoutingPlan("natural"))
    batch = minibatch(rollouts, scores.logp_BT)
    before = engine.update(batch, preset("reinforce"), RoutingPlan("natural")).metrics["actor/objective"]
    after = engine.update(batch, preset("reinforce"), RoutingPlan("natural")).metrics["actor/objective"]
    assert after > before


def test_exported_weights_are_the_policy(weights, rollouts):
    """Weights exported under Hugging Face names and loaded into an exact engine give the trainer's log-probs."""
    engine = worlds.training_engine(weights)
    scores = engine.score(rollouts, RoutingPlan("natural"))
    engine.update(minibatch(rollouts, scores.logp_BT), preset("minirl"), RoutingPlan("natural"))
    rollout = worlds.rollout_engine("exact", worlds.model(seed=3))
    rollout.load_weights(engine.named_tensors(), version=1)
    fresh = rollout.generate(worlds.prompts(), SAMPLING)
    batch = fresh.padded()
    logp_BT = engine.score(fresh, RoutingPlan("natural")).logp_BT
    assert torch.equal(logp_BT[batch.is_response_BT], batch.logp_mu_BT[batch.is_response_BT])


def test_state_resumes_to_the_same_bits(weights, rollouts):
    """An engine restored from state_tensors takes the same next update, bit for bit, predictor included."""
    settings = PredictorSettings(1.0, num_positions=4)
    rows = tuple(torch.arange(len(r.prompt.tokens) - 1, r.num_tokens - 1)[:4] for r in rollouts.responses)
    routing = RoutingPlan("natural", feature_rows=rows, keep_hidden=True)

    def step(engine):
        scores = engine.score(rollouts, routing)
        batch = minibatch(rollouts, scores.logp_BT)
        batch = MiniBatch(batch.rollouts, batch.logp_old_BT, batch.advantages_B, 1, 2, features=scores.features)
        return engine.update(batch, preset("minirl"), routing)

    first = worlds.training_engine(weights, settings)
    step(first)
    second = worlds.training_engine(worlds.model(seed=4), settings)
    second.load_state_tensors(first.state_tensors())
    for _ in range(2):
        assert step(first).metrics == step(second).metrics
    left, right = first.state_tensors(), second.state_tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_that_does_not_fit_is_refused(weights):
    """A missing or misshapen weight, or a predictor too many, is one line that names it."""
    state = worlds.training_engine(weights).state_tensors()
    other = worlds.training_engine(worlds.model(num_experts=4))
    with pytest.raises(ValueError, match=r"does not fit the config: weight .* is \(8, .*expected \(4, "):
        other.load_state_tensors(state)
    with pytest.raises(ValueError, match="has no predictor, the replay mode needs one"):
        worlds.training_engine(weights, PredictorSettings(1.0)).load_state_tensors(state)
