"""Laws of the promotion rules: every field has one, and what scale changes follows the papers' tables."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from lab.config.algorithm import AlgorithmConfig, CorrectionBlock
from lab.strict import validate
from scaled.promote import promoted_algorithm
from scaled.promotion_rules import LEARNING_RATES, MOONLIGHT, MULTIPLIERS, OLMOE, QWEN, RULES


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        block = field.annotation
        is_block = isinstance(block, type) and issubclass(block, BaseModel)
        names += leaves(block, f"{prefix}{name}.") if is_block else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return names


def test_every_field_has_one_rule() -> None:
    """The table covers the algorithm block: each field once, in its order aside; a new field needs a rule."""
    assert sorted(rule.field for rule in RULES) == sorted(leaves(AlgorithmConfig))
    assert all(rule.source for rule in RULES)
    assert {rule.field for rule in RULES if rule.action == "rule"} == {
        "replay.predictor.learning_rate_multiplier", "replay.predictor.num_positions", "batch.num_prompts",
        "optimizer.learning_rate", "oversampling", "overlong_buffer",
    }  # fmt: skip


def algorithm(preset: str = "minirl", **blocks: dict[str, Any]) -> AlgorithmConfig:
    return validate(AlgorithmConfig, {"objective": {"preset": preset}, **blocks}, "test")


def mapped(runs: AlgorithmConfig, target: AlgorithmConfig, model: str | None) -> AlgorithmConfig:
    return promoted_algorithm(runs, target, model)[0]


# Pr2 (2606.00395) App. E.1 and F; R3 (2510.11370) sec. 5.1 and Table 12.
PRINTED = [
    (QWEN, "none", 1, 3e-6, None),
    (QWEN, "R3", 8, 1e-6, None),
    (QWEN, "Pr2", 2, 2e-6, 1e4),
    (QWEN, "Pr2", 4, 1.5e-6, 1e3),
    (QWEN, "Pr2", 8, 1e-6, 1e3),
    (QWEN, "Pr3", 2, 2e-6, 1e2),
    (QWEN, "Pr3", 4, 1.5e-6, 1e1),
    (QWEN, "Pr3", 8, 1e-6, 1e1),
    (MOONLIGHT, "Pr2", 2, 5e-7, 1e2),
    (MOONLIGHT, "Pr2", 4, 3.7e-7, 5e1),
    (MOONLIGHT, "Pr2", 8, 2.5e-7, 5e1),
    (OLMOE, "Pr2", 2, 5e-7, 1e3),
    (OLMOE, "Pr2", 4, 3.7e-7, 1e3),
    (OLMOE, "Pr2", 8, 2.5e-7, 1e3),
]


@pytest.mark.parametrize(("model", "mode", "N", "rate", "multiplier"), PRINTED)
def test_rates_are_the_printed_ones(model: str, mode: Any, N: int, rate: float, multiplier: float | None) -> None:
    """Where N is not the target's, rate and multiplier are those that a paper prints for model, mode and N."""
    runs = algorithm("grpo", batch={"num_prompts": 16, "num_minibatches": N}, replay={"mode": mode})
    target = algorithm(
        batch={"num_prompts": 96, "num_minibatches": 3}, optimizer={"learning_rate": 9.0},
        replay={"predictor": {"learning_rate_multiplier": 7.0}}, sampling={"max_tokens": 1024},
    )  # fmt: skip
    result = mapped(runs, target, model)
    assert result.optimizer.learning_rate == rate
    of_minirl = mapped(algorithm(batch=runs.batch.model_dump(), replay={"mode": mode}), target, model)
    assert of_minirl.optimizer.learning_rate == 9.0  # its updates do not shrink with N (MiniRL sec. 4.2)
    assert result.replay.predictor.learning_rate_multiplier == (7.0 if multiplier is None else multiplier)
    # T_c = T = 1K where responses have 1K tokens (App. E.1); without a predictor it is nobody's business.
    assert result.replay.predictor.num_positions == (1024 if multiplier else target.replay.predictor.num_positions)


def test_pr3_is_a_hundredth_of_pr2_on_the_other_models() -> None:
    """Qwen3-30B's printed ratio of Pr3 to Pr2 is 1/100 at each N, and that ratio serves the models without a row."""
    for model in LEARNING_RATES:
        for N, (value, _) in MULTIPLIERS["Pr2", model].items():
            assert MULTIPLIERS["Pr3", model][N][0] == pytest.approx(value / 100, rel=1e-15)


def test_a_target_of_the_same_n_keeps_its_numbers() -> None:
    """Rate, prompts and (with the same mode) multiplier of a target that was written for the runs' N stand."""
    runs = algorithm(batch={"num_prompts": 16, "num_minibatches": 4}, replay={"mode": "Pr2"})
    target = algorithm(
        batch={"num_prompts": 20, "num_minibatches": 4}, optimizer={"learning_rate": 4e-6},
        replay={"mode": "Pr2", "predictor": {"learning_rate_multiplier": 7.0}},
    )  # fmt: skip
    result = mapped(runs, target, QWEN)
    assert (result.batch.num_prompts, result.optimizer.learning_rate) == (20, 4e-6)
    assert result.replay.predictor.learning_rate_multiplier == 7.0
    other = algorithm(batch={"num_prompts": 16, "num_minibatches": 4}, replay={"mode": "Pr3"})
    assert mapped(other, target, QWEN).replay.predictor.learning_rate_multiplier == 1e1


@pytest.mark.parametrize(
    ("preset", "N", "P"), [("minirl", 4, 128), ("minirl", 1, 32), ("grpo", 4, 64), ("gspo", 8, 64)]
)
def test_the_batch_follows_the_papers_of_the_objective(preset: str, N: int, P: int) -> None:
    """MiniRL's mini-batch stays and the rollout batch grows with N; GRPO's and GSPO's rollout batch is split."""
    runs = algorithm(preset, batch={"num_prompts": 16, "num_minibatches": N})
    assert mapped(runs, algorithm(batch={"num_prompts": 64, "num_minibatches": 2}), QWEN).batch.num_prompts == P


def test_between_and_beyond_the_rows() -> None:
    """An N without a row takes the next larger one's lower rate; beyond the rows, and where P / N fails, one line."""
    target = algorithm(batch={"num_prompts": 48, "num_minibatches": 1})
    runs = algorithm("grpo", batch={"num_prompts": 15, "num_minibatches": 3}, replay={"mode": "Pr2"})
    result, trail = promoted_algorithm(runs, target, QWEN)
    assert result.optimizer.learning_rate == 1.5e-6 and result.replay.predictor.learning_rate_multiplier == 1e3
    assert next(m.source for m in trail if m.field == "optimizer.learning_rate").endswith("(there is none of N = 3)")
    assert mapped(runs, target, None).optimizer.learning_rate == target.optimizer.learning_rate
    for N, words in ((16, "expected at most 8"), (5, "num_minibatches = 5 divides, got 48")):
        with pytest.raises(ValueError, match=words):
            mapped(algorithm("grpo", batch={"num_prompts": 80, "num_minibatches": N}), target, QWEN)


def test_inverted_bounds_are_said() -> None:
    """The source of a rejection names verl's own numbers, whose k1 is log(mu/old)."""
    block = {"preset": "grpo", "correction": {"name": "geo_rs", "lo": 0.8, "hi": 1.6}}
    runs = validate(AlgorithmConfig, {"objective": block}, "test")
    _, rows = promoted_algorithm(runs, algorithm(), None)
    source = next(row.source for row in rows if row.field == "objective.correction")
    assert source.endswith('; in verl: seq_mean_k1 with rollout_rs_threshold "0.625_1.25", bounds on mu/old')


def test_a_model_of_no_paper_keeps_what_is_at_hand() -> None:
    """For a model in no table the target's rate holds, and the predictor's of whoever has the predictor: a multiplier
    of the runs grows as the rate falls, and their default stays one."""
    runs = algorithm(
        batch={"num_minibatches": 2}, replay={"mode": "Pr3", "predictor": {"learning_rate_multiplier": 5.0}},
        optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    own = {"mode": "Pr3", "predictor": {"learning_rate_multiplier": 7.0}}
    rate = algorithm().optimizer.learning_rate
    for replay, wanted in ({}, 5.0 * 1e-2 / rate), (own, 7.0):
        result = mapped(runs, algorithm(replay=replay), None)
        assert result.replay.predictor.learning_rate_multiplier == pytest.approx(wanted)
        assert result.optimizer.learning_rate == rate
    plain = algorithm(batch={"num_minibatches": 2}, replay={"mode": "Pr3"}, optimizer={"learning_rate": 1e-2})
    assert mapped(plain, algorithm(), None).replay.predictor.learning_rate_multiplier is None


def test_the_length_penalty_is_that_of_the_runs() -> None:
    """Runs without one promote none; one of theirs keeps its factor, and its buffer in proportion to max_tokens or as
    the target has it."""
    short = {"sampling": {"max_tokens": 64}}
    runs, plain = algorithm(overlong_buffer=16, overlong_factor=0.5, **short), algorithm(**short)
    target = algorithm(sampling={"max_tokens": 1000})
    with_own = algorithm(sampling={"max_tokens": 1000}, overlong_buffer=200, overlong_factor=2.0)
    found = [mapped(one, other, None) for one in (runs, plain) for other in (target, with_own)]
    assert [(a.overlong_buffer, a.overlong_factor) for a in found] == [
        (250, 0.5),
        (200, 0.5),
        (None, None),
        (None, None),
    ]


def test_the_correction_is_carried_whole() -> None:
    """A correction moves with its numerator and its own parameters; one of the target does not survive."""
    block = {"preset": "grpo", "correction": {"name": "seq_tis", "cap": 3.0}}
    runs = validate(AlgorithmConfig, {"objective": block}, "test")
    target = algorithm(replay={"mode": "R2"})
    target = target.model_copy(
        update={"objective": target.objective.model_copy(update={"correction": CorrectionBlock(name="token_is")})}
    )
    assert mapped(runs, target, None).objective == runs.objective
    assert mapped(algorithm(), target, None).objective.correction is None


def test_extra_prompts_keep_their_share() -> None:
    """Over-sampling moves with the algorithm, its extra prompts in proportion to P, rounded up; without it, none."""
    over = {"extra_prompts": 3, "unfinished": "keep", "max_staleness": 2}
    runs = algorithm(batch={"num_prompts": 8, "num_responses": 8}, oversampling=over)
    target = algorithm(batch={"num_prompts": 64, "num_responses": 8})
    promoted = mapped(runs, target, None).oversampling
    assert promoted is not None and promoted.model_dump() == over | {"extra_prompts": 24}
    smaller = algorithm(batch={"num_prompts": 4, "num_responses": 8})
    assert mapped(runs, smaller, None).oversampling.extra_prompts == 2  # type: ignore[union-attr]
    assert mapped(target, runs, None).oversampling is None
