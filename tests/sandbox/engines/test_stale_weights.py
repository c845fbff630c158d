"""A stale engine samples from the version that it says, switches where it is told, and remembers."""

from __future__ import annotations

import pytest
import torch

from sandbox.engines import PartialWeights, StaleWeights, WeightPrecision
from sandbox.model.checkpoint import to_hf
from tests.contracts import worlds
from tests.sandbox.engines.defect_world import discrepancy, trained
from theory.contracts import Sampling
from theory.routing.passes import RoutingPlan


@pytest.mark.parametrize(("k", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_stale_engines_say_the_version_they_sample_from(k, expected):
    """After hand-over n the engine samples with, and says, version max(0, n - k), to the bits of an exact engine."""
    models = trained(4)
    engine = worlds.SandboxEngine(models[0].config, (StaleWeights(versions=k),), stop_tokens=(worlds.STOP,))
    sampling = Sampling(max_tokens=4, num_responses=2, seed=1)
    for version, model in enumerate(models):
        engine.load_model(model, version)
        rollouts = engine.generate(worlds.prompts(2), sampling)
        assert {r.version for r in rollouts.responses} == {expected[version]}
        exact = worlds.rollout_engine("exact", models[expected[version]]).generate(worlds.prompts(2), sampling)
        for a, b in zip(rollouts.responses, exact.responses, strict=True):
            assert torch.equal(a.logp_mu, b.logp_mu) and torch.equal(a.tokens, b.tokens)


@pytest.mark.parametrize("cache", ["kept", "recomputed"])
def test_a_switch_changes_what_comes_after_it(cache):
    """Tokens before the switch have the old weights' bits; after it, with its own cache, the newest weights'."""
    models, T, switch = trained(2), 12, 5
    engine = worlds.SandboxEngine(
        models[0].config, (StaleWeights(versions=1, switch_at=switch / T, cache=cache),), stop_tokens=(worlds.STOP,)
    )
    for version, model in enumerate(models):
        engine.load_model(model, version)
    rollouts = engine.generate(worlds.prompts(6), Sampling(max_tokens=T, num_responses=4, seed=2))
    assert {r.version for r in rollouts.responses} == {0}
    old, new = (worlds.training_engine(m).score(rollouts, RoutingPlan("natural")).logp_BT for m in models)
    batch = rollouts.padded()
    is_late_T = torch.arange(T) >= switch
    early_BT, late_BT = batch.is_response_BT & ~is_late_T, batch.is_response_BT & is_late_T
    assert late_BT.sum() > 50
    assert torch.equal(batch.logp_mu_BT[early_BT], old[early_BT])
    assert not (batch.logp_mu_BT == new)[early_BT].any()
    assert torch.equal(batch.logp_mu_BT[late_BT], new[late_BT]) == (cache == "recomputed")
    if cache == "kept":
        # Neither model alone; closer to the new one, whose weights compute these tokens.
        distance_old, distance_new = ((batch.logp_mu_BT - logp)[late_BT].abs().mean() for logp in (old, new))
        assert 0 < distance_new < distance_old


def test_a_restored_engine_remembers_its_weights():
    """state_tensors, then the newest weights: the engine continues from the same version with the same bits."""
    models, sampling = trained(4), Sampling(max_tokens=6, num_responses=2)
    defects = (WeightPrecision(), StaleWeights(versions=2, switch_at=0.5))
    first, second = (worlds.SandboxEngine(models[0].config, defects) for _ in range(2))
    for version, model in enumerate(models[:3]):
        first.load_model(model, version)
    second.load_state_tensors({**first.state_tensors(), "model.norm": torch.ones(3)})
    second.load_model(models[2], version=2)
    for engine in (first, second):
        engine.load_model(models[3], version=3)
    a, b = (engine.generate(worlds.prompts(2), sampling) for engine in (first, second))
    assert {r.version for r in b.responses} == {1}
    assert all(torch.equal(x.logp_mu, y.logp_mu) for x, y in zip(a.responses, b.responses, strict=True))
    small = worlds.SandboxEngine(worlds.model_config(num_experts=4), defects)
    with pytest.raises(ValueError, match=r"stale weight .* of version \d is \(8, .*expected \(4, "):
        small.load_state_tensors(first.state_tensors())


def test_a_refused_hand_over_is_not_the_first():
    """Weights that arrive never again keep the values of the first hand-over that the engine took."""
    weights = worlds.model()
    engine = worlds.SandboxEngine(weights.config, (PartialWeights(),))
    misshapen = {name: torch.zeros(3) if name == "lm_head.weight" else tensor for name, tensor in to_hf(weights)}
    with pytest.raises(ValueError, match="lm_head"):
        engine.load_weights(misshapen.items(), version=0)
    assert engine.first.state_tensors() == {}
    models = trained(2)
    for version, model in enumerate(models):
        engine.load_model(model, version)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(to_hf(engine.model), to_hf(models[0]), strict=True))


def test_versions_do_not_go_back():
    """Weights older than the newest are refused by an engine that orders them."""
    weights = worlds.model()
    engine = worlds.SandboxEngine(weights.config, (StaleWeights(),))
    engine.load_model(weights, version=5)
    with pytest.raises(ValueError, match="at least 5, got 4"):
        engine.load_model(weights, version=4)


def test_staler_weights_stand_further_away():
    """Each version behind adds to the discrepancy; a switch to the newest weights takes from it."""
    assert discrepancy(StaleWeights(versions=0), versions=4) == 0
    values = [discrepancy(StaleWeights(versions=k), versions=4) for k in (1, 2, 3)]
    assert values == sorted(values)
    assert values[0] > 0
    halves = [discrepancy(StaleWeights(versions=3, switch_at=share), versions=4) for share in (0.25, 0.5, 1.0)]
    assert halves == sorted(halves)
    assert 0 < halves[0] < halves[-1]


@pytest.mark.parametrize(
    ("share", "max_tokens", "position"),
    [(0.07, 100, 7), (0.55, 100, 55), (0.14, 50, 7), (5 / 12, 12, 5), (0.51, 10, 6)],
)
def test_the_switch_is_at_the_share_as_written(share, max_tokens, position):
    """The ceiling of share * max_tokens in decimal, whose product in float64 may lie just above a whole number."""
    assert StaleWeights(switch_at=share).switch_position(max_tokens) == position
