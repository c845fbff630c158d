"""Laws of a session's handovers and ends, over parts that start nothing: who sleeps and who closes, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.util.placement_group import PlacementGroup
from safetensors.torch import load_file

from lab.interrupts import Interrupted
from lab.recording import NonFiniteError, RunRecorder
from lab.records import RunFolder
from lab.traces import Trace
from scaled import session
from scaled.cluster import rollout_group, usage
from scaled.cluster.probe import Probe, ProbeError
from scaled.cluster.rank_group import RankDied
from scaled.cluster.ray_cluster import Cluster, Place
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.saving import Checkpoints
from scaled.cluster.schedule import Synchronous
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import Meter
from scaled.config import PrecisionBlock, ScaledRun, ScheduleBlock
from scaled.vllm_engine.quantize import quantised
from tests.scaled import cluster_world
from tests.scaled.schedule_world import world
from theory.contracts import Sampling


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


def fifth_step(
    events: list[tuple[list[int], int]], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], None], Any, Any]:
    """A session's step 5 over the sandbox's engines, its learner and its engine; its end adds the rows' steps and the
    number of traces to `events`."""

    def ended(config, run):
        events.append(([row["step"] for row in run.metrics()], len(run.traces())))

    monkeypatch.setattr(session, "finish", ended)
    recipe, engine, learner, task = world()
    algorithm = SimpleNamespace(build=lambda: recipe)
    config = ScaledRun.model_construct(
        algorithm=algorithm, traces=SimpleNamespace(every=100), schedule=ScheduleBlock(), num_steps=9
    )
    one = object.__new__(session.Session)
    one.config, one.folder, one.task, one.meter, one.between = config, folder, task, Meter(), Meter()
    one.interruptions, one.processors = SimpleNamespace(step=0), SimpleNamespace(take=lambda *given: {})
    schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock())
    schedule.start(4)
    recorder = RunRecorder(config, folder, lambda number: {}, None)
    checkpoints = object.__new__(Checkpoints)
    checkpoints.finish = lambda: None
    probe, ranks, engines = object.__new__(Probe), object.__new__(TrainingGroup), object.__new__(RolloutGroup)
    ranks.actors = engines.actors = []
    return partial(one._step, 4, schedule, probe, recorder, ranks, engines, checkpoints), learner, engine


def test_an_update_that_is_not_finite_leaves_its_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step's row, then its tokens and scores as a trace, though none is due, and both before the hashes."""
    events: list[tuple[list[int], int]] = []
    folder = RunFolder(tmp_path)
    step, learner, _ = fifth_step(events, folder, monkeypatch)
    real, updates = learner.update, []

    def poisoned(*given: Any) -> Any:
        updates.append(given)
        if len(updates) == 2:
            learner.model.norm.data.fill_(math.inf)
        return real(*given)

    monkeypatch.setattr(learner, "update", poisoned)
    with pytest.raises(NonFiniteError, match=r"^step 5: actor/grad_norm is nan"):
        step()
    assert events == [([5], 1)]
    trace = Trace.load(folder.traces()[0])
    assert trace.step == 5 and len(trace) == len(updates[0][0].rollouts) + len(updates[1][0].rollouts)
    assert trace.old_pass == "replay_rollout"  # R3


def test_weights_that_fp16_cannot_hold_leave_their_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A push of weights beyond fp16 ends the run in one line: step, weight and the file with values and places; the
    step's row says that log mu would not be finite."""
    events: list[tuple[list[int], int]] = []
    folder = RunFolder(tmp_path)
    step, _, engine = fifth_step(events, folder, monkeypatch)
    load = engine.load_weights

    def pushed(named: Any, version: int) -> None:
        grown = ((name, tensor * 1e6 if name == "model.norm.weight" else tensor) for name, tensor in named)
        load(quantised(grown, PrecisionBlock(compute="fp16")), version)

    monkeypatch.setattr(engine, "load_weights", pushed)
    with pytest.raises(NonFiniteError) as raised:
        step()
    path = tmp_path / "evidence" / "overflow-000005.safetensors"
    line = str(raised.value)
    assert line.startswith("step 5: fp16: expected magnitudes of at most 65504, got ")
    assert line.endswith(f" (32 values of model.norm.weight); they are in {path}") and "\n" not in line
    assert load_file(path)["model.norm.weight.places"].flatten().tolist() == list(range(32))
    assert events == [([5], 0)] and folder.metrics()[0]["non_finite"] == ["rollout_corr/k3_kl"]


def test_a_failed_probe_leaves_its_evidence_in_the_runs_folder(tmp_path: Path) -> None:
    """The session's own probe writes into `evidence` of the session's folder, and its line names the file."""
    recipe, engine, learner, task = world()
    engine.load_weights(learner.named_tensors(), version=1)
    sampling = Sampling(max_tokens=8, num_responses=recipe.num_responses)
    recent = engine.generate(task.prompts(0, recipe.num_prompts), sampling)

    class Wrong:
        def score(self, sequences):
            return [[torch.full((len(tokens) - 1,), -50.0) for tokens in sequences]]

    one = object.__new__(session.Session)
    one.config, one.folder, one.algorithm = cluster_world.config(), RunFolder(tmp_path), recipe
    path = tmp_path / "evidence" / "probe-000001.safetensors"
    with pytest.raises(ProbeError, match=f"tokens and scores are in {path}$"):
        one.probe()(Wrong(), learner, 1, recent)
    assert path.is_file()


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
    # Or a Ray before 2.60 may empty the list of an actor that asked for no GPU.
    assert made._environment(places["engine", 0], 0)["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"


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
