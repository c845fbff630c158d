"""Laws of one Megatron rank: in fp32 it does what the sandbox's training engine does, in every replay mode.

Both run torch's float32 on a CPU with sums in different orders. Measured over all passes and updates: 3e-6 nats in
log-probabilities, 1.2e-6 in weights; the tolerances are about four times that. Single passes and updates are compared
in test_megatron_layouts_agree.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandbox.engines import RouterNoise
from sandbox.engines.engine import SandboxEngine
from sandbox.model import checkpoint
from scaled.model_shape import load_shape
from tests.contracts.worlds import EvenTokens
from tests.scaled.rank_update_laws import UPDATE_LAWS
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    altered,
    batch,
    farthest,
    layers,
    one_minibatch,
    sandbox_engine,
    verdicts_on,
    write_model,
)
from theory.loop import global_step
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

LOGP, WEIGHTS = 1e-5, 5e-6


def one_global_step_agrees_in(folder: Path, mode: str, **changes: Any) -> None:
    """One global step of theory's loop, N = 2, mu noisy: both engines end with the same weights and predictor."""
    recipe = algorithm(mode, num_prompts=4, num_responses=2, num_minibatches=2, max_tokens=6, **changes)
    results = []
    for engine in (OneRank(folder, recipe), sandbox_engine(folder, recipe)):
        model = checkpoint.load(folder)
        mu = SandboxEngine(model.config, (RouterNoise(std=0.3),), stop_tokens=(1,))
        mu.load_model(model, version=0)
        first = global_step(0, recipe, mu, engine, EvenTokens(), seed=4)
        result = global_step(1, recipe, mu, engine, EvenTokens(), seed=4) if recipe.passes.trains_predictor else first
        results.append((result, dict(engine.named_tensors()), engine.predictor_weights()))
    (a, weights_a, predictor_a), (b, weights_b, predictor_b) = results
    assert torch.equal(a.rewards_B, b.rewards_B), mode
    assert a.scores.experts is not None and b.scores.experts is not None
    # A natural pass sends one record, any other two: so count the plan and the idle ranks of driver_bench.
    assert (a.scores.experts is a.scores.natural) == (recipe.passes.old == "natural"), mode
    assert torch.equal(a.scores.experts.experts, b.scores.experts.experts), mode
    assert farthest(weights_a, weights_b) < WEIGHTS, mode
    assert predictor_a.keys() == predictor_b.keys()
    assert bool(predictor_a) == recipe.passes.trains_predictor
    for number in predictor_a:
        # W_p moves by its rate of 1e-2 a step with an eps of 1e-8: where a gradient is near 0, rounding rules its sign.
        difference = (predictor_a[number] - predictor_b[number]).abs()
        assert (difference < 1e-4).float().mean() > 0.99, mode


GLOBAL_STEPS: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "R2": {"mode": "R2"},  # MiniRL Tab. 1
    "R3": {"mode": "R3"},  # 2510.11370 Eq. 8
    "Pr2_predicted_gates": {"mode": "Pr2", "old_gates": "predicted"},  # 2606.00395 Eq. 6, in the old pass
    "Pr2_live_gates": {"mode": "Pr2", "old_gates": "live"},
    # A second mini-batch has a pass of its own.
    "RSPO": {"mode": "none", "objective": preset("gmpo", router_shift_floor=0.5)},
    # The baseline's weights come from the old pass.
    "optimal_token": {"mode": "none", "objective": preset("grpo", advantage="optimal_token")},
    "Pr3": {"mode": "Pr3"},  # 2606.00395 App. C: the predictor in mu's gates
}


def global_step_law(name: str) -> Callable[[Path], None]:
    """The law of one of the recipes above, under its name."""

    def law(folder: Path) -> None:
        one_global_step_agrees_in(folder, **GLOBAL_STEPS[name])

    law.__name__ = f"global_step_{name}"
    return law


def all_passes_are_at_the_temperature_of_the_rollouts(folder: Path) -> None:
    """At T = 0.7 old, pi, ref and entropies are the sandbox's, pi is old to the bit, and T makes a difference."""
    recipe = algorithm("none")
    ours, theirs = (make(folder, recipe, keep_reference=True) for make in (OneRank, sandbox_engine))
    at_one, rollouts = batch(), replace(batch(), temperature=0.7)
    natural = RoutingPlan("natural")
    a, b = ours.score(rollouts, natural), theirs.score(rollouts, natural)
    assert (a.logp_BT - b.logp_BT).abs().max() < LOGP / 0.7
    assert (a.entropy_BT - b.entropy_BT).abs().max() < LOGP / 0.7
    assert (a.logp_BT - ours.score(at_one, natural).logp_BT).abs().max() > 0.1
    assert torch.equal(ours.score_reference(rollouts), a.logp_BT)
    minibatch = one_minibatch(rollouts, a.logp_BT)
    stats = ours.update(minibatch, preset("minirl"), natural)
    theirs.update(minibatch, preset("minirl"), natural)
    assert torch.equal(stats.logp_pi_BT, a.logp_BT)
    assert farthest(dict(ours.named_tensors()), dict(theirs.named_tensors())) < WEIGHTS


def pi_is_old_to_the_bit(folder: Path) -> None:
    """Before the first update of a mini-batch that was scored as it is trained, pi is old bit for bit; without options
    too (tests/contracts).
    """
    for fields in ({"recompute": "full"}, {"recompute": "selective"}, {"precision": "bf16"}, {"deterministic": True}):
        engine = OneRank(folder, algorithm("R3"), **fields)
        rollouts = batch()
        for routing in (RoutingPlan("natural"), altered(rollouts)):
            scores = engine.score(rollouts, routing)
            minibatch = one_minibatch(rollouts, scores.logp_BT)
            stats = engine.update(minibatch, preset("minirl"), routing)
            assert torch.equal(stats.logp_pi_BT, scores.logp_BT), fields
            assert stats.metrics["actor/ratio_mean"] == 1.0


LAWS = (
    *map(global_step_law, GLOBAL_STEPS),
    all_passes_are_at_the_temperature_of_the_rollouts,
    pi_is_old_to_the_bit,
    *UPDATE_LAWS,
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str | None]:
    folder = write_model(tmp_path_factory.mktemp("rank") / "model")
    assert load_shape(folder).moe_layers == layers()
    return verdicts_on(__name__, folder)[0]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_one_rank(verdicts, law):
    """Each law (its own docstring) holds in a real world of one rank."""
    assert verdicts[law.__name__] is None, verdicts[law.__name__]
