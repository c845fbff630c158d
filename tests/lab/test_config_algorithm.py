"""Laws of the algorithm block: it builds the theory's Algorithm, and refuses what the theory refuses, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lab.config.algorithm import AlgorithmConfig, ObjectiveBlock
from lab.config.load import config_hash
from lab.strict import ConfigError, validate
from theory.algorithm import Algorithm
from theory.objectives import CORRECTIONS, PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_alone_is_the_theorys_preset(name: str) -> None:
    """A block that only names a preset builds that preset, and the algorithm's own defaults around it."""
    built = AlgorithmConfig(objective=ObjectiveBlock(preset=name)).build()
    assert built == Algorithm(objective=preset(name))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_every_correction_can_be_configured(name: str) -> None:
    """Every correction of the theory can be named, with its own parameters at their defaults or set."""
    parameters = {
        field.name: field.default for field in dataclasses.fields(CORRECTIONS[name]) if isinstance(field.default, float)
    }
    for given_parameters in ({}, parameters):
        raw = {"objective": {"preset": "ppo", "correction": {"name": name, **given_parameters}}}
        assert validate(AlgorithmConfig, raw, "here").build().objective.correction == CORRECTIONS[name]()


@pytest.mark.parametrize("rate", [1e-6, 2e-3])
def test_without_a_multiplier_the_predictor_has_a_rate_of_its_own(rate: float) -> None:
    """Multiplier times rate is 1e-3 at any rate: Pr2's 1e3 on 1e-6 (App. E.1); one that is given stands."""
    raw: dict[str, Any] = {"objective": {"preset": "grpo"}, "optimizer": {"learning_rate": rate}}
    built = validate(AlgorithmConfig, raw, "here").build()
    assert built.predictor.learning_rate_multiplier * rate == pytest.approx(1e-3, rel=1e-12)
    raw["replay"] = {"predictor": {"learning_rate_multiplier": 5}}
    assert validate(AlgorithmConfig, raw, "here").build().predictor.learning_rate_multiplier == 5
    raw = {"objective": {"preset": "grpo"}, "optimizer": {"learning_rate": 0.0}}
    assert math.isfinite(validate(AlgorithmConfig, raw, "here").build().predictor.learning_rate_multiplier)


NO_MASK = (
    "(the trainer scores the whole vocabulary, and no record has the mask of the tokens that were left to sample from)"
)
CHANGES: list[tuple[dict[str, Any], str, Any]] = [
    ({"replay": {"mode": "R3"}}, "mode", "R3"),
    ({"replay": {"old_gates": "live"}}, "old_gates", "live"),
    ({"replay": {"predictor": {"learning_rate_multiplier": 10}}}, "predictor.learning_rate_multiplier", 10.0),
    ({"replay": {"predictor": {"loss": "delta"}}}, "predictor.loss", "delta"),
    ({"replay": {"predictor": {"num_positions": 7}}}, "predictor.num_positions", 7),
    ({"batch": {"num_prompts": 12}}, "num_prompts", 12),
    ({"batch": {"num_responses": 3}}, "num_responses", 3),
    ({"batch": {"num_minibatches": 4}}, "num_minibatches", 4),
    ({"sampling": {"max_tokens": 9}}, "max_tokens", 9),
    ({"sampling": {"max_turns": 3}}, "max_turns", 3),
    ({"sampling": {"temperature": 0.7}}, "temperature", 0.7),
    ({"dynamic_sampling": {"enabled": True, "max_rounds": 3}}, "dynamic_sampling_rounds", 3),
    ({"dynamic_sampling": {"enabled": False, "max_rounds": 3}}, "dynamic_sampling_rounds", 1),
    ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate", 0.5),
    ({"optimizer": {"betas": [0.5, 0.6]}}, "optimizer.betas", (0.5, 0.6)),
    ({"optimizer": {"eps": 0.5}}, "optimizer.eps", 0.5),
    ({"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay", 0.5),
    ({"optimizer": {"warmup_steps": 5}}, "optimizer.warmup_steps", 5),
    ({"optimizer": {"max_grad_norm": 0.5}}, "optimizer.max_grad_norm", 0.5),
    ({"freeze_router": True}, "freeze_router", True),
    ({"label_noise": 0.25}, "label_noise", 0.25),
    ({"objective": {"preset": "minirl", "cap": 3}}, "objective.correction.cap", 3.0),
    ({"objective": {"preset": "minirl", "eps_low": 0.1}}, "objective.trust_region.eps_low", 0.1),
    ({"objective": {"preset": "cppo", "delta_b": 0.02}}, "objective.trust_region.delta_b", 0.02),
    ({"objective": {"preset": "cppo", "w_min": 0.5}}, "objective.trust_region.w_min", 0.5),
    ({"objective": {"preset": "minirl", "eps_high": 0.1}}, "objective.trust_region.eps_high", 0.1),
    ({"objective": {"preset": "minirl", "advantage": "leave_one_out"}}, "objective.advantage", "leave_one_out"),
    ({"objective": {"preset": "minirl", "aggregation": "token_mean"}}, "objective.aggregation.name", "token_mean"),
    ({"objective": {"preset": "minirl", "kl_coefficient": 0.1}}, "objective.kl_coefficient", 0.1),
    ({"objective": {"preset": "minirl", "kl_estimator": "k1"}}, "objective.kl_estimator", "k1"),
    ({"objective": {"preset": "minirl", "centering": "top_k"}}, "objective.centering", "top_k"),
    ({"objective": {"preset": "minirl", "centering_k": 5}}, "objective.centering_k", 5),
]


@pytest.mark.parametrize(("change", "path", "value"), CHANGES, ids=[path for _, path, _ in CHANGES])
def test_every_field_reaches_the_algorithm(change: dict[str, Any], path: str, value: Any) -> None:
    """A field that is set in the block is what the built algorithm has, and nothing else is changed by it."""
    preset = change.get("objective", {}).get("preset", "minirl")
    plain: Any = validate(AlgorithmConfig, {"objective": {"preset": preset}}, "here").build()
    built: Any = validate(AlgorithmConfig, {"objective": {"preset": "minirl"}} | change, "here").build()
    *blocks, last = path.split(".")
    inside, outside = built, plain
    for name in blocks:
        inside, outside = getattr(inside, name), getattr(outside, name)
    assert getattr(inside, last) == value
    if path != "objective.aggregation.name":
        assert dataclasses.replace(inside, **{last: getattr(outside, last)}) == outside


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"objective": {"preset": "minirll"}}, "objective: unknown preset 'minirll': did you mean 'minirl'?"),
        ({"objective": {"preset": "ppo", "cap": 2}}, "objective: ppo has no use for cap"),
        ({"objective": {"preset": "ppo", "correction": {"name": "icepop", "l0": 1}}}, "did you mean 'lo'?"),
        ({"objective": {"preset": "ppo", "correction": {"name": "icepop", "lo": "a"}}}, "objective.correction.lo: "),
        ({"objective": {"preset": "ppo", "correction": {"name": "icepop", "lo": -1}}}, "got lo = -1.0"),
        ({"objective": {}}, "objective.preset: missing, and it has no default"),
        (
            {"batch": {"num_prompts": 6, "num_minibatches": 4}},
            "batch.num_minibatches: expected a divisor of num_prompts = 6",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas: expected two numbers in [0, 1), got [0.9, 1.0]"),
        ({"replay": {"mode": "R4"}}, "replay.mode: expected 'none', 'R2', 'R3', 'Pr2' or 'Pr3', got \"R4\""),
        ({"replay": {"mode": "Pr2"}, "freeze_router": True}, "freeze_router"),
        ({"label_noise": 1.5}, "label_noise: expected a value less than or equal to 1, got 1.5"),
        (
            {"label_noise": 0.1, "dynamic_sampling": {"enabled": True}},
            "label_noise: expected 0 beside dynamic sampling",
        ),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: expected a value greater than 0, got 0"),
        ({"sampling": {"top_p": 0.9}}, f"sampling: top_p: expected 1 {NO_MASK}, got 0.9"),
        ({"sampling": {"top_k": 20}}, f"sampling: top_k: expected 0 {NO_MASK}, got 20"),
        ({"sampling": {"min_p": 0.1}}, f"sampling: min_p: expected 0 {NO_MASK}, got 0.1"),
        ({"sampling": {"top_p": True}}, f"sampling: top_p: expected 1 {NO_MASK}, got True"),
    ],
)
def test_a_recipe_that_does_not_compose_is_one_line(change: dict[str, Any], wanted: str) -> None:
    """A config that the theory refuses is refused when it is read, with the field's name."""
    with pytest.raises(ConfigError) as caught:
        validate(AlgorithmConfig, {"objective": {"preset": "minirl"}} | change, "here")
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"top_p": 1}, {"top_k": 0}, {"min_p": 0.0}, {"top_p": 1.0, "top_k": 0, "min_p": 0}])
def test_sampling_that_keeps_all_tokens_can_be_said(given: dict[str, Any]) -> None:
    """A setting at the value that a refusal asks for is taken, and the config and its hash are those without it."""
    plain, said = (
        validate(AlgorithmConfig, {"objective": {"preset": "minirl"}, "sampling": {"max_tokens": 9} | more}, "here")
        for more in ({}, given)
    )
    assert said == plain and config_hash(said) == config_hash(plain)


def test_mini_batches_of_whole_groups_change_no_former_hash() -> None:
    """The field is newer than some runs: at its default a dump has no trace of it, and it is built all the same."""
    shuffles = {
        shuffle: validate(AlgorithmConfig, {"objective": {"preset": "minirl"}, "batch": {"shuffle": shuffle}}, "here")
        for shuffle in ("groups", "responses")
    }
    assert "shuffle" not in shuffles["groups"].model_dump()["batch"]
    assert config_hash(shuffles["groups"]) != config_hash(shuffles["responses"])
    assert {name: config.build().shuffle for name, config in shuffles.items()} == {
        "groups": "groups", "responses": "responses",
    }  # fmt: skip
