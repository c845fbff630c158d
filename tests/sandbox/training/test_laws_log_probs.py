"""Laws of whose log-probabilities are whose: mu's are old's, old's stay old, the reference's are no one's replay."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import worlds
from theory.contracts import MiniBatch, Rollouts, Sampling
from theory.objectives import preset
from theory.routing.passes import RoutingPlan


def exact_rollouts(temperature: float = 1.0) -> Rollouts:
    """Responses of an engine without defects to four ragged prompts."""
    sampling = Sampling(max_tokens=10, num_responses=2, temperature=temperature, seed=5)
    return worlds.rollout_engine("exact", worlds.model()).generate(worlds.prompts(), sampling)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_exact_engine_is_the_trainer_at_any_temperature(temperature: float) -> None:
    """logp_mu has the bits of old's at the temperature that tokens were drawn at, and every row the trainer's route."""
    rollouts = exact_rollouts(temperature)
    scores = worlds.training_engine(worlds.model()).score(rollouts, RoutingPlan("natural"))
    batch = rollouts.padded()
    assert torch.equal(scores.logp_BT[batch.is_response_BT], batch.logp_mu_BT[batch.is_response_BT])
    assert rollouts.experts is not None
    assert scores.natural is not None
    assert rollouts.experts.num_rows_B == [r.num_tokens - 1 for r in rollouts.responses]
    assert torch.equal(scores.natural.experts, rollouts.experts.experts)
    assert rollouts.experts.num_missing_rows == 0


def test_the_reference_is_naturally_routed() -> None:
    """score_reference has the starting weights' natural log-probs to the bit, after updates and after a replay."""
    rollouts = worlds.rollout_engine("fp8-and-noise", worlds.model()).generate(
        worlds.prompts(), Sampling(max_tokens=10, num_responses=2, seed=5)
    )
    engine = worlds.training_engine(worlds.model(), keep_reference=True)
    expected = engine.score(rollouts, RoutingPlan("natural")).logp_BT
    routing = RoutingPlan("replay", record=rollouts.experts)
    scores = engine.score(rollouts, routing)
    assert not torch.equal(scores.logp_BT, expected)
    assert torch.equal(engine.score_reference(rollouts), expected)
    engine.update(MiniBatch(rollouts, scores.logp_BT, torch.linspace(-1, 1, 8), 0, 1), preset("minirl"), routing)
    assert torch.equal(engine.score_reference(rollouts), expected)


def test_old_stays_old_after_an_update() -> None:
    """The second update on the same old log-probs has the ratios pi/old of its own pi, not ratios of 1."""
    rollouts = exact_rollouts()
    engine = worlds.training_engine(worlds.model())
    old_BT = engine.score(rollouts, RoutingPlan("natural")).logp_BT
    batch = MiniBatch(rollouts, old_BT, torch.linspace(-1, 1, 8), 0, 2)
    mask_BT = rollouts.padded().is_response_BT
    means = []
    for _ in range(2):
        stats = engine.update(batch, preset("ppo"), RoutingPlan("natural"))
        means.append(stats.metrics["actor/ratio_mean"])
        ratio_BT = (stats.logp_pi_BT - old_BT).exp()
        # float32 means of some 80 numbers near 1.
        assert means[-1] == pytest.approx(ratio_BT[mask_BT].mean().item(), rel=1e-5)
    assert means[0] == 1.0
    assert abs(means[1] - 1.0) > 1e-3


def test_the_engine_takes_the_weights_that_it_is_handed() -> None:
    """After training and handing over, the exact engine is the trainer again, under the next version's number."""
    from theory.algorithm import Algorithm
    from theory.loop import global_step

    algorithm = Algorithm(preset("minirl"), num_prompts=2, num_responses=2, max_tokens=6)
    rollout, learner = worlds.rollout_engine("exact", worlds.model()), worlds.training_engine(worlds.model())
    global_step(0, algorithm, rollout, learner, worlds.EvenTokens(), seed=1)
    fresh = rollout.generate(worlds.prompts(2), Sampling(max_tokens=6, seed=3))
    batch = fresh.padded()
    logp_BT = learner.score(fresh, RoutingPlan("natural")).logp_BT
    assert torch.equal(logp_BT[batch.is_response_BT], batch.logp_mu_BT[batch.is_response_BT])
    assert {r.version for r in fresh.responses} == {1}
    assert not torch.equal(logp_BT, worlds.training_engine(worlds.model()).score(fresh, RoutingPlan("natural")).logp_BT)
