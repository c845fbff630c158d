"""Laws of translations: each part of a recipe becomes options or is named; tests/peers compares the gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest

from lab.translate import FRAMEWORKS
from lab.translate.slime import ICEPOP
from theory.algorithm import Algorithm, OptimizerSettings, Oversampling
from theory.objectives import PRESETS, Objective, correction, preset

ALL = tuple(FRAMEWORKS)
ACTOR, ROLLOUT, FIX = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
TRL_FIX = "vllm_importance_sampling"


def recipe(framework: str, objective: Objective, **changes: Any) -> dict[str, Any]:
    """The options of a recipe that has them for all of its parts."""
    found = FRAMEWORKS[framework](Algorithm(objective=objective, **changes))
    assert found.unsaid == []
    names = [option.name for option in [*found.recipe, *found.sizes]]
    assert len(set(names)) == len(names), "an option is given twice"
    return {option.name: option.value for option in found.recipe}


def parts(framework: str, objective: Objective, **changes: Any) -> list[str]:
    """The parts of a recipe that have no option."""
    return [one.part for one in FRAMEWORKS[framework](Algorithm(objective=objective, **changes)).unsaid]


def test_dapo_with_a_weight_under_replay_in_verl() -> None:
    """Every option of one whole recipe, as verl's documentation spells them."""
    dapo = preset("grpo_dapo", correction=correction("token_tis", cap=2.0), kl_coefficient=0.01)
    assert recipe("verl", dapo, mode="R3", temperature=0.6) == {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        f"{ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.27,
        f"{ACTOR}.clip_ratio_c": 1e9,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.entropy_coeff": 0,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{FIX}.bypass_mode": False,
        f"{FIX}.rollout_is": "token",
        f"{FIX}.rollout_is_threshold": 2.0,
        f"{FIX}.rollout_is_batch_normalize": False,
        f"{FIX}.rollout_rs": None,
        "algorithm.use_kl_in_reward": False,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.01,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.megatron.router_replay.mode": "R3",
        f"{ROLLOUT}.enable_rollout_routing_replay": True,
        f"{ROLLOUT}.temperature": 0.6,
        f"{ROLLOUT}.top_p": 1.0,
        f"{ROLLOUT}.top_k": -1,
        f"{ACTOR}.ppo_epochs": 1,
    }


def test_dapo_with_a_weight_in_trl() -> None:
    """The same for TRL, which has no replay."""
    dapo = preset("grpo_dapo", correction=correction("token_tis", cap=2.0), kl_coefficient=0.01)
    assert recipe("trl", dapo, temperature=0.6) == {
        "scale_rewards": "group",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.27,
        f"{TRL_FIX}_correction": True,
        f"{TRL_FIX}_mode": "token_truncate",
        f"{TRL_FIX}_clip_min": None,
        f"{TRL_FIX}_clip_max": 2.0,
        "beta": 0.01,
        "use_bias_correction_kl": False,
        "num_iterations": 1,
        "use_vllm": True,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": 0,
        "router_aux_loss_coef": 0.0,
    }


def test_dapo_with_a_weight_under_replay_in_slime() -> None:
    """The same for slime, whose flags have the value True."""
    dapo = preset("grpo_dapo", correction=correction("token_tis", cap=2.0), kl_coefficient=0.01)
    assert recipe("slime", dapo, mode="R3", temperature=0.6) == {
        "advantage-estimator": "grpo",
        "eps-clip": 0.2,
        "eps-clip-high": 0.27,
        "calculate-per-token-loss": True,
        "use-tis": True,
        "tis-clip": 2.0,
        "tis-clip-low": 0.0,
        "use-kl-loss": True,
        "kl-loss-coef": 0.01,
        "kl-loss-type": "k3",
        "entropy-coef": 0.0,
        "use-rollout-routing-replay": True,
        "rollout-temperature": 0.6,
        "rollout-top-p": 1.0,
        "rollout-top-k": -1,
    }
    assert "use-routing-replay" in recipe("slime", dapo, mode="R2")


def test_r2_records_nothing_in_the_engine() -> None:
    """verl's R2 replays the trainer's own routes."""
    found = recipe("verl", PRESETS["grpo"], mode="R2")
    assert found[f"{ACTOR}.megatron.router_replay.mode"] == "R2"
    assert found[f"{ROLLOUT}.enable_rollout_routing_replay"] is False


def test_an_infinite_bound_never_binds() -> None:
    """verl limits log-ratios to 20 nats, and 1e9 is above e^20; TRL takes None."""
    for weight in (correction("token_is"), correction("token_tis", cap=math.inf)):
        free = preset("grpo", correction=weight, eps_high=math.inf)
        found = recipe("verl", free)
        assert (found[f"{ACTOR}.clip_ratio_high"], found[f"{FIX}.rollout_is_threshold"]) == (1e9, 1e9)
        assert recipe("trl", free)[f"{TRL_FIX}_clip_max"] is None
        assert recipe("slime", free)["tis-clip"] == 1e9


def test_cispos_bound_is_on_the_ratio_in_trl() -> None:
    """TRL's epsilon_high is the bound itself there, where verl's is its distance from 1."""
    cispo = preset("cispo", eps_high=0.3)
    assert (recipe("trl", cispo)["epsilon_high"], recipe("verl", cispo)[f"{ACTOR}.clip_ratio_high"]) == (1.3, 0.3)


def test_icepop_has_both_bounds_in_one_string_in_verl() -> None:
    """It is a weight whose threshold is a pair."""
    icepop = preset("grpo", correction=correction("icepop", lo=0.5, hi=5))
    assert recipe("verl", icepop)[f"{FIX}.rollout_is_threshold"] == "0.5_5"
    found = recipe("trl", icepop)
    assert [found[f"{TRL_FIX}_{name}"] for name in ("mode", "clip_min", "clip_max")] == ["token_mask", 0.5, 5]
    found = recipe("slime", icepop)
    assert [found["tis-clip-low"], found["tis-clip"]] == [0.5, 5] and found["custom-tis-function-path"] == ICEPOP


def test_a_rejection_is_named_and_its_nearest_option_given() -> None:
    """verl's k1 is log(mu/old), so that its bounds are the inverse ones, in the other order."""
    rejecting = Algorithm(objective=preset("grpo", rejection=correction("geo_rs", lo=0.8, hi=1.25)))
    found = FRAMEWORKS["verl"](rejecting)
    options = {option.name: option.value for option in found.recipe}
    assert (options[f"{FIX}.rollout_rs"], options[f"{FIX}.rollout_rs_threshold"]) == ("seq_mean_k1", "0.8_1.25")
    assert [one.part for one in found.unsaid] == ["rejection geo_rs"]
    open_ended = FRAMEWORKS["verl"](Algorithm(objective=preset("grpo", correction=correction("seq_mis", lo=0, hi=2))))
    thresholds = [option.value for option in open_ended.recipe if option.name == f"{FIX}.rollout_rs_threshold"]
    assert thresholds == ["0.5_1000000000"]


def test_minirl_is_one_weight_away_from_verl() -> None:
    """Its weight on pi/mu has no option; the one on old/mu that the message names has."""
    found = FRAMEWORKS["verl"](Algorithm(objective=PRESETS["minirl"]))
    assert [one.part for one in found.unsaid] == ["correction token_tis of pi/mu"]
    assert "'{name: token_tis, numerator: old, cap: 5}'" in found.unsaid[0].why
    nearest = preset("minirl", correction=correction("token_tis", numerator="old", cap=5))
    assert recipe("verl", nearest)[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum"


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mode": "Pr3"}, "replay mode Pr3"),
        ({"objective": preset("grpo", centering="top_k")}, "centering top_k"),
        ({"objective": preset("grpo_dapo", m2_budget=0.04)}, "m2_budget"),
        ({"objective": preset("grpo", router_shift_floor=0.8)}, "router_shift_floor"),
        ({"objective": preset("reinforce")}, "trust region none on the ratio none"),
        ({"objective": preset("grpo", kl_coefficient=0.1, kl_estimator="k3_is")}, "KL estimator k3_is"),
        ({"freeze_router": True}, "freeze_router"),
        ({"label_noise": 0.1}, "label_noise"),
        ({"dynamic_sampling_rounds": 2}, "dynamic sampling"),
        ({"oversampling": Oversampling(extra_prompts=2)}, "over-sampling"),
        ({"overlong_buffer": 8}, "the length penalty"),
        ({"max_turns": 2}, "turns"),
    ],
)
def test_a_part_without_an_option_is_named(framework: str, changes: dict[str, Any], part: str) -> None:
    """GRPO with this one change lacks this one part."""
    assert parts(framework, **({"objective": PRESETS["grpo"]} | changes)) == [part]


@pytest.mark.parametrize(
    ("framework", "objective", "part"),
    [
        ("trl", preset("grpo", advantage="leave_one_out"), "advantage leave_one_out"),
        ("trl", preset("dr_grpo"), "aggregation token_sum"),
        ("trl", preset("grpo_dual_clip", clip_ratio_c=1.1), "clip_ratio_c 1.1 below 1 + eps_high"),
        ("trl", preset("cispo", aggregation="length_norm"), "aggregation length_norm"),
        ("trl", preset("cispo", eps_low=0.5), "trust region weight_clip on the ratio token"),
        ("trl", preset("grpo", correction="seq_mis"), "correction seq_mis"),
        ("trl", preset("vespo", rejection="geo_rs"), "a rejection"),
        ("trl", preset("grpo", correction="token_tis", normalise_weights=True), "normalise_weights"),
        ("trl", preset("gspo", ratio="sequence_geometric_token", correction="token_tis"), "GSPO-token with a weight"),
        ("verl", preset("sapo", aggregation="token_mean"), "aggregation token_mean"),
        ("verl", preset("gspo", correction="token_tis"), "gspo with a weight per token"),
        ("verl", preset("gmpo", correction="token_tis"), "gmpo with a weight per token"),
        ("verl", preset("grpo", correction="prefix_tis"), "correction prefix_tis"),
        ("verl", preset("grpo", correction="token_k2"), "rejection token_k2"),
        ("slime", preset("dr_grpo"), "aggregation token_sum"),
        ("slime", preset("grpo", advantage="leave_one_out"), "advantage leave_one_out"),
        ("slime", preset("sapo"), "trust region soft_gate on the ratio token"),
        ("slime", preset("grpo", correction="seq_tis"), "correction seq_tis"),
        ("slime", preset("grpo", correction="geo_rs"), "a rejection"),
        ("slime", preset("grpo", correction="token_tis", normalise_weights=True), "normalise_weights"),
        ("slime", preset("gspo", ratio="sequence_geometric_token", correction="token_tis"), "GSPO-token with a weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_combinations_that_differ_are_named(framework: str, objective: Objective, part: str) -> None:
    """Options exist for each part of these, and together they would give another gradient."""
    assert parts(framework, objective) == [part]


@pytest.mark.parametrize("framework", ALL)
def test_sizes_are_the_algorithms(framework: str) -> None:
    """P, G, N, lengths and AdamW, each in the framework's unit."""
    settings = OptimizerSettings(learning_rate=2e-6, betas=(0.9, 0.98), weight_decay=0.05, max_grad_norm=0.5)
    algorithm = Algorithm(
        objective=PRESETS["grpo"],
        num_prompts=24,
        num_responses=4,
        num_minibatches=3,
        max_tokens=100,
        optimizer=settings,
    )
    found = FRAMEWORKS[framework](algorithm)
    sizes = {option.name: option.value for option in found.sizes}
    if framework == "verl":
        assert [sizes["data.train_batch_size"], sizes[f"{ACTOR}.ppo_mini_batch_size"]] == [24, 8]  # in prompts
        assert [sizes[f"{ROLLOUT}.n"], sizes["data.max_response_length"]] == [4, 100]
        optimizer = {name: sizes[f"{ACTOR}.optim.{name}"] for name in ("lr", "betas", "weight_decay", "clip_grad")}
        assert optimizer == {"lr": 2e-6, "betas": [0.9, 0.98], "weight_decay": 0.05, "clip_grad": 0.5}
    elif framework == "slime":
        assert [sizes["rollout-batch-size"], sizes["n-samples-per-prompt"]] == [24, 4]  # in prompts
        names = ("rollout-max-response-len", "lr", "adam-beta1", "adam-beta2", "weight-decay", "clip-grad")
        assert [sizes[name] for name in names] == [100, 2e-6, 0.9, 0.98, 0.05, 0.5]
        assert sizes["num-steps-per-rollout"] == 3 and any("weight decay" in note for note in found.notes)
    else:
        assert [sizes["generation_batch_size"], sizes["num_generations"]] == [96, 4]  # in responses
        names = ("max_completion_length", "learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm")
        assert [sizes[name] for name in names] == [100, 2e-6, 0.9, 0.98, 0.05, 0.5]
    assert any("N = 3" in note for note in found.notes)
    if framework == "trl":
        assert any("weight decay" in note for note in found.notes)
        dapo = replace(algorithm, objective=preset("grpo_dapo"))
        assert any("an Nth" in note for note in FRAMEWORKS["trl"](dapo).notes)
        bare = FRAMEWORKS["trl"](replace(algorithm, num_minibatches=1, optimizer=replace(settings, weight_decay=0.0)))
        assert not any(word in note for note in bare.notes for word in ("weight decay", "shuffles", "warm"))
    warm = FRAMEWORKS[framework](replace(algorithm, optimizer=replace(settings, warmup_steps=8)))
    said = [*warm.notes, *(f"{option.name} {option.value}" for option in warm.sizes)]
    assert any("arm" in line and "8" in line for line in said)


@pytest.mark.parametrize("framework", ["verl", "trl"])
def test_whole_groups_in_mini_batches(framework: str) -> None:
    """Both frameworks scatter groups over mini-batches: TRL always, verl unless its balancing is off."""
    notes = {
        shuffle: [note for note in FRAMEWORKS[framework](recipe).notes if "groups whole" in note]
        for shuffle in ("groups", "responses")
        for recipe in [Algorithm(objective=PRESETS["grpo"], num_prompts=4, num_minibatches=2, shuffle=shuffle)]
    }
    assert len(notes["groups"]) == 1 and notes["responses"] == []
    on_policy = Algorithm(objective=PRESETS["grpo"], shuffle="groups")
    assert not any("groups whole" in note for note in FRAMEWORKS[framework](on_policy).notes)


@pytest.mark.parametrize(("shuffle", "num_notes"), [("groups", 0), ("responses", 1)])
def test_slime_keeps_groups_whole(shuffle: Literal["groups", "responses"], num_notes: int) -> None:
    """It cuts a rollout into mini-batches in its own order."""
    notes = FRAMEWORKS["slime"](
        Algorithm(objective=PRESETS["grpo"], num_prompts=4, num_minibatches=2, shuffle=shuffle)
    ).notes
    assert sum("whole groups" in note for note in notes) == num_notes


@pytest.mark.parametrize("shuffle", ["groups", "responses"])
def test_verl_shuffles_responses_where_we_do(shuffle: Literal["groups", "responses"]) -> None:
    """Its own option, which has no effect on one mini-batch."""
    assert recipe("verl", PRESETS["grpo"], num_prompts=4, num_minibatches=2, shuffle=shuffle)[f"{ACTOR}.shuffle"] is (
        shuffle == "responses"
    )
    assert f"{ACTOR}.shuffle" not in recipe("verl", PRESETS["grpo"], shuffle=shuffle)
