"""Laws of the sampling temperature: one policy samples, is scored and is differentiated, at every T."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lab.doctor.diagnosis import diagnose
from lab.traces import Trace
from sandbox.engines import EngineConfig, SamplingMismatch
from sandbox.exact.audit import moe_problem
from sandbox.exact.routed_policy import target_policy
from tests.contracts import worlds
from tests.sandbox.engines.prefill import prefilled
from tests.sandbox.exact.tree_world import PROMPT, REWARD_Y, ROUNDING, SEED, TREE, tiny_moe
from theory.contracts import MiniBatch, Rollouts, Sampling
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.problem import Problem
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.streams import stream

NATURAL = RoutingPlan("natural")
ON_POLICY = preset("reinforce")


def sampled(temperature: float, name: str = "exact", num: int = 2) -> Rollouts:
    """Responses of four ragged prompts."""
    sampling = Sampling(max_tokens=10, num_responses=num, temperature=temperature, seed=5)
    return worlds.rollout_engine(name, worlds.model()).generate(worlds.prompts(), sampling)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.9, 1.0, 1.3])
def test_the_on_policy_gradient_is_unbiased_at_every_temperature(temperature: float) -> None:
    """With equal engines E_mu[A grad log pi] is the gradient of E_pi[R] at T, on every response of a tree.

    Differentiated at 1 instead it is off, by the more the further T is from 1.
    """
    model = tiny_moe(4, stream(SEED, "model"))
    problem = moe_problem(model, EngineConfig(), "none", TREE, PROMPT, REWARD_Y, temperature=temperature)
    assert estimate(problem, ON_POLICY, Group(None, "none")).bias < ROUNDING
    if temperature != 1:
        at_one = Problem(target_policy(model, TREE, PROMPT), problem.logp_mu, problem.logp_old, REWARD_Y)
        assert estimate(at_one, ON_POLICY, Group(None, "none")).bias > 0.3 * abs(temperature - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_old_pi_reference_and_entropy_are_of_the_tempered_policy(temperature: float) -> None:
    """All passes give log softmax(z / T) of the tokens, with z the model's logits, and the entropy of softmax(z / T).

    With two tokens drawn from the same context, log p - log q at T is that at 1, divided by T.
    """
    rollouts = sampled(temperature)
    engine = worlds.training_engine(worlds.model(), keep_reference=True)
    scores = engine.score(rollouts, NATURAL)
    mask_BT = rollouts.padded().is_response_BT
    assert torch.equal(engine.score_reference(rollouts), scores.logp_BT)
    batch = MiniBatch(rollouts, scores.logp_BT, torch.linspace(-1, 1, len(rollouts)), 0, 1)
    assert torch.equal(engine.update(batch, preset("minirl"), NATURAL).logp_pi_BT[mask_BT], scores.logp_BT[mask_BT])

    # The first tokens of all responses to a prompt follow the same context.
    engine = worlds.training_engine(worlds.model())
    many = sampled(temperature, num=24)
    at_T, at_1 = (engine.score(replace(many, temperature=t), NATURAL) for t in (temperature, 1.0))
    for first, second in pairwise(range(24)):
        gap_T, gap_1 = (s.logp_BT[first, 0] - s.logp_BT[second, 0] for s in (at_T, at_1))
        assert gap_T.item() == pytest.approx(gap_1.item() / temperature, abs=1e-5)
    assert bool(((at_T.entropy_BT < at_1.entropy_BT)[many.padded().is_response_BT] == (temperature < 1)).all())


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
def test_what_is_scored_is_what_is_drawn_from(temperature: float) -> None:
    """The exact engine's two distributions, in float64 and float32, are one at every temperature."""
    engine = worlds.rollout_engine("exact", worlds.model())
    logits_AV = 3 * torch.randn(5, worlds.VOCABULARY, generator=stream(0, "logits"))
    drawn, scored = (
        x.log_softmax(-1) for x in (engine.drawn(logits_AV, temperature), engine.scored(logits_AV, temperature))
    )
    torch.testing.assert_close(drawn.float(), scored, atol=1e-5, rtol=0)


def test_every_engine_scores_by_prefill_what_it_scored_by_decoding_at_a_temperature() -> None:
    """The rollouts carry their temperature: a prefill of them needs no other word of it."""
    rollouts = sampled(0.7)
    engine = worlds.rollout_engine("exact", worlds.model())
    assert rollouts.temperature == 0.7 == rollouts.select([1, 0]).temperature == rollouts.padded().temperature
    for mine, again in zip(rollouts.responses, prefilled(engine, rollouts).responses, strict=True):
        assert torch.equal(mine.logp_mu, again.logp_mu)


def test_rollouts_of_two_temperatures_are_not_joined() -> None:
    """A batch is scored at one temperature."""
    with pytest.raises(ValueError, match=r"rollouts: expected one temperature, got 0\.7, 1$"):
        Rollouts.concat([sampled(1.0), sampled(0.7)])


@pytest.mark.parametrize("side", ["old", "mu"])
def test_the_doctor_names_the_side_that_scores_at_one(side: str) -> None:
    """Sampled at T = 0.7 with one side scored at 1, the cause is a temperature, and the words say whose."""
    model = worlds.model()
    with torch.no_grad():
        model.norm.mul_(8)  # as sure of its tokens as a trained one
    engine = worlds.SandboxEngine(model.config, (SamplingMismatch(score="raw"),) if side == "mu" else ())
    engine.load_model(model, version=0)
    sampling = Sampling(max_tokens=16, num_responses=24, temperature=0.7, seed=5)
    rollouts = engine.generate(worlds.prompts(), sampling)
    trainer = worlds.training_engine(model)
    scored = replace(rollouts, temperature=1.0) if side == "old" else rollouts
    trace = Trace.of(rollouts, trainer.score(scored, NATURAL), torch.zeros(len(rollouts)), step=1)
    found = diagnose(trace)
    assert found.named[0].name == "temperature"
    said = "the trainer scores at 1" if side == "old" else "the engine records log-probabilities at 1"
    assert f"Tokens were sampled at temperature 0.7, and {said}." in found.named[0].words(found.seen)
    honest = Trace.of(rollouts, trainer.score(rollouts, NATURAL), torch.zeros(len(rollouts)), step=1)
    assert side == "mu" or diagnose(honest).fault is None
