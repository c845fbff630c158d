"""The old pass that is kept for the one update of a global step: the same bits as passing again, one pass less."""

from __future__ import annotations

import pytest
import torch

from sandbox.kernels import EAGER
from sandbox.model import MoE, compiled_passes
from sandbox.training import engine
from sandbox.training.engine import SandboxTrainingEngine
from sandbox.training.numerics import of_precision
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED, copy_of
from theory.algorithm import Algorithm
from theory.collection import collect
from theory.loop import StepResult, global_step, hand_over, split, take
from theory.objectives import preset
from theory.old_pass import old_pass
from theory.routing.passes import MODES, RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

PREDICTOR = PredictorSettings(learning_rate_multiplier=30.0, num_positions=6)


def algorithm(mode: str, **changes) -> Algorithm:
    settings = {"num_prompts": 4, "num_responses": 4, "num_minibatches": 1, "max_tokens": 12} | changes
    return Algorithm(objective=preset("minirl"), mode=mode, predictor=PREDICTOR, **settings)


def run(
    mode: str, weights: MoE, keeps: bool, engine: str = "fp8-and-noise", **options
) -> tuple[list[StepResult], SandboxTrainingEngine]:
    """Two global steps from the same weights, prompts and seed, and the trainer after them."""
    recipe = algorithm(mode)
    predictor = PREDICTOR if recipe.passes.trains_predictor else None
    trainer = worlds.training_engine(weights, predictor, keep_old_pass=keeps, **options)
    rollout = worlds.rollout_engine(engine, weights)
    hand_over(recipe, rollout, trainer, version=0)
    return [global_step(s, recipe, rollout, trainer, worlds.EvenTokens(), seed=11) for s in range(2)], trainer


def num_passes(monkeypatch) -> list[bool]:
    """Grows by a pass of the training engine: whether gradients were on."""
    passes, forward = [], engine.forward_pass

    def counted(*arguments, **options):
        passes.append(torch.is_grad_enabled())
        return forward(*arguments, **options)

    monkeypatch.setattr(engine, "forward_pass", counted)
    return passes


@pytest.mark.parametrize(
    ("kernels", "mode"),
    [*((EAGER, mode) for mode in MODES), *((COMPILED, mode) for mode in MODES if not mode.startswith("Pr"))],
    ids=lambda it: it if isinstance(it, str) else it.name,
)
def test_a_kept_pass_changes_no_bit(kernels, mode):
    """Metrics and weights after two steps are those of passing twice, to the bit, whatever the mode and the kernels."""
    weights = copy_of(worlds.model(), kernels)
    (a, first), (b, second) = (run(mode, weights, keeps) for keeps in (True, False))
    assert [step.metrics for step in a] == [step.metrics for step in b]
    for x, y in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(first.model.head, weights.head)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_passes_once_where_the_pass_is_pis(mode, monkeypatch):
    """none, R2 and R3 take one pass per step, with gradients; Pr2 and Pr3 two, as without keeping."""
    passes = num_passes(monkeypatch)
    run(mode, worlds.model(), keeps=True)
    assert passes == ([False, True] * 2 if mode.startswith("Pr") else [True] * 2)


@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 15}, {"numerics": of_precision("bf16")}],
    ids=["several micro-batches", "bf16"],
)
def test_nothing_is_kept_that_the_update_would_not_repeat(options, monkeypatch):
    """Several micro-batches, or numerics of which two passes may differ: the old pass has no gradients."""
    passes = num_passes(monkeypatch)
    run("none", worlds.model(), keeps=True, **options)
    assert sum(passes) == len(passes) / 2


def test_a_kept_pass_serves_its_own_responses_once(monkeypatch):
    """The update on the responses that were scored last passes no more; a second one on them does, and so does the
    update on others, which differs from the kept pass."""
    recipe, weights = algorithm("none"), worlds.model()
    trainer = worlds.training_engine(weights, keep_old_pass=True)
    rollout = worlds.rollout_engine("exact", weights)
    ours, others = (collect(s, recipe, rollout, worlds.EvenTokens(), seed=11) for s in range(2))
    old = old_pass(0, recipe, trainer, ours, seed=11)
    own = take(ours.rollouts, old, torch.ones(16), list(range(16)), 0, 1)
    passes = num_passes(monkeypatch)
    trainer.update(own, recipe.objective, old.gradient)
    assert passes == []
    trainer.update(own, recipe.objective, old.gradient)
    assert passes == [True]
    old_pass(0, recipe, trainer, ours, seed=11)
    theirs = old_pass(1, recipe, worlds.training_engine(weights), others, seed=11)
    other = take(others.rollouts, theirs, torch.ones(16), list(range(16)), 0, 1)
    passes.clear()
    trainer.update(other, recipe.objective, theirs.gradient)
    assert passes == [True]


def test_a_replay_of_other_routes_passes_anew(monkeypatch):
    """A kept pass serves a replay of the experts that it used, no other routing, and none once weights are loaded."""
    recipe, weights = algorithm("none"), worlds.model()
    trainer = worlds.training_engine(weights, keep_old_pass=True)
    collected = collect(0, recipe, worlds.rollout_engine("fp8-and-noise", weights), worlds.EvenTokens(), seed=11)
    saved = trainer.state_tensors()
    passes = num_passes(monkeypatch)

    def passes_of_an_update(record=None, loads=False) -> int:
        old = old_pass(0, recipe, trainer, collected, seed=11)
        minibatch = take(collected.rollouts, old, torch.ones(16), list(range(16)), 0, 1)
        routing = old.gradient
        if record is not None:
            routing = RoutingPlan("replay", record=record(old), feature_rows=old.gradient.feature_rows)
        if loads:
            trainer.load_state_tensors(saved)
        passes.clear()
        trainer.update(minibatch, recipe.objective, routing)
        return len(passes)

    assert passes_of_an_update() == 0
    assert passes_of_an_update(lambda old: old.scores.experts) == 0
    assert passes_of_an_update(lambda old: collected.rollouts.experts) == 1
    assert passes_of_an_update(loads=True) == 1


def test_a_pass_that_is_kept_packs_no_weights(monkeypatch):
    """Weights are packed only where there is a whole pass, so not for an old pass with gradients."""
    made, passes = [], compiled_passes.passes
    monkeypatch.setattr(compiled_passes, "passes", lambda model, gate: made.append(model) or passes(model, gate))
    for keeps, expected in ((True, 0), (False, 1)):
        recipe, weights = algorithm("none"), copy_of(worlds.model(), COMPILED)
        trainer = worlds.training_engine(weights, keep_old_pass=keeps)
        collected = collect(0, recipe, worlds.rollout_engine("exact", worlds.model()), worlds.EvenTokens(), seed=11)
        made.clear()
        old_pass(0, recipe, trainer, collected, seed=11)
        assert len(made) == expected


def test_one_mini_batch_is_all_responses_as_they_came():
    """With N = 1 nothing is reordered; with N = 2 whole groups are, by the step's own draw."""
    assert split(3, algorithm("none"), 11) == [list(range(16))]
    halves = split(3, algorithm("none", num_minibatches=2), 11)
    groups = torch.randperm(4, generator=stream(11, "minibatches", 3)).tolist()
    assert [index // 4 for half in halves for index in half[::4]] == groups


def test_shuffled_responses_are_all_responses_in_equal_parts():
    """By the step's own draw, and not by groups; the seed and the step decide."""
    scattered = algorithm("none", num_minibatches=2, shuffle="responses")
    halves = split(3, scattered, 11)
    assert [len(half) for half in halves] == [8, 8] and sorted(halves[0] + halves[1]) == list(range(16))
    assert halves[0] + halves[1] == torch.randperm(16, generator=stream(11, "minibatches", 3)).tolist()
    assert split(4, scattered, 11) != halves != split(3, scattered, 12)
    assert split(3, algorithm("none", shuffle="responses"), 11) == [list(range(16))]
