"""Laws of training on responses with observations: they are in no loss, no denominator and no metric of a policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from lab.evaluation import evaluate
from sandbox.engines.engine import SandboxEngine
from sandbox.engines.prefix_cache import PrefixCache
from sandbox.training.engine import SandboxTrainingEngine
from tests.contracts import worlds
from tests.sandbox.engines.prefill import prefilled
from tests.sandbox.engines.turns_world import Talk, model, prompts
from theory.algorithm import Algorithm
from theory.collection import Collected, collect
from theory.contracts import Environment, MiniBatch, Prompt, Response, Rollouts, Sampling
from theory.loop import hand_over, learn
from theory.objectives import preset
from theory.routing.passes import MODES, RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.turns import roll_out

PREDICTOR = PredictorSettings(1.0, num_positions=4)


class Talking(Talk):
    """Conversations over the prompts of the small vocabulary."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        return prompts(num_prompts)


def algorithm(mode: str, name: str = "minirl") -> Algorithm:
    return Algorithm(
        preset(name), mode=mode, predictor=PREDICTOR, num_prompts=4, num_responses=3, num_minibatches=2,
        max_tokens=14, max_turns=3,
    )  # fmt: skip


def learner_of(recipe: Algorithm) -> SandboxTrainingEngine:
    return worlds.training_engine(model(), PREDICTOR if recipe.passes.trains_predictor else None)


def engine_of(name: str = "exact") -> SandboxEngine:
    engine = SandboxEngine(model().config, worlds.DEFECTS[name], (worlds.STOP,), prefixes=PrefixCache())
    engine.load_model(model(), version=0)
    return engine


@cache
def collected(mode: str, engine: str) -> Collected:
    """One step's conversations, some of them with observations."""
    rollout, recipe = engine_of(engine), algorithm(mode)
    hand_over(recipe, rollout, learner_of(recipe), version=0)
    found = collect(0, recipe, rollout, Talking(), seed=3)
    assert sum(not r.is_response.all() for r in found.rollouts.responses) > 3
    return found


def with_observed_logp(found: Collected, value: float) -> Collected:
    """The same with that log-prob on every observation."""
    responses = [replace(r, logp_mu=r.logp_mu.where(r.is_response, value)) for r in found.rollouts.responses]
    return replace(found, rollouts=replace(found.rollouts, responses=tuple(responses)))


@pytest.mark.parametrize("mode", MODES)
def test_an_observations_log_prob_changes_nothing(mode: str) -> None:
    """Whatever stands for mu on an observation, a step has the same metrics and ends at the same weights, bit for bit:
    in every mode, with an engine that differs from the trainer."""
    found, recipe, results = collected(mode, "fp8-and-noise"), algorithm(mode), []
    for value in (0.0, -7.0):
        learner = learner_of(recipe)
        metrics = learn(0, recipe, learner, with_observed_logp(found, value), seed=3).metrics
        results.append((metrics, dict(learner.state_tensors())))
    (first, weights), (second, others) = results
    assert first == second
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert first["rollout_corr/k3_kl"] > 0 and first["actor/grad_norm"] > 0


def turns_apart(rollouts: Rollouts) -> list[Response]:
    """Each turn as a response of its own, to a prompt that holds everything before it."""
    apart = []
    for r in rollouts.responses:
        changes = [0, *(r.is_response.int().diff().nonzero()[:, 0] + 1).tolist(), len(r.tokens)]
        for start, stop in pairwise(changes):
            if r.is_response[start]:
                at = slice(start, stop)
                turn = Prompt(r.prompt.id, (*r.prompt.tokens, *r.tokens[:start].tolist()), "")
                apart.append(Response(turn, r.tokens[at], r.logp_mu[at], r.is_response[at], r.finish, r.version))
    return apart


def test_the_gradient_is_that_of_the_turns_apart() -> None:
    """Conversations give the gradient of their turns, taken apart into responses to what came before: what is observed
    is context. REINFORCE sums tokens and divides by responses, so that the two differ by the ratio of their numbers.

    A gradient is read off one step of plain descent; float32 sums over some 100 tokens in another order: 1e-5.
    """
    found, gradients = collected("none", "exact"), []
    apart = turns_apart(found.rollouts)
    assert len(apart) > len(found.rollouts)
    rewards = {r.prompt.id: i - 1.5 for i, r in enumerate(found.rollouts.responses)}
    for rollouts in (found.rollouts, Rollouts(tuple(apart))):
        learner = learner_of(algorithm("none"))
        rewards_B = torch.tensor([rewards[r.prompt.id] for r in rollouts.responses])
        logp_old_BT = learner.score(rollouts, RoutingPlan("natural")).logp_BT
        learner.take_step = lambda: None
        learner.settings = replace(learner.settings, max_grad_norm=1e9)
        learner.update(MiniBatch(rollouts, logp_old_BT, rewards_B, 0, 1), preset("reinforce"), RoutingPlan("natural"))
        gradient = torch.cat([p.grad.reshape(-1) for p in learner.parameters])
        gradients.append(gradient * len(rollouts))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-5 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("mode", MODES)
def test_the_exact_engine_has_no_gap_over_turns(mode: str) -> None:
    """mu equals old on every sampled token of every turn, and every row is replayed where the mode replays; under Pr2
    and Pr3 as long as the predictor is 0, which it is in the first step."""
    recipe = algorithm(mode)
    metrics = learn(0, recipe, learner_of(recipe), collected(mode, "exact"), seed=3).metrics
    assert metrics["rollout_corr/k3_kl"] == metrics["rollout_corr/probs_diff_max"] == 0
    assert metrics["routing/router_disagreement"] == 0
    assert metrics.get("routing/native_rows", 0.0) == 0 and ("routing/native_rows" in metrics) == (mode != "none")


def test_lengths_count_what_was_sampled() -> None:
    """Lengths and token counts leave observations out, in a step's metrics and in an evaluation's."""
    found = collected("none", "exact")
    metrics = learn(0, algorithm("none"), learner_of(algorithm("none")), found, seed=3).metrics
    lengths = [int(r.is_response.sum()) for r in found.rollouts.responses]
    assert sum(lengths) < sum(len(r.tokens) for r in found.rollouts.responses)
    assert metrics["response_length/mean"] == sum(lengths) / len(lengths)
    assert metrics["progress/num_tokens"] == sum(lengths)

    class HeldOut(Talking):
        def held_out(self) -> list[Prompt]:
            return prompts(3)

    engine, sampling = engine_of(), Sampling(max_tokens=14, num_responses=2, seed=8)
    limits = {"num_samples": 2, "max_prompts": 3, "max_tokens": 14, "temperature": 1.0, "seed": 8}
    rollouts = roll_out(engine, HeldOut(), prompts(3), sampling, max_turns=3)
    found = evaluate(engine, HeldOut(), **limits, max_turns=3)
    assert isinstance(HeldOut(), Environment)
    assert found["eval/response_length"] == sum(int(r.is_response.sum()) for r in rollouts.responses) / 6
    assert found["eval/stop_fraction"] == sum(r.finish == "stop" for r in rollouts.responses) / 6
    assert found != evaluate(engine, HeldOut(), **limits, max_turns=1)


def test_one_prefill_scores_all_turns() -> None:
    """Prompt log-probabilities of whole conversations equal those of decoding turn by turn, observations 0, bit for bit
    with all routes: a conversation is one sequence."""
    rollouts = collected("none", "exact").rollouts
    again = prefilled(engine_of(), rollouts)
    for a, b in zip(rollouts.responses, again.responses, strict=True):
        assert torch.equal(a.logp_mu, b.logp_mu)
    assert torch.equal(rollouts.experts.experts, again.experts.experts)
