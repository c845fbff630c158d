"""Laws of the schedules and of the probe, over the sandbox's engines in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.config.load import load
from lab.strict import ConfigError
from scaled import session
from scaled.cluster.probe import Probe, ProbeError, allowed, describe
from scaled.cluster.rewards import AheadEngine, AheadTask
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.schedule import OneStepOff, Synchronous, version_lags
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import Meter
from scaled.config import PrecisionBlock, ProbeBlock, ScaledRun, ScheduleBlock, TrainingBlock
from tests.contracts import worlds
from tests.scaled.cluster_world import ShareEngine
from theory.algorithm import Algorithm, OptimizerSettings, Oversampling
from theory.contracts import Prompt, Rollouts, Sampling
from theory.loop import global_step, hand_over
from theory.objectives import preset
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

STEPS = 4


def algorithm(mode: str = "R3", learning_rate: float = 1e-2) -> Algorithm:
    return Algorithm(
        objective=preset("minirl"),
        mode=mode,
        predictor=PredictorSettings(learning_rate_multiplier=10.0, num_positions=4),
        num_prompts=4,
        num_responses=2,
        num_minibatches=2,
        max_tokens=6,
        optimizer=OptimizerSettings(learning_rate=learning_rate, weight_decay=0.0),
    )


class Watched(ShareEngine):
    """An engine that remembers when it sampled, and from what."""

    def __init__(self, defects: str = "exact"):
        super().__init__(worlds.model_config(), worlds.DEFECTS[defects], stop_token=worlds.STOP)
        self.events: list[tuple[str, int]] = []
        self.block: threading.Event | None = None
        self.running = threading.Event()

    def load_weights(self, named_tensors, version: int) -> None:
        super().load_weights(named_tensors, version)
        self.events.append(("load", version))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        self.running.set()
        if self.block is not None:
            assert self.block.wait(30)
        self.events.append(("generate", self.version))
        return super().generate(prompts, sampling, first_response)


def world(mode: str = "R3", defects: str = "exact"):
    """An algorithm, an engine, a trainer and a task; the same every time."""
    recipe = algorithm(mode)
    predictor = recipe.predictor if recipe.passes.trains_predictor else None
    return recipe, Watched(defects), worlds.training_engine(worlds.model(), predictor), worlds.EvenTokens()


def weights(learner) -> dict[str, Tensor]:
    return dict(learner.named_tensors())


# -- schedules


@pytest.mark.parametrize("mode", ["none", "R3", "Pr3"])
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


@pytest.mark.parametrize("mode", ["none", "R3", "Pr3"])
def test_one_step_off_trains_on_the_former_weights(mode: str) -> None:
    """Batch 0 is on fresh weights; batch s is sampled by version s - 1 and trained on at version s: a lag of exactly 1.

    The same batches, sampled and learned from without any thread, give the same weights to the bit.
    """
    recipe, engine, learner, task = world(mode)
    schedule = OneStepOff(STEPS, recipe, engine, learner, task, 3, ScheduleBlock(kind="one_step_off"))
    schedule.start(0)
    lags = [schedule.step(s).metrics["staleness/version_lag_mean"] for s in range(STEPS)]
    schedule.close()
    assert lags == [0.0, 1.0, 1.0, 1.0]
    sampled = [version for event, version in engine.events if event == "generate"]
    assert sampled == [0, 0, 1, 2]
    assert [version for event, version in engine.events if event == "load"] == [0, 1, 2, 3, 4]

    _, engine, other, task = world(mode)
    plain = OneStepOff(STEPS, recipe, engine, other, task, 3, ScheduleBlock(kind="one_step_off"))
    plain.start(0)
    batches = [plain._sample(0)]
    for s in range(STEPS):
        if s + 1 < STEPS:
            batches.append(plain._sample(s + 1))
        plain._learn(s, batches[s])
        plain.start(s + 1)
    plain.close()
    assert all(torch.equal(a, weights(other)[name]) for name, a in weights(learner).items())


def partial(max_staleness: int) -> Algorithm:
    over = Oversampling(extra_prompts=2, max_staleness=max_staleness)
    return replace(algorithm(), max_tokens=60, oversampling=over)


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


def test_one_step_off_counts_its_own_version_too() -> None:
    """One step off, new tokens are one version behind and kept ones two: the bound of 2 holds, and is reached."""
    recipe, engine, learner, task = (partial(2), *world()[1:])
    block = ScheduleBlock(kind="one_step_off", max_staleness=2)
    schedule = OneStepOff(6, recipe, engine, learner, task, 3, block)
    schedule.start(0)
    metrics = [schedule.step(s).metrics for s in range(6)]
    schedule.close()
    assert [m["staleness/token_lag_max"] for m in metrics[2:]] == [2.0] * 4
    assert all(m["staleness/stale_token_fraction"] == 1 for m in metrics[1:])


KEEP = ("--algorithm.oversampling.extra_prompts", "2")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            (*KEEP, "--schedule.max_staleness", "0"),
            "schedule.max_staleness: expected at least algorithm.oversampling.max_staleness = 1, got 0",
        ),
        (
            (*KEEP, "--schedule.kind", "one_step_off"),
            "algorithm.oversampling.max_staleness: expected at least 2 where .* schedule.kind one_step_off, got 1",
        ),
        (KEEP, "rollout.routes: expected capture where algorithm.oversampling.unfinished is keep .*, got auto"),
        ((*KEEP, "--algorithm.oversampling.unfinished", "drop"), None),
        ((*KEEP, "--rollout.routes", "capture"), None),
    ],
)
def test_a_cluster_config_must_allow_what_it_keeps(words: tuple[str, ...], wanted: str | None) -> None:
    """Bounds that contradict each other, and routes that an abort loses, are one line that names the field."""
    path = Path("configs/scaled/minirl/n8_r3.yaml")
    if wanted is None:
        assert load(path, list(words), {"scaled": ScaledRun}).algorithm.oversampling is not None
        return
    with pytest.raises(ConfigError, match=wanted):
        load(path, list(words), {"scaled": ScaledRun})


def test_the_next_rollout_runs_while_this_batch_trains() -> None:
    """Updates are taken while the engine is amid the next batch, and no weights reach it before its end."""
    recipe, engine, learner, task = world()
    schedule = OneStepOff(STEPS, recipe, engine, learner, task, 3, ScheduleBlock(kind="one_step_off"))
    schedule.start(0)
    real = learner.update
    seen: list[list[tuple[str, int]]] = []

    def update(*args):
        assert engine.running.wait(30)
        seen.append(list(engine.events))
        result = real(*args)
        if learner.num_updates == 2:
            engine.block.set()
        return result

    learner.update = update
    collected = schedule._sample(0)
    schedule.pending = schedule.thread.submit(lambda: collected)
    schedule.pending.result()
    engine.running.clear()
    engine.block = threading.Event()
    schedule.step(0)
    schedule.close()
    assert seen == [[("load", 0), ("generate", 0)]] * 2  # the second generate had begun and not ended
    assert engine.events == [("load", 0), ("generate", 0), ("generate", 0), ("load", 1)]


def test_an_error_of_the_next_rollout_is_the_next_steps() -> None:
    """A batch that could not be sampled fails the step that needs it; the step that trains meanwhile is whole."""
    recipe, engine, learner, task = world()
    schedule = OneStepOff(STEPS, recipe, engine, learner, task, 3, ScheduleBlock(kind="one_step_off"))
    schedule.start(0)
    real = engine.generate
    calls: list[int] = []

    def generate(*args):
        calls.append(1)
        if len(calls) == 2:
            raise ChildProcessError("lost")
        return real(*args)

    engine.generate = generate
    assert schedule.step(0).metrics["actor/num_updates"] == 2
    with pytest.raises(ChildProcessError, match="lost"):
        schedule.step(1)
    schedule.close()


def test_the_predictor_of_the_rollout_is_remembered() -> None:
    """Under Pr3 the rollouts of one step off are read with the W_p that mu's gates held, not with the trainer's."""
    recipe, engine, learner, task = world("Pr3")
    schedule = OneStepOff(STEPS, recipe, engine, learner, task, 3, ScheduleBlock(kind="one_step_off"))
    schedule.start(0)
    schedule.step(0)
    assert schedule.pending is not None
    handed = schedule.pending.result().predictor
    assert all(not w.any() for w in handed.values())  # version 0: zero at the start
    assert all(w.any() for w in learner.predictor_weights().values())
    schedule.close()


def test_staleness_is_measured_and_bounded() -> None:
    """The lag is the trainer's version minus each response's; beyond max_staleness both numbers are in the error."""
    rollouts = worlds.rollout_engine("exact", worlds.model()).generate(worlds.prompts(2), Sampling(4, 2))
    mixed = Rollouts(tuple(replace(r, version=v) for r, v in zip(rollouts.responses, (3, 5, 5, 5), strict=True)))
    assert version_lags(mixed, 5, 2) == {"staleness/version_lag_mean": 0.5, "staleness/version_lag_max": 2.0}
    with pytest.raises(ValueError, match=r"schedule.max_staleness: expected responses at most 1 versions .* got 2 at"):
        version_lags(mixed, 5, 1)
    recipe, engine, learner, task = world()
    with pytest.raises(ValueError, match=r"schedule.max_staleness: expected at least 1 .* got 0"):
        OneStepOff(STEPS, recipe, engine, learner, task, 3, ScheduleBlock(kind="one_step_off", max_staleness=0))


# -- the probe


class One:
    """Several engines as a group shows them to the probe."""

    def __init__(self, *engines: ShareEngine):
        self.engines = engines

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        return [engine.score(sequences) for engine in self.engines]


def probe(limit: float = 1e-4, is_predicted: bool = False) -> Probe:
    return Probe(ProbeBlock(num_sequences=5, num_tokens=8), limit, "fp32", 0, is_predicted)


def test_engines_with_the_trainers_weights_pass() -> None:
    """The exact engine agrees with the trainer to rounding, also where W_p is folded into its gates."""
    for mode in ("R3", "Pr3"):
        recipe, engine, learner, task = world(mode)
        if learner.predictor is not None:
            for number, parameter in learner.predictor.parameters.items():
                parameter.data.normal_(0, 0.3, generator=stream(0, "probe", number))
        schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock())
        schedule.start(0)
        recent = engine.generate(worlds.prompts(4), Sampling(6, 2))
        found = probe(is_predicted=mode == "Pr3")(One(engine), learner, 0, recent)
        # Folding adds W_p before the product instead of after it: rounding of float32, measured 3e-7.
        assert found["probe/mean_abs_diff"] <= found["probe/max_abs_diff"] < 1e-5
        if mode == "Pr3":
            with pytest.raises(ProbeError):  # the unbiased trainer is not what the engine holds
                probe()(One(engine), learner, 0, recent)


def test_one_wrong_weight_stops_the_run() -> None:
    """Two experts of one layer exchanged in the second of two engines: a ProbeError with its number and both levels."""
    _, engine, learner, _ = world()
    tensors = weights(learner)
    engine.load_weights(tensors.items(), 4)
    a, b = (f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    wrong = Watched()
    wrong.load_weights(tensors.items(), 4)
    with pytest.raises(
        ProbeError,
        match=r"^engine 1 \(fp32\) disagrees with the trainer after the push of version 4: mean .* is \S+ nats per "
        r"token, allowed 0.0001",
    ):
        probe()(One(engine, wrong), learner, 4, engine.generate(worlds.prompts(4), Sampling(6, 2)))


def test_not_a_number_is_a_disagreement() -> None:
    """An engine whose log-probabilities are NaN fails the probe, whatever the limit."""
    _, engine, learner, _ = world()
    tensors = weights(learner)
    engine.load_weights(tensors.items(), 0)
    recent = engine.generate(worlds.prompts(4), Sampling(6, 2))
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    engine.load_weights(tensors.items(), 0)
    with pytest.raises(ProbeError, match="is nan nats per token"):
        probe(limit=1e9)(One(engine), learner, 0, recent)


def test_the_limit_is_the_configs_or_the_precisions() -> None:
    """The config's number wins; else the coarser arithmetic of the two engines, plus quantised weights and cache."""
    bf16, fp32 = TrainingBlock(precision="bf16"), TrainingBlock(precision="fp32")
    exact = PrecisionBlock(compute="fp32")
    assert allowed(ProbeBlock(max_mean_abs_diff=0.5), exact, fp32) == 0.5
    assert allowed(ProbeBlock(), exact, fp32) == 1e-4
    assert allowed(ProbeBlock(), exact, bf16) == allowed(ProbeBlock(), PrecisionBlock(compute="bf16"), fp32)
    ladder = [
        allowed(ProbeBlock(), PrecisionBlock(**p), fp32)
        for p in ({"compute": "fp32"}, {"compute": "fp16"}, {}, {"weights": "int8"}, {"weights": "fp8_block"},
                  {"weights": "fp8_block", "kv_cache": "fp8"})
    ]  # fmt: skip
    assert ladder == sorted(ladder) and len(set(ladder)) == len(ladder)
    assert describe(PrecisionBlock(weights="int8", kv_cache="fp8")) == "bf16, int8 weights, fp8 cache"


# -- rewards computed ahead


def test_rewards_ahead_are_the_tasks_own_and_several_at_a_time() -> None:
    """Every response gets the task's own reward, two are graded at the same time, and a grader's error is raised."""
    together = threading.Barrier(2)

    class Slow(worlds.EvenTokens):
        def reward(self, prompt, response) -> float:
            together.wait(timeout=30)  # one at a time would wait for ever
            return super().reward(prompt, response)

    task = AheadTask(Slow(), num_threads=2)
    engine = AheadEngine(worlds.rollout_engine("exact", worlds.model()), task)
    rollouts = engine.generate(worlds.prompts(2), Sampling(6, 2))
    expected = [worlds.EvenTokens().reward(r.prompt, r) for r in rollouts.responses]
    assert [task.reward(r.prompt, r) for r in rollouts.responses] == expected
    task.close()

    class Broken(worlds.EvenTokens):
        def reward(self, prompt, response) -> float:
            raise RuntimeError("the grading process did not start")

    task = AheadTask(Broken(), num_threads=1)
    task.expect(rollouts)
    with pytest.raises(RuntimeError, match="did not start"):
        task.reward(rollouts.responses[0].prompt, rollouts.responses[0])
    task.close()
