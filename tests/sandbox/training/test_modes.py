"""Every replay mode through the one loop, on real engines: what each pass must and must not change."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts import worlds
from theory import metrics as registry
from theory.algorithm import Algorithm, OptimizerSettings
from theory.loop import StepResult, global_step, hand_over
from theory.objectives import preset
from theory.routing.passes import MODES, RoutingPlan
from theory.routing.predictor import PredictorSettings

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


CASES = [(mode, PRESETS[i % 3], GATES[i % 2]) for i, mode in enumerate((*MODES, "none", "R3"))]
"""Every mode, and every preset with either gate."""


@pytest.mark.parametrize(("mode", "name", "gate"), CASES)
def test_two_steps(mode, name, gate):
    """Whatever the mode, preset and gate: registered, finite metrics; replay and predictors are as the mode says."""
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
