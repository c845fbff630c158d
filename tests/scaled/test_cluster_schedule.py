"""Laws of the synchronous schedule and of the staleness that is allowed, over the sandbox's engines in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.util.placement_group import PlacementGroup

from firstorder.worlds import Schemas
from lab.config.load import config_hash, load, to_yaml
from lab.interrupts import Interrupted
from lab.records import RunFolder
from lab.strict import ConfigError
from scaled import session
from scaled.cluster import rollout_group, usage
from scaled.cluster.rank_group import RankDied
from scaled.cluster.ray_cluster import Cluster, Place
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.saving import Checkpoints
from scaled.cluster.schedule import Synchronous, version_lags
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import Meter
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
    """Colocated engines sleep while ranks train: down before the old pass, up before the push."""
    recipe, engine, learner, task = world()
    turns: list[tuple[bool, int]] = []
    schedule = Synchronous(
        recipe, engine, learner, task, 3, ScheduleBlock(), lambda awake: turns.append((awake, learner.num_updates))
    )
    schedule.start(0)
    schedule.step(0)
    assert turns == [(True, 0), (False, 0), (True, 2)]
    assert engine.events == [("load", 0), ("generate", 0), ("load", 1)]


def test_ranks_leave_their_memory_before_engines_take_it() -> None:
    """A turn of the engines begins with the ranks giving way; a turn of the ranks only puts engines to sleep. Both take
    time that the step records."""
    meter = Meter()
    events: list[Any] = []
    ranks, engines = object.__new__(TrainingGroup), object.__new__(RolloutGroup)
    ranks.give_way = lambda: events.append("give way")
    engines.turn = lambda awake: events.append(awake)
    session._turn(meter, ranks, engines, True)
    session._turn(meter, ranks, engines, False)
    assert events == ["give way", True, False]
    assert set(meter.take()) == {"timing_s/turn"}


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


def test_engines_sleep_before_new_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may die while colocated engines are awake: they give their memory up before the next ranks take theirs."""
    events: list[Any] = []
    one = object.__new__(session.Session)
    one.config, one.places = SimpleNamespace(takes_turns=True, cluster=SimpleNamespace(max_rank_restarts=1)), object()
    one.interruptions = SimpleNamespace(begin=lambda *given: events.append("died"))
    monkeypatch.setattr(session.Session, "_takes_turns", True)
    ranks, engines = SimpleNamespace(close=lambda: None), SimpleNamespace(turn=lambda awake: events.append(awake))
    monkeypatch.setattr(session.Session, "ranks", lambda self: events.append("ranks") or ranks)
    monkeypatch.setattr(session.Session, "engines", lambda self: engines)

    def steps(self, *parts):
        if "died" not in events:
            raise RankDied("rank 0", 0)

    monkeypatch.setattr(session.Session, "_steps", steps)
    one.train("none")
    assert events == ["ranks", "died", False, "ranks"]


def test_ranks_that_cannot_give_way_leave_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank dies in the first handover of memory, the ranks that live end before the next group starts."""
    events: list[str] = []

    def give_way() -> None:
        if events == ["start"]:
            raise RankDied("rank 1 of 2 died: its process ended", 1)

    def group(*given: Any) -> Any:
        events.append("start")
        ranks = object.__new__(TrainingGroup)
        ranks.give_way, ranks.close = give_way, lambda: events.append("end")
        return ranks

    one = object.__new__(session.Session)
    one.config, one.places = SimpleNamespace(takes_turns=True, cluster=SimpleNamespace(max_rank_restarts=1)), object()
    one.meter, one.interruptions = Meter(), SimpleNamespace(begin=lambda *given: None)
    monkeypatch.setattr(session, "training_group", group)
    monkeypatch.setattr(session.Session, "_takes_turns", True)
    monkeypatch.setattr(session.Session, "engines", lambda self: None)
    monkeypatch.setattr(session.Session, "_steps", lambda self, *parts: events.append("steps"))
    one.train("none")
    assert events == ["start", "end", "start", "steps", "end"]


def test_a_collapse_seals_the_checkpoint_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of a run's files are taken once its open checkpoint is whole, and also where that fails."""
    events: list[str] = []
    monkeypatch.setattr(session, "finish", lambda config, folder: events.append("hashes"))
    one = object.__new__(session.Session)
    one.config = one.folder = None
    checkpoints = object.__new__(Checkpoints)
    checkpoints.finish = lambda: events.append("checkpoint")
    one._finish(checkpoints)
    assert events == ["checkpoint", "hashes"]

    def full() -> None:
        raise OSError("no space left")

    checkpoints.finish = full
    with pytest.raises(OSError, match="no space"):
        one._finish(checkpoints)
    assert events[2:] == ["hashes"]


def test_an_interrupted_run_does_not_wait_for_its_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines end before the schedule is closed, which would wait for what they are sampling."""
    events: list[str] = []

    def interrupt(*given: Any) -> None:
        raise Interrupted(15)

    schedule = SimpleNamespace(start=interrupt, close=lambda: events.append("schedule"))
    monkeypatch.setattr(session.Session, "probe", lambda self: None)
    monkeypatch.setattr(session.Session, "schedule", lambda self, *parts: schedule)
    monkeypatch.setattr(session, "Checkpoints", lambda *parts: SimpleNamespace(abandon=lambda: None))
    monkeypatch.setattr(session, "RunRecorder", lambda *parts: None)
    one = object.__new__(session.Session)
    one.config = SimpleNamespace(
        name="name",
        num_steps=1,
        checkpoint=SimpleNamespace(keep=1, asynchronous=None),
        logging=SimpleNamespace(loggers=()),
    )
    one.folder = RunFolder(tmp_path)
    one.interruptions = SimpleNamespace(resume=lambda step: None)
    one.task = SimpleNamespace(tokenizer=SimpleNamespace(decode=None))
    engines = object.__new__(RolloutGroup)
    engines.close = lambda: events.append("engines")
    with pytest.raises(Interrupted):
        one._steps(object.__new__(TrainingGroup), engines, "none")
    assert events == ["engines", "schedule"]


def test_an_engine_returns_to_its_gpus() -> None:
    """Ranks that start again may get each other's GPUs; the engines that live keep theirs, and so does a new one."""
    places = {("engine", i): Place(bundle=i, shares=(i,)) for i in range(2)}
    made = Cluster(True, object.__new__(PlacementGroup), places, Path(), devices={0: "0", 1: "1"})
    first = [made._environment(places["engine", i], i)["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    made.devices = {0: "1", 1: "0"}
    again = [made._environment(places["engine", i], i)["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert first == again == ["0", "1"]


def test_a_role_that_does_not_answer_counts_from_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that were silent for a step have the seconds of two in the next, never those since their start."""
    answers = iter([{1: 100.0}, {2: 50.0}, {1: 101.0}, {}, {1: 102.0}, {2: 52.0}])
    monkeypatch.setattr(usage, "_seconds", lambda actors: next(answers))
    processors = usage.Processors()
    processors.take([], [])
    assert processors.take([], []) == {"timing_s/cpu_ranks": 1.0}
    assert processors.take([], []) == {"timing_s/cpu_ranks": 1.0, "timing_s/cpu_engines": 2.0}


def test_a_push_that_breaks_off_leaves_no_part_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a rank's death in a push and the next whole push, a replaced engine gets no weights."""

    def broken(*given):
        yield "first bucket of version 8", 1
        raise RankDied("rank 0", 0)

    monkeypatch.setattr(rollout_group, "stored", broken)
    group = object.__new__(RolloutGroup)
    group.meter, group.bucket_bytes, group.convert = Meter(), 1, None
    group._weights, group.version = ["all of version 7"], 7
    with pytest.raises(RankDied):
        group.load_weights((), 8)
    assert (group._weights, group.version) == ([], -1)


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
