"""Pr2 and Pr3 through the one loop: what their predictor samples by, learns from and leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contracts import worlds
from tests.sandbox.training.test_modes import PREDICTOR, run
from theory.algorithm import Algorithm
from theory.collection import collect
from theory.loop import hand_over, learn, take
from theory.objectives import preset
from theory.old_pass import old_pass
from theory.routing.passes import MODES, RoutingPlan
from theory.routing.record import MISSING
from theory.streams import stream


@pytest.mark.parametrize(("predictive", "plain"), [("Pr2", "R2"), ("Pr3", "R3")])
def test_zero_predictor_is_plain_replay(predictive, plain):
    """Until W_p first learns, Pr2 is R2 and Pr3 is R3, bit for bit."""
    a, b = run(predictive)[0], run(plain)[0]
    assert torch.equal(a.scores.logp_BT, b.scores.logp_BT)
    assert torch.equal(a.scores.experts.experts, b.scores.experts.experts)
    for name in ("staleness/k3_kl", "actor/grad_norm", "rollout_corr/k3_kl", "routing/topk_agreement"):
        assert a.metrics[name] == b.metrics[name], name


def predicting(mode: str):
    """A world over an exact engine whose predictor is far from zero, with one batch of its rollouts."""
    weights = worlds.model()
    algorithm = Algorithm(
        preset("minirl"), mode=mode, predictor=PREDICTOR, num_prompts=4, num_responses=4, max_tokens=12
    )
    trainer = worlds.training_engine(weights, PREDICTOR)
    for number, parameter in trainer.predictor.parameters.items():
        parameter.data.normal_(0, 0.2, generator=stream(0, "predictor", number))
    rollout = worlds.rollout_engine("exact", weights)
    hand_over(algorithm, rollout, trainer, version=0)
    collected = collect(0, algorithm, rollout, worlds.EvenTokens(), seed=1)
    return algorithm, trainer, collected


def test_pr3_samples_by_the_predicted_route():
    """mu, handed W + W_p, chooses and weighs experts as the predicted pass does, not naturally (Pr2 Eq. 22 and 23)."""
    _, trainer, collected = predicting("Pr3")
    rollouts = collected.rollouts
    predictor = trainer.predictor_weights()
    predicted = trainer.score(rollouts, RoutingPlan("predicted", gates="predicted", predictor=predictor))
    natural = trainer.score(rollouts, RoutingPlan("natural"))
    # h (W + W_p) and h W + h W_p differ by float32 rounding, so a near tie may fall otherwise: none does here.
    assert torch.equal(predicted.experts.experts, rollouts.experts.experts)
    assert not torch.equal(natural.experts.experts, rollouts.experts.experts)
    batch = rollouts.padded()
    gap = {name: (x.logp_BT - batch.logp_mu_BT)[batch.is_response_BT].abs().max() for name, x in
           (("predicted", predicted), ("natural", natural))}  # fmt: skip
    assert gap["predicted"] < 1e-4 < gap["natural"]


def test_pr3_learns_from_unbiased_logits():
    """The teacher's p_old is the engine's logits less h W_p; the cached route is judged by the biased ones (Pr2 Eq. 4).

    In the first layer hidden states do not depend on routes, so there both are known from a replayed pass's live logits
    on the same rows, for which the old pass itself is not asked.
    """
    algorithm, trainer, collected = predicting("Pr3")
    old = old_pass(0, algorithm, trainer, collected, seed=1)
    assert old.scores.features is None
    live = trainer.score(collected.rollouts, replace(old.gradient, keep_hidden=True)).features
    live_FE = live.logits[:, 0]
    bias_FE = live.hidden[:, 0] @ trainer.predictor_weights()[0]
    # Logits of size 1 after two float32 roundings in other orders.
    torch.testing.assert_close(old.teacher.logits[:, 0], live_FE, atol=1e-5, rtol=0)
    torch.testing.assert_close(old.cached_logits.logits[:, 0], live_FE + bias_FE, atol=1e-5, rtol=0)
    assert bias_FE.abs().mean() > 0.1


def test_features_go_to_the_minibatches_that_learn_from_them_alone():
    """Under Pr3 the first mini-batch has no features, the second those of its responses, and their rollouts none."""
    algorithm, trainer, collected = predicting("Pr3")
    old, advantages = old_pass(0, algorithm, trainer, collected, seed=1), torch.zeros(len(collected.rollouts))
    chosen = [3, 0, 2]
    first, second = (take(collected.rollouts, old, advantages, chosen, index, 2) for index in range(2))
    assert first.features is None and first.rollouts.features is second.rollouts.features is None
    assert torch.equal(second.features.hidden, old.teacher.select(chosen).hidden)
    assert [len(second.features.rows_of(i)) for i in range(3)] == [len(old.teacher.rows_of(b)) for b in chosen]


@pytest.mark.parametrize("mode", MODES)
def test_router_inputs_are_kept_where_a_predictor_learns_from_them_alone(mode):
    """The old pass of Pr2 keeps them, and Pr3's teacher has the engine's; no other pass, and no record of metrics."""
    algorithm, trainer, collected = predicting(mode)
    old = old_pass(0, algorithm, trainer, collected, seed=1)
    kept = {
        "old": old.scores.features is not None and old.scores.features.hidden is not None,
        "teacher": old.teacher is not None and old.teacher.hidden is not None,
        "gradient": old.gradient.keep_hidden,
        "metrics": old.cached_logits.hidden is not None,
    }
    assert [name for name, is_kept in kept.items() if is_kept] == {"Pr2": ["old", "teacher"], "Pr3": ["teacher"]}.get(
        mode, []
    )


def test_one_step_off_unbiases_by_the_predictor_that_mu_held():
    """Where W_p has moved since the rollout, the teacher's p_old is the engine's logits less the W_p of its gates."""
    algorithm, trainer, collected = predicting("Pr3")
    held = trainer.predictor_weights()
    expected = old_pass(0, algorithm, trainer, collected, seed=1).teacher.logits
    for parameter in trainer.predictor.parameters.values():
        parameter.data.mul_(3.0)
    moved = old_pass(0, algorithm, trainer, replace(collected, predictor=held), seed=1)
    forgotten = old_pass(0, algorithm, trainer, collected, seed=1)
    assert torch.equal(moved.teacher.logits, expected)
    assert (forgotten.teacher.logits - expected).abs().max() > 0.1


def test_pr2_learns_from_unbiased_logits_and_caches_the_predicted_route():
    """Pr2's old pass uses top-k of p_old + h W_p, teaches from p_old, and judges the cached route by the sum."""
    algorithm, trainer, collected = predicting("Pr2")
    old = old_pass(0, algorithm, trainer, collected, seed=1)
    assert torch.equal(old.gradient.record.experts, old.scores.experts.experts)
    assert not torch.equal(old.scores.experts.experts, old.scores.natural.experts)
    assert torch.equal(old.teacher.logits, old.scores.features.logits)
    bias_FE = old.teacher.hidden[:, 0] @ trainer.predictor_weights()[0]
    torch.testing.assert_close(old.cached_logits.logits[:, 0], old.teacher.logits[:, 0] + bias_FE, atol=1e-5, rtol=0)


def test_pr2_old_gates_live_keeps_the_first_ratio_at_one():
    """Once W_p is not zero, live old gates give pi == old on the first mini-batch; Eq. 6's predicted ones do not."""
    live = run("Pr2", num_minibatches=2, old_gates="live")[1]
    predicted = run("Pr2", num_minibatches=2, old_gates="predicted")[1]
    assert live.metrics["staleness/k3_kl"] != predicted.metrics["staleness/k3_kl"]


@pytest.mark.parametrize("mode", ["none", "R2", "Pr2"])
def test_a_mode_that_replays_no_rollout_needs_no_record_of_it(mode):
    """Without mu's experts the same steps are taken, bit for bit; only what compares mu's routers is absent."""
    algorithm, trainer, collected = predicting(mode)
    blind = replace(collected, rollouts=replace(collected.rollouts, experts=None))
    other = predicting(mode)[1]
    seeing, unseeing = learn(0, algorithm, trainer, collected, 1), learn(0, algorithm, other, blind, 1)
    absent = {"routing/router_disagreement", "routing/token_disagreement", "routing/sequence_mean_difference"}
    assert set(seeing.metrics) - set(unseeing.metrics) == absent
    assert unseeing.metrics == {name: value for name, value in seeing.metrics.items() if name not in absent}


@pytest.mark.parametrize("mode", ["none", "R3"])
def test_a_record_that_lacks_every_row_stops_nothing(mode):
    """Lost routes are routed naturally and counted; what compares them with others is absent."""
    algorithm, trainer, collected = predicting(mode)
    record = collected.rollouts.experts
    lost = replace(record, experts=torch.full_like(record.experts, MISSING))
    metrics = learn(
        0, algorithm, trainer, replace(collected, rollouts=replace(collected.rollouts, experts=lost)), 1
    ).metrics
    compared = {"routing/router_disagreement", "routing/token_disagreement", "routing/noop"}
    assert not compared & set(metrics)
    if mode == "R3":
        assert metrics["routing/native_rows"] == len(record.experts) and metrics["routing/replayed_fraction"] == 0
        assert not {"routing/topk_agreement", "routing/staleness_tv"} & set(metrics)


def test_pr3_without_features_is_refused():
    """Pr3's predictor has no other source than the rollout engine's router features: one line, before an update."""
    algorithm, trainer, collected = predicting("Pr3")
    blind = replace(collected, rollouts=replace(collected.rollouts, features=None))
    with pytest.raises(ValueError, match="Pr3 learns from the rollout engine's router features, got none"):
        learn(0, algorithm, trainer, blind, 1)
