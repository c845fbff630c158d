"""Laws of score centering in the sandbox: what the engine records is its mu, and what is trained on is that record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Rollouts, Sampling
from theory.loop import global_step
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

NATURAL = RoutingPlan("natural")


def sampled(name: str, num_top: int, temperature: float = 1.0) -> Rollouts:
    """Responses of four ragged prompts with mu's likeliest tokens on record."""
    sampling = Sampling(max_tokens=10, num_responses=3, temperature=temperature, seed=5, num_top=num_top)
    return worlds.rollout_engine(name, worlds.model()).generate(worlds.prompts(), sampling)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_record_is_mu(temperature: float) -> None:
    """Asked for more tokens than there are, the engine records all: probabilities sum to 1, the sampled token's is
    logp_mu to the bit, and asked for 4 it records the first 4 of them; nothing else of the rollouts changes."""
    full, top = sampled("fp8-and-noise", 99, temperature), sampled("fp8-and-noise", 4, temperature)
    without = sampled("fp8-and-noise", 0, temperature)
    assert full.top is not None and top.top is not None and without.top is None
    assert full.top.is_complete and not top.top.is_complete and full.top.ids.dtype == torch.int16
    torch.testing.assert_close(full.top.logp.exp().sum(1), torch.ones(len(full.top.logp)))
    assert torch.equal(full.top.ids[:, :4], top.top.ids) and torch.equal(full.top.logp[:, :4], top.top.logp)
    for b, response in enumerate(full.responses):
        ids, logp = full.top.rows(b)
        assert len(ids) == len(response.tokens)
        is_token = ids == response.tokens[:, None]
        assert torch.equal(logp[is_token], response.logp_mu)
        assert torch.equal(response.logp_mu, without.responses[b].logp_mu)
    picked = top.select([5, 2]).top
    assert picked is not None and torch.equal(picked.rows(1)[1], top.top.rows(2)[1])


def test_the_trainer_scores_the_record_in_every_micro_batch() -> None:
    """log old of the recorded tokens is the exact engine's record to the bit, in one micro-batch or in several."""
    rollouts = sampled("exact", 5)
    assert rollouts.top is not None
    mu_BTK = rollouts.top.padded()[1]
    exists_BT = rollouts.padded().is_response_BT
    for size in (128, 5):
        scores = worlds.training_engine(worlds.model(), micro_batch_size=size).score(rollouts, NATURAL)
        assert scores.logp_top is not None
        assert torch.equal(scores.logp_top.padded()[exists_BT], mu_BTK[exists_BT])


@pytest.mark.parametrize("centering", ["full", "top_k"])
def test_an_update_on_equal_engines_is_that_without_centering(centering: str) -> None:
    """Where mu is pi, there is nothing to take off: the same step up to rounding; with noise it is another step."""
    moved = {}
    for name in ("exact", "logit-noise"):
        rollouts = sampled(name, 99 if centering == "full" else 4)
        weights = []
        for chosen in ("none", centering):
            engine = worlds.training_engine(worlds.model())
            scores = engine.score(rollouts, NATURAL)
            batch = MiniBatch(
                rollouts, scores.logp_BT, torch.linspace(-1, 1, len(rollouts)), 0, 1,
                logp_old_top=scores.logp_top,
            )  # fmt: skip
            stats = engine.update(batch, replace(preset("reinforce"), centering=chosen), NATURAL)
            gradients = torch.cat([p.grad.flatten() for p in engine.parameters if p.grad is not None])
            weights.append(gradients)
            assert stats.metrics["actor/grad_norm"] > 0
        moved[name] = float((weights[1] - weights[0]).norm() / weights[0].norm())
    assert moved["exact"] < 1e-4 < 1e-2 < moved["logit-noise"]


@pytest.mark.parametrize("centering", ["full", "top_k"])
def test_global_steps_train_with_centering(centering: str) -> None:
    """The loop asks the engine for the record and hands it to every mini-batch; without one it says what is missing."""
    objective = preset("minirl", centering=centering, centering_k=4)
    algorithm = Algorithm(objective, num_prompts=4, num_responses=2, num_minibatches=2, max_tokens=6)
    rollout, learner = worlds.rollout_engine("fp8-and-noise", worlds.model()), worlds.training_engine(worlds.model())
    for step in range(2):
        result = global_step(step, algorithm, rollout, learner, worlds.EvenTokens(), seed=1)
    assert result.rollouts.top is not None
    assert result.rollouts.top.ids.shape[1] == (worlds.VOCABULARY if centering == "full" else 4)

    class Forgetful:
        """An engine that does not record what it is asked for."""

        def generate(self, prompts, sampling):
            return rollout.generate(prompts, replace(sampling, num_top=0))

        def load_weights(self, named_tensors, version):
            rollout.load_weights(named_tensors, version)

    with pytest.raises(ValueError, match=f"centering {centering} needs mu's likeliest tokens .*, got none"):
        global_step(2, algorithm, Forgetful(), learner, worlds.EvenTokens(), seed=1)
