"""Laws of the synchronous schedule and of the staleness that is allowed, over the sandbox's engines in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firstorder.worlds import Schemas
from lab.config.load import config_hash, load, to_yaml
from lab.strict import ConfigError
from scaled.cluster.schedule import Synchronous, version_lags
from scaled.config import ScaledRun, ScheduleBlock
from tests.contracts import worlds
from tests.scaled.schedule_world import STEPS, partial, weights, world
from theory.contracts import Rollouts, Sampling
from theory.loop import global_step, hand_over


@pytest.mark.parametrize("mode", ["R3", "Pr3"])
def test_synchronous_is_the_loop(mode: str) -> None:
    """Every metric and weight of the synchronous schedule is that of theory.loop.global_step; nothing lags."""
    recipe, engine, learner, task = world(mode)
    schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock())
    schedule.start(0)
    ours = [schedule.step(s).metrics for s in range(STEPS)]
    _, engine, other, task = world(mode)
    Synchronous(recipe, engine, other, task, 3, ScheduleBlock()).start(0)
    for s in range(STEPS):
        expected = global_step(s, recipe, engine, other, task, 3).metrics
        assert ours[s] == expected | {"staleness/version_lag_mean": 0.0, "staleness/version_lag_max": 0.0}
    assert all(torch.equal(a, weights(other)[name]) for name, a in weights(learner).items())


def test_turns_frame_the_training() -> None:
    """Colocated engines sleep while ranks train: down before the old pass, up before the push, which they need, as
    asleep they keep no weights."""
    recipe, engine, learner, task = world()

    def turn(awake: bool) -> None:
        engine.events.append(("awake after updates" if awake else "asleep after updates", learner.num_updates))

    schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock(), turn)
    schedule.start(0)
    schedule.step(0)
    assert engine.events == [
        ("awake after updates", 0), ("load", 0), ("generate", 0),
        ("asleep after updates", 0), ("awake after updates", 2), ("load", 1),
    ]  # fmt: skip


def test_a_death_in_the_ranks_turn_leaves_no_engine_asleep() -> None:
    """Where ranks die while colocated engines sleep, the next ranks' first push finds the engines awake."""
    recipe, engine, learner, task = world()

    def turn(awake: bool) -> None:
        engine.events.append(("turn", awake))

    def update(*args):
        raise ChildProcessError("rank 0 died")

    learner.update = update
    schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock(), turn)
    schedule.start(0)
    with pytest.raises(ChildProcessError, match="rank 0 died"):
        schedule.step(0)
    assert engine.events[-1] == ("turn", False)
    Synchronous(recipe, engine, world()[2], task, 3, ScheduleBlock(), turn).start(0)
    assert engine.events[-2:] == [("turn", True), ("load", 0)]


def test_partial_rollouts_are_the_loop_s() -> None:
    """The synchronous schedule keeps the backlog as theory's loop does, and continues one that it is given: metrics and
    weights are equal, from the start and from the middle of a run."""
    recipe, engine, learner, task = (partial(1), *world()[1:])
    block = ScheduleBlock(max_staleness=1)
    schedule = Synchronous(recipe, engine, learner, task, 3, block)
    schedule.start(0)
    ours = [schedule.step(s) for s in range(STEPS)]
    _, engine, other, task = world()
    hand_over(recipe, engine, other, 0)
    backlog = None
    for s in range(2):
        expected = global_step(s, recipe, engine, other, task, 3, backlog)
        backlog = expected.backlog
        assert ours[s].metrics == expected.metrics
    again = Synchronous(recipe, engine, other, task, 3, block)
    again.start(2, backlog)
    assert [again.step(s).metrics for s in range(2, STEPS)] == [result.metrics for result in ours[2:]]
    assert all(torch.equal(a, weights(other)[name]) for name, a in weights(learner).items())
    assert max(result.metrics["staleness/mixed_response_fraction"] for result in ours) > 0


KEEP, OLD = (
    ("--algorithm.oversampling.extra_prompts", "2"),
    ("--algorithm.oversampling.max_staleness", "3"),
)
DROP = (*KEEP, "--algorithm.oversampling.unfinished", "drop")
ROUNDS = ("--algorithm.dynamic_sampling.enabled", "true")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            (*KEEP, "--schedule.max_staleness", "0"),
            "schedule.max_staleness: expected at least algorithm.oversampling.max_staleness = 1, got 0",
        ),
        (
            (*KEEP, "--schedule.steps_off", "1"),
            "algorithm.oversampling.max_staleness: expected at least 2 where .* schedule.steps_off 1, got 1",
        ),
        (
            (*KEEP, "--schedule.steps_off", "3", "--schedule.max_staleness", "3", *OLD),
            "algorithm.oversampling.max_staleness: expected at least 4 where .* schedule.steps_off 3, got 3",
        ),
        (KEEP, "rollout.routes: expected capture where algorithm.oversampling.unfinished is keep .*, got auto"),
        (
            (*DROP, *ROUNDS),
            "rollout.routes: expected capture where .* algorithm.dynamic_sampling continues responses .*, got auto",
        ),
        (DROP, None),
        ((*DROP, *ROUNDS, "--rollout.routes", "capture"), None),
        ((*KEEP, "--rollout.routes", "capture"), None),
    ],
)
def test_a_cluster_config_must_allow_what_it_keeps(words: tuple[str, ...], wanted: str | None) -> None:
    """Bounds that contradict each other, and routes that an abort loses, are one line that names the field."""
    if wanted is None:
        assert loaded(*words).algorithm.oversampling is not None
        return
    with pytest.raises(ConfigError, match=wanted):
        loaded(*words)


def test_staleness_is_measured_and_bounded() -> None:
    """The lag is the trainer's version minus each response's; beyond max_staleness both numbers are in the error."""
    rollouts = worlds.rollout_engine("exact", worlds.model()).generate(worlds.prompts(2), Sampling(4, 2))
    mixed = Rollouts(tuple(replace(r, version=v) for r, v in zip(rollouts.responses, (3, 5, 5, 5), strict=True)))
    assert version_lags(mixed, 5, 2) == {"staleness/version_lag_mean": 0.5, "staleness/version_lag_max": 2.0}
    with pytest.raises(ValueError, match=r"schedule.max_staleness: expected responses at most 1 versions .* got 2 at"):
        version_lags(mixed, 5, 1)


RECIPE = Path("configs/scaled/minirl/n8_r3.yaml")


def loaded(*words: str, path: Path = RECIPE) -> ScaledRun:
    config = load(path, list(words), Schemas())
    assert isinstance(config, ScaledRun)
    return config


@pytest.mark.parametrize(("kind", "steps_off"), [("synchronous", 0), ("one_step_off", 1)])
def test_a_former_name_is_its_number(kind: str, steps_off: int, tmp_path: Path) -> None:
    """`schedule.kind` of configs and run folders from before `steps_off` gives the same config under the same hash."""
    old, new = loaded("--schedule.kind", kind), loaded("--schedule.steps_off", str(steps_off))
    assert old == new and old.schedule.steps_off == steps_off
    assert new.model_dump()["schedule"] == {"kind": kind, "max_staleness": 1}  # what was hashed then
    (tmp_path / "config.yaml").write_text(to_yaml(new))
    assert f"steps_off: {steps_off}" in to_yaml(new) and loaded(path=tmp_path / "config.yaml") == new
    further = loaded("--schedule.steps_off", "2", "--schedule.max_staleness", "2")
    assert further.model_dump()["schedule"] == {"steps_off": 2, "max_staleness": 2}
    assert len({config_hash(one) for one in (old, new, further)}) == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--schedule.steps_off", "2"), "schedule.max_staleness: expected at least steps_off = 2, got 1"),
        (("--schedule.steps_off", "-1"), "schedule.steps_off: expected a value greater than or equal to 0, got -1"),
        (("--schedule.kind", "late"), "schedule: kind: expected synchronous or one_step_off .*, got late"),
        (("--schedule.kind", "one_step_off", "--schedule.steps_off", "2"), "schedule: kind: expected steps_off alone"),
    ],
)
def test_a_wrong_schedule_is_one_line(words: tuple[str, ...], wanted: str) -> None:
    """Lags that contradict each other, a lag below 0 and a name that never was are refused with the field."""
    with pytest.raises(ConfigError, match=wanted):
        loaded(*words)
