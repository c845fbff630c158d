"""Faults planted from a step on in short real runs are named with their step, and healthy runs raise no alarm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.pages.courses import COURSES, NARROW, is_step_right, step_named, told

pytestmark = pytest.mark.unchecked

SEED = "21"
"""A seed that no rule was made on, and that docs/doctor.md does not count."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    return [*NARROW, "--seed", SEED, "--cold_start.cache", str(tmp_path_factory.mktemp("cold_start"))]


@pytest.mark.parametrize(
    "name",
    [
        "nothing arrives", "nothing arrives from step 6, fp8", "experts never arrive", "3 steps behind",
        "experts one place on from step 7", "temperature 0.7, scored, from step 8",
        "one engine of three in fp8, the others in bf16", "one place of the batch, the others in bf16",
    ],
)  # fmt: skip
def test_a_planted_fault_is_named_with_its_step(name: str, model: Sequence[str]) -> None:
    """The run's verdict is the planted cause, and its step the planted one; where one step alone would leave it
    undecided, the cause is a candidate."""
    plant = COURSES[name]
    course = told(plant, model)
    if plant.cause == "wrong_weights":  # at this size a four-bit format looks alike
        assert course.named.name == "undecided" and plant.cause in {cause.name for cause in course.joint.candidates}
    else:
        assert course.named.name == plant.cause and course.fault is course.named, (course.named.name, course.seen)
    assert is_step_right(plant, course), (plant.since, step_named(course))
    if plant.cause == "behind":
        assert course.seen["steps_behind"] == 3 and course.seen["version_left"] < 1e-9
    if plant.in_fleet:
        assert course.seen["engine_group"] == 1
    if plant.cause == "one_slot":
        assert course.seen["slot_group"] == 5


@pytest.mark.parametrize("name", ["exact engine", "activations bf16"])
def test_a_healthy_run_raises_no_alarm(name: str, model: Sequence[str]) -> None:
    """Without a planted fault, none that spans steps is named; with an exact engine nothing is wrong at any step."""
    course = told(COURSES[name], model)
    assert not course.spanning and course.named.name == COURSES[name].cause
    if name == "exact engine":
        assert course.fault is None and course.since() is None
        assert {step.diagnosis.named[0].name for step in course.steps} == {"nothing"}
