"""Laws of the asynchronous schedule, over the sandbox's engines in this process: which weights sample which batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from scaled.cluster.probe import ProbeError
from scaled.cluster.saving import batch_of, batch_tensors
from scaled.cluster.schedule import Asynchronous, version_lags
from scaled.config import ScheduleBlock
from tests.scaled.schedule_world import partial, weights, world
from theory.collection import collect
from theory.contracts import NamedTensors, Rollouts
from theory.loop import learn

N = 6
LAGS = (1, 2)
"""One step off, engines load weights at once; further off, from memory that holds them until their turn."""


def staged(named_tensors: NamedTensors) -> NamedTensors:
    return [(name, tensor.clone()) for name, tensor in named_tensors]


def check(version: int, recent: Rollouts) -> Callable[[], dict[str, float]]:
    """A probe whose number names its version and its rollouts."""
    tokens = sum(int(r.tokens.sum()) for r in recent.responses)
    return lambda: {"probe/mean_abs_diff": version + tokens / 1e6}


def asynchronous(steps_off: int, parts, num_steps: int = N, max_staleness: int | None = None) -> Asynchronous:
    block = ScheduleBlock(steps_off=steps_off, max_staleness=max_staleness or steps_off)
    return Asynchronous(num_steps, *parts, 3, block, stage=staged, check=check)


def one_after_the_other(steps_off: int, parts) -> list[dict[str, float]]:
    """The metrics of the same law without a thread: batch s from a copy of version max(0, s - k)."""
    recipe, engine, learner, task = parts
    versions, metrics, backlog = [], [], None
    for s in range(N):
        folded = recipe.passes.rollout == "predicted"
        versions.append((staged(learner.named_tensors(folded)), learner.predictor_weights()))
        version = max(0, s - steps_off)
        tensors, predictor = versions[version]
        engine.load_weights(tensors, version)
        collected = collect(s, recipe, engine, task, 3, backlog)
        backlog = collected.backlog
        lags = version_lags(collected.rollouts, s, 10)
        metrics.append(learn(s, recipe, learner, replace(collected, predictor=predictor), 3).metrics | lags)
    return metrics


def without_probe(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("probe/")}


@pytest.mark.parametrize(("mode", "steps_off"), [("Pr3", 1), ("Pr3", 2), ("R3", 3)])
def test_batch_s_is_sampled_by_version_s_minus_k(mode: str, steps_off: int) -> None:
    """Every metric and weight is that of a loop that samples batch s with a copy of version max(0, s - k), to the bit;
    under Pr3 its rollouts are read with the W_p that was folded into that version."""
    parts = world(mode)
    _, engine, learner, _ = parts
    schedule = asynchronous(steps_off, parts)
    schedule.start(0)
    found = [schedule.step(s).metrics for s in range(N)]
    schedule.close()
    assert [m["staleness/version_lag_max"] for m in found] == [min(s, steps_off) for s in range(N)]
    assert [v for event, v in engine.events if event == "generate"] == [max(0, s - steps_off) for s in range(N)]
    loads = [v for event, v in engine.events if event == "load"]
    assert loads == list(range(N + 1 if steps_off == 1 else N - steps_off))
    other = world(mode)
    assert [without_probe(m) for m in found] == one_after_the_other(steps_off, other)
    assert all(torch.equal(a, weights(other[2])[name]) for name, a in weights(learner).items())


@pytest.mark.parametrize("steps_off", LAGS)
def test_a_row_has_the_probe_of_the_weights_that_sampled_it(steps_off: int) -> None:
    """Version v is probed once, when engines have loaded it, on the rollouts of batch v; its number is in the row of
    batch v + k. Version 0 is probed before any step."""
    parts = world()
    schedule = asynchronous(steps_off, parts)
    schedule.start(0)
    results = [schedule.step(s) for s in range(N)]
    schedule.close()
    found = [result.metrics.get("probe/mean_abs_diff") for result in results]
    expected = [check(v, results[v].rollouts)()["probe/mean_abs_diff"] for v in range(1, N - steps_off)]
    assert found == [None] * (steps_off + 1) + expected


@pytest.mark.parametrize(("mode", "steps_off"), [("Pr3", 1), ("Pr3", 2), ("R3", 3), ("partial", 1), ("partial", 2)])
def test_a_continued_run_is_the_run(mode: str, steps_off: int) -> None:
    """Stopped after any step, and continued from the batches that a checkpoint stores: the same metrics, those of the
    probe included, and the same weights, to the bit."""

    def parts():
        _, *others = world("R3" if mode == "partial" else mode)
        return (partial(steps_off + 1) if mode == "partial" else world(mode)[0], *others)

    bound = steps_off + 1 if mode == "partial" else steps_off
    whole = parts()
    schedule = asynchronous(steps_off, whole, max_staleness=bound)
    schedule.start(0)
    expected = [schedule.step(s).metrics for s in range(N)]
    schedule.close()
    other = parts()
    found, backlog, ahead = [], None, []
    for stop in (1, 3, N):
        schedule = asynchronous(steps_off, other, max_staleness=bound)
        schedule.start(len(found), backlog, ahead)
        results = [schedule.step(s) for s in range(len(found), stop)]
        found += [result.metrics for result in results]
        batches = schedule.ahead()
        backlog = batches[-1].backlog if batches else None
        ahead = [batch_of(safetensors.torch.load(safetensors.torch.save(batch_tensors(b)))) for b in batches]
        assert len(ahead) == min(steps_off, N - stop)
        schedule.close()
    assert found == expected
    assert all(torch.equal(a, weights(other[2])[name]) for name, a in weights(whole[2]).items())
    if mode == "partial":  # new tokens are k versions behind, kept ones one more
        assert [m["staleness/token_lag_max"] for m in found[steps_off + 1 :]] == [bound] * (N - steps_off - 1)
        assert max(m["staleness/mixed_response_fraction"] for m in found) > 0


def test_a_checkpoint_from_before_continues_on_fresh_weights() -> None:
    """Without stored batches the first ones are sampled with the checkpoint's weights: a lag of 0, then 1, then k."""
    parts = world()
    schedule = asynchronous(2, parts)
    schedule.start(2)
    lags = [schedule.step(s).metrics["staleness/version_lag_max"] for s in range(2, N)]
    schedule.close()
    assert lags == [0, 1, 2, 2]


def test_a_finished_batch_waits_while_a_rollout_is_slow() -> None:
    """Two steps off, the trainer trains batch 2 while the engine is still in batch 3, with version 1 of the weights.
    The versions made meanwhile reach the engine afterwards, in order, each before its own batch."""
    parts = world()
    _, engine, learner, _ = parts
    real = engine.generate
    calls, free = [], threading.Event()

    def generate(*args):
        calls.append(engine.version)
        if len(calls) == 4:
            assert free.wait(30)
        return real(*args)

    engine.generate = generate
    schedule = asynchronous(2, parts)
    schedule.start(0)
    update = learner.update

    def observed(*args):
        if learner.num_updates == 5:  # the second update of step 2
            assert not free.is_set() and engine.version == 1 and calls == [0, 0, 0, 1]
            free.set()
        return update(*args)

    learner.update = observed
    for s in range(N):
        schedule.step(s)
    schedule.close()
    assert engine.events == [
        ("load", 0), ("generate", 0), ("generate", 0), ("generate", 0), ("load", 1), ("generate", 1),
        ("load", 2), ("generate", 2), ("load", 3), ("generate", 3),
    ]  # fmt: skip


def test_the_next_rollout_runs_while_this_batch_trains() -> None:
    """One step off, updates are taken while the engine is amid the next batch; weights reach it after its end."""
    parts = world()
    _, engine, learner, _ = parts
    schedule = asynchronous(1, parts)
    schedule.start(0)
    real_generate, real_update = engine.generate, learner.update
    seen: list[list[tuple[str, int]]] = []
    running, free = threading.Event(), threading.Event()

    def generate(*args):
        if engine.events.count(("generate", 0)) == 1:
            running.set()
            assert free.wait(30)
        return real_generate(*args)

    def update(*args):
        assert running.wait(30)
        seen.append(list(engine.events))
        result = real_update(*args)
        if learner.num_updates == 2:
            free.set()
        return result

    engine.generate, learner.update = generate, update
    schedule.step(0)
    schedule.close()
    assert seen == [[("load", 0), ("generate", 0)]] * 2  # the second generate had begun and not ended
    assert engine.events == [("load", 0), ("generate", 0), ("generate", 0), ("load", 1)]


def test_settled_engines_hold_the_trainers_weights() -> None:
    """An evaluation after every step finds engines idle at the trainer's version, and changes no number."""
    parts = world()
    _, engine, learner, _ = parts
    schedule = asynchronous(3, parts)
    schedule.start(0)
    found = []
    for s in range(N):
        found.append(without_probe(schedule.step(s).metrics))
        schedule.settle()
        before = list(engine.events)
        assert engine.version == s + 1
        assert all(
            torch.equal(a, dict(engine.model.named_parameters())[n]) for n, a in learner.model.named_parameters()
        )
        assert all(future.done() for future in schedule.batches.values()) and engine.events == before
    schedule.close()
    assert [v for event, v in engine.events if event == "load"] == list(range(N + 1))
    assert found == one_after_the_other(3, world())


def test_a_disagreement_one_step_off_keeps_the_step_that_was_trained() -> None:
    """Engines that disagree with the weights of step 1 stop the run with that step's result, equal to the loop's."""

    def doubtful(version: int, recent: Rollouts) -> Callable[[], dict[str, float]]:
        def metrics() -> dict[str, float]:
            if version == 2:
                raise ProbeError("engine 0 disagrees")
            return {}

        return metrics

    schedule = Asynchronous(N, *world(), 3, ScheduleBlock(steps_off=1, max_staleness=1), stage=staged, check=doubtful)
    schedule.start(0)
    schedule.step(0)
    with pytest.raises(ProbeError, match=r"^engine 0 disagrees$") as error:
        schedule.step(1)
    schedule.close()
    assert error.value.step is not None and error.value.step.metrics == one_after_the_other(1, world())[1]


@pytest.mark.parametrize("steps_off", LAGS)
def test_an_error_of_a_later_rollout_is_its_own_steps(steps_off: int) -> None:
    """A batch that could not be sampled fails the step that needs it; the steps that train meanwhile are whole."""
    parts = world()
    _, engine, *_ = parts
    real, calls = engine.generate, []

    def generate(*args):
        calls.append(1)
        if len(calls) == 3:
            raise ChildProcessError("lost")
        return real(*args)

    engine.generate = generate
    schedule = asynchronous(steps_off, parts)
    schedule.start(0)
    assert all(schedule.step(s).metrics["actor/num_updates"] == 2 for s in (0, 1))
    with pytest.raises(ChildProcessError, match="lost"):
        schedule.ahead()
    with pytest.raises(ChildProcessError, match="lost"):
        schedule.step(2)
    schedule.close()
