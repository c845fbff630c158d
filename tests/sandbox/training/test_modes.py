"""Every replay mode through the one loop, on real engines: what each pass must and must not change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.contracts import worlds
from theory import metrics as registry
from theory.algorithm import Algorithm, OptimizerSettings
from theory.loop import StepResult, collect, global_step, hand_over, learn, old_pass, take
from theory.objectives import preset
from theory.routing.passes import MODES, RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.routing.record import MISSING
from theory.streams import stream

PRESETS = ("minirl", "grpo", "gspo")
GATES = ("qwen3", "olmoe")
PREDICTOR = PredictorSettings(learning_rate_multiplier=30.0, num_positions=6)


def run(
    mode: str, name: str = "minirl", gate: str = "qwen3", engine: str = "fp8-and-noise", **changes
) -> list[StepResult]:
    """Two global steps of 4 prompts x 4 responses from the same weights, prompts and seed."""
    weights = worlds.model(gate=gate)
    settings = {"num_prompts": 4, "num_responses": 4, "num_minibatches": 2, "max_tokens": 12} | changes
    algorithm = Algorithm(objective=preset(name), mode=mode, predictor=PREDICTOR, **settings)
    trainer = worlds.training_engine(weights, PREDICTOR if algorithm.passes.trains_predictor else None)
    rollout = worlds.rollout_engine(engine, weights)
    hand_over(algorithm, rollout, trainer, version=0)
    return [global_step(s, algorithm, rollout, trainer, worlds.EvenTokens(), seed=11) for s in range(2)]


PAIRS = [(mode, name, GATES[(i + j) % 2]) for i, mode in enumerate(MODES) for j, name in enumerate(PRESETS)]
"""Every two of a mode, a preset and a gate."""


@pytest.mark.parametrize(("mode", "name", "gate"), PAIRS)
def test_two_steps(mode, name, gate):
    """Each mode x preset, with either gate: registered, finite metrics; replay and predictors are as the mode says."""
    first, second = run(mode, name, gate)
    for result in (first, second):
        registry.check(result.metrics)
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert result.metrics["actor/num_updates"] == 2
        assert result.metrics["progress/num_responses"] == 16
        assert result.metrics["rollout_corr/k3_kl"] > 0
        assert 0 < result.metrics["routing/router_disagreement"] < 1
        # The second mini-batch is scored by a policy that has moved off old.
        assert result.metrics["staleness/k3_kl"] > 0
    assert {r.version for r in second.rollouts.responses} == {1}
    replays = mode != "none"
    assert ("routing/replayed_fraction" in first.metrics) == replays
    if replays:
        assert first.metrics["routing/replayed_fraction"] == 1.0
        assert first.metrics["routing/native_rows"] == 0
    if mode in ("R3", "Pr3"):
        assert first.metrics["routing/noop"] == 0
    assert ("predictor/loss" in first.metrics) == (mode in ("Pr2", "Pr3"))
    if mode in ("Pr2", "Pr3"):
        assert first.metrics["predictor/loss"] > 0
        assert first.metrics["predictor/weight_norm"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_there_is_no_staleness(mode):
    """With N = 1 the only update sees pi == old bit for bit, in every mode (Pr2's predictor is still zero)."""
    first, _ = run(mode, num_minibatches=1)
    assert first.metrics["staleness/k3_kl"] == 0
    assert first.metrics["actor/ratio_mean"] == 1
    assert "predictor/loss" not in first.metrics


def test_r3_aligns_the_routes_and_shrinks_the_discrepancy():
    """On the same rollouts R3's old pass stands closer to mu than natural routing does (R3 sec. 4.3)."""
    natural, replayed = run("none")[0], run("R3")[0]
    assert torch.equal(natural.rollouts.responses[0].tokens, replayed.rollouts.responses[0].tokens)
    assert replayed.metrics["rollout_corr/k3_kl"] < natural.metrics["rollout_corr/k3_kl"]
    assert torch.equal(replayed.scores.experts.experts, replayed.rollouts.experts.experts)


def test_exact_engine_has_no_discrepancy():
    """Under the exact engine mu equals old bit for bit, so every discrepancy is 0 and every weight 1."""
    for mode in ("none", "R2", "R3"):
        for result in run(mode, engine="exact"):
            assert result.metrics["rollout_corr/k3_kl"] == 0
            assert result.metrics["rollout_corr/probs_diff_max"] == 0
            assert result.metrics["rollout_corr/extreme_frac_tau2"] == 0
            assert result.metrics["routing/router_disagreement"] == 0


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


def test_r2_first_minibatch_is_untouched_and_the_second_is_replayed():
    """R2 leaves the first mini-batch's bits alone (MiniRL Tab. 1): N = 1 gives natural routing's update exactly."""
    a, b = run("none", num_minibatches=1), run("R2", num_minibatches=1)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.scores.logp_BT, y.scores.logp_BT)
        assert x.metrics["actor/grad_norm"] == y.metrics["actor/grad_norm"]
    assert run("none")[0].metrics["actor/grad_norm"] != run("R2")[0].metrics["actor/grad_norm"]


def test_runs_repeat_to_the_bit():
    """The same config and seed give the same metrics to the last bit."""
    for x, y in zip(run("Pr3"), run("Pr3"), strict=True):
        assert x.metrics == y.metrics


def test_minibatches_carry_their_own_rows():
    """Each mini-batch's advantages and old log-probs are those of its own responses, whatever the shuffle of groups."""
    weights, seen = worlds.model(), []

    class Spy(worlds.SandboxTrainingEngine):
        def update(self, minibatch, objective, routing):
            seen.append(minibatch)
            return super().update(minibatch, objective, routing)

    trainer = Spy(worlds.model(), OptimizerSettings(learning_rate=1e-3))
    algorithm = Algorithm(preset("minirl"), num_prompts=8, num_responses=4, num_minibatches=4, max_tokens=12)
    task, rollout = worlds.EvenTokens(), worlds.rollout_engine("fp8-and-noise", weights)
    fresh = worlds.training_engine(weights)
    result = global_step(0, algorithm, rollout, trainer, task, seed=4)
    assert sorted(r.prompt.id for m in seen for r in m.rollouts.responses) == sorted(
        r.prompt.id for r in result.rollouts.responses
    )
    for minibatch in seen:
        rewards_B = torch.tensor([task.reward(r.prompt, r) for r in minibatch.rollouts.responses])
        rewards_PG = rewards_B.view(2, 4)
        torch.testing.assert_close(minibatch.advantages_B, (rewards_PG - rewards_PG.mean(1, keepdim=True)).view(-1))
        scores = fresh.score(minibatch.rollouts, RoutingPlan("natural"))
        assert torch.equal(minibatch.logp_old_BT, scores.logp_BT)


def test_dynamic_sampling_keeps_mixed_groups():
    """Dynamic sampling fills the batch with mixed groups while the rounds last, and says how many it kept."""

    class Rare(worlds.EvenTokens):
        def reward(self, prompt, response):
            return float(response.tokens[0] == 2)

    weights = worlds.model()
    algorithm = Algorithm(preset("grpo_dapo"), num_prompts=4, num_responses=4, max_tokens=6, dynamic_sampling_rounds=8)
    rollout, trainer = worlds.rollout_engine("exact", weights), worlds.training_engine(weights)
    many = global_step(0, algorithm, rollout, trainer, Rare(), seed=1)
    one = Algorithm(preset("grpo_dapo"), num_prompts=4, num_responses=4, max_tokens=6)
    rollout, trainer = worlds.rollout_engine("exact", weights), worlds.training_engine(weights)
    single = global_step(0, one, rollout, trainer, Rare(), seed=1)
    assert many.metrics["sampling/rounds"] > single.metrics["sampling/rounds"] == 1
    assert many.metrics["sampling/kept_group_fraction"] > single.metrics["sampling/kept_group_fraction"]
    assert len(many.rollouts) == len(single.rollouts) == 16


def test_kl_penalty_uses_the_weights_that_training_started_from():
    """The penalty is 0 in the first update (pi is ref) and above 0 once pi has moved."""
    weights = worlds.model()
    algorithm = Algorithm(preset("grpo", kl_coefficient=0.1), num_prompts=4, num_responses=4, max_tokens=8)
    trainer = worlds.training_engine(weights, keep_reference=True)
    rollout = worlds.rollout_engine("exact", weights)
    results = [global_step(s, algorithm, rollout, trainer, worlds.EvenTokens(), seed=2) for s in range(2)]
    assert results[0].metrics["actor/kl_penalty"] == 0
    assert results[1].metrics["actor/kl_penalty"] > 0


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


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_replay_without_a_record_is_refused(mode):
    """Replay over a dense model is one line that names the mode."""
    weights = worlds.model(num_experts=0, dense_layers=(0, 1, 2))
    algorithm = Algorithm(preset("minirl"), mode=mode, num_prompts=2, num_responses=2, max_tokens=4)
    needs = {"R2": "experts recorded by the old pass", "Pr2": "a training engine with a predictor"}
    missing = needs.get(mode, "experts recorded by the rollout engine")
    with pytest.raises(ValueError, match=f"replay mode {mode} needs {missing}, got none"):
        global_step(
            0, algorithm, worlds.rollout_engine("exact", weights), worlds.training_engine(weights),
            worlds.EvenTokens(), seed=0,
        )  # fmt: skip


def test_dense_twin_trains():
    """The dense model is the same code without routers: no routing metric, and the step runs."""
    weights = worlds.model(num_experts=0, dense_layers=(0, 1, 2))
    algorithm = Algorithm(preset("minirl"), num_prompts=2, num_responses=2, max_tokens=6)
    rollout, trainer = worlds.rollout_engine("weights-fp8-channel", weights), worlds.training_engine(weights)
    metrics = global_step(0, algorithm, rollout, trainer, worlds.EvenTokens(), seed=0).metrics
    assert not [name for name in metrics if name.startswith("routing/")]
    assert metrics["rollout_corr/k3_kl"] > 0
