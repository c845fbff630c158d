"""Laws of a group of engines, on a real Ray with real processes: spreading work and killing processes change nothing.

The engines inside are the sandbox's (`cluster_world`); the real ones are in test_scaled_run.py.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import ray
import torch

from scaled.cluster.buckets import Bucket
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.rollout_group import EngineLost, RolloutGroup
from scaled.cluster.routes import StoredRecord
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import shares
from tests.contracts import worlds
from tests.sandbox.engines.turns_world import Talk
from tests.scaled import cluster_world as world
from tests.scaled.ray_marks import RAY
from theory.contracts import Draw, Rollouts, Sampling
from theory.routing.predictor import PredictorSettings
from theory.turns import roll_out

pytestmark = RAY

T = TypeVar("T")
DEFECT = "weights-fp8-channel"
ROOM = {"max_num_seqs": 128, "bucket_bytes": world.BUCKET}
PREDICTOR = PredictorSettings(1.0, num_positions=4)


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test has made this folder, engines stand still in `generate`."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def engines(cluster: Cluster, hold: Path) -> Iterator[RolloutGroup]:
    group = RolloutGroup(
        cluster,
        partial(world.build_engine, DEFECT, hold),
        2,
        timeout_s=60.0,
        max_restarts=2,
        **ROOM,
    )
    group.load_weights(worlds.training_engine(worlds.model()).named_tensors(), version=7)
    yield group
    group.close()


def test_a_death_at_the_start_costs_one_more_build(cluster: Cluster, tmp_path: Path) -> None:
    """The process that replaces one that ended while it built its engine builds a single engine."""
    builds = tmp_path / "builds"
    build = partial(world.build_mortal, builds)
    group = RolloutGroup(cluster, build, 1, **ROOM, timeout_s=60.0, max_restarts=1)
    assert builds.read_text().split()[1:] == [str(pid) for pid in group.pids()] and group.restarts == 1
    group.close()


def test_a_group_that_is_closed_ends_a_call_in_flight(cluster: Cluster, tmp_path: Path) -> None:
    """A thread that waits for engines is told that they are lost, and none is started in their place."""
    build = partial(world.build_engine, DEFECT, hold := tmp_path / "hold")
    group = RolloutGroup(cluster, build, 2, **ROOM, timeout_s=600.0, max_restarts=9)
    group.load_weights(worlds.training_engine(worlds.model()).named_tensors(), version=7)
    hold.mkdir()

    def close() -> None:
        wait_for(hold)
        group.close()

    with pytest.raises(EngineLost, match="its process ended"):
        meanwhile(lambda: group.generate(worlds.prompts(5), world.SAMPLING), close)
    assert group.restarts == 0 and group.actors == []


def test_a_killed_engine_loses_only_what_was_in_flight(cluster: Cluster, tmp_path: Path) -> None:
    """Two engines that have two pieces each in flight; both are killed (-9) when a few of fifteen pieces have ended. Of
    all prompts only those that they had begun are asked again, and every response is the same. The engines in their
    place cut their routes by the same layers."""
    hold, asked = tmp_path / "hold", tmp_path / "asked"
    build = partial(world.build_engine, DEFECT, hold, None, asked)
    group = RolloutGroup(
        cluster, build, 2, max_num_seqs=6, bucket_bytes=world.BUCKET, timeout_s=60.0, max_restarts=2,
        layer_sets=((1,), (0, 2)),
    )  # fmt: skip
    group.load_weights(worlds.training_engine(worlds.model()).named_tensors(), version=7)
    lines: list[list[str]] = []

    def kill() -> None:
        while not asked.exists() or len(asked.read_text().splitlines()) < 6:
            time.sleep(0.002)
        hold.mkdir()
        while len(list(hold.iterdir())) < 2:
            time.sleep(0.02)
        lines.extend(line.split() for line in asked.read_text().splitlines())
        pids = [int(path.name) for path in hold.iterdir()]
        hold.rename(hold.with_name("released"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    found = meanwhile(lambda: group.generate(worlds.prompts(30), world.SAMPLING), kill)
    group.close()
    expected = worlds.rollout_engine(DEFECT, worlds.model()).generate(worlds.prompts(30), world.SAMPLING)
    assert worlds.same(found, expected) and group.restarts == 2
    assert isinstance(found.experts, StoredRecord)
    for b in range(len(found)):
        assert sorted(source.layer_numbers for source in found.experts.select([b]).sources) == [(0, 2), (1,)]
    # The last line of each process is the piece in which it was killed.
    killed = {pid: prompts for pid, *prompts in lines}
    begun = [prompt for line in asked.read_text().splitlines() for prompt in line.split()[1:]]
    again = Counter(begun) - Counter(prompt.id for prompt in worlds.prompts(30))
    assert again == Counter(prompt for prompts in killed.values() for prompt in prompts)
    assert 0 < sum(again.values()) <= 4 < len(lines)


def meanwhile(work: Callable[[], T], other: Callable[[], None]) -> T:
    """The result of `work`, with `other` done in a second thread after it has begun."""
    thread = threading.Thread(target=other)
    thread.start()
    try:
        return work()
    finally:
        thread.join()


def wait_for(path: Path, seconds: float = 60) -> list[Path]:
    end = time.monotonic() + seconds
    while not (found := list(path.iterdir())):
        assert time.monotonic() < end, f"nothing in {path}"
        time.sleep(0.02)
    return found


def test_shares_are_contiguous_and_even() -> None:
    """Parts of a count cover it in order, and differ by at most one."""
    assert shares(7, 3) == [(0, 3), (3, 5), (5, 7)] and shares(1, 2) == [(0, 1), (1, 1)]


def test_the_draw_does_not_depend_on_the_number_of_engines(engines: RolloutGroup) -> None:
    """Two engines over five prompts give, to the bit, what one engine in this process gives; rollouts are counted."""
    weights = sum(t.nbytes for _, t in worlds.training_engine(worlds.model()).named_tensors())
    assert weights <= engines.meter.take()["transfer/weights_bytes"] < weights * 1.2
    got = engines.generate(worlds.prompts(5), world.SAMPLING)
    assert worlds.same(got, world.alone(DEFECT)) and {r.version for r in got.responses} == {7}
    one = engines.generate(worlds.prompts(1), world.SAMPLING)  # the second engine has nothing to do
    assert len(one) == 3
    engines.meter.take()
    long = engines.generate(worlds.prompts(5), replace(world.SAMPLING, max_tokens=60))
    rows = sum(r.num_tokens - 1 for r in long.responses)
    # Experts alone are one byte a slot; tokens, log-probs, masks and prompts besides are less than 8 times that here.
    assert rows * 3 * 2 < engines.meter.take()["transfer/rollout_bytes"] < rows * 3 * 2 * 8
    scores = engines.score([[2, 3, 4], [5, 6, 7, 8]])
    assert [len(engine) for engine in scores] == [2, 2] and torch.equal(scores[0][1], scores[1][1])


def test_turns_do_not_depend_on_the_number_of_engines(engines: RolloutGroup) -> None:
    """Conversations over two engines are, to the bit, those of one engine, though later turns are unevenly spread."""
    sampling = Sampling(max_tokens=60, num_responses=3, seed=5)
    local = worlds.rollout_engine(DEFECT, worlds.model())
    whole, spread = (roll_out(engine, Talk(), worlds.prompts(5), sampling, max_turns=3) for engine in (local, engines))
    assert worlds.same(spread, whole)
    turns = [int((r.tokens[r.is_response] == worlds.STOP).sum()) for r in whole.responses]
    goes_on = {b // 3 for b, r in enumerate(whole.responses) if not r.is_response.all()}
    assert max(turns) >= 2 and not goes_on >= set(range(5)), "expected some prompts to continue, and some not"


def test_a_later_turn_goes_where_its_conversation_is(engines: RolloutGroup) -> None:
    """The later turns of five prompts, in whatever order, are sampled where the first turns were: their routes say."""
    first = worlds.prompts(5)
    homes = homes_of(engines.generate(first, Sampling(max_tokens=1)))
    assert set(homes) == {0, 1}
    order = (4, 2, 0, 2)
    later = [replace(first[p], tokens=(*first[p].tokens, 3)) for p in order]
    sampling = Sampling(max_tokens=9, draws=tuple(Draw(seed, 6 + seed) for seed in range(4)))
    local = worlds.rollout_engine(DEFECT, worlds.model())
    found = engines.generate(later, sampling)
    assert worlds.same(found, local.generate(later, sampling)) and homes_of(found) == [homes[p] for p in order]
    with pytest.raises(ValueError, match=r"sampling.draws: expected 4 draws of 1 to 2 tokens, got 1 of \[2\]"):
        engines.generate(later, Sampling(max_tokens=2, draws=(Draw(0, 2),)))


def homes_of(rollouts: Rollouts) -> list[int]:
    """The engine that made each response's routes."""
    records = [rollouts.experts.select([b]) for b in range(len(rollouts))]
    assert all(isinstance(record, StoredRecord) for record in records)
    return [record.sources[0].owner.home for record in records]


def test_an_engines_own_error_comes_through(engines: RolloutGroup) -> None:
    """An error raised by the engine's code is raised here unchanged, and costs no restart."""
    with pytest.raises(ValueError, match=r"^weights do not fit the model: missing"):
        engines.load_weights([("model.norm.weight", torch.zeros(32))], version=8)
    assert engines.restarts == 0


def test_weights_go_from_ranks_to_engines(
    cluster: Cluster, engines: RolloutGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is given sizes alone, no bucket, and engines sample as with weights that it has sent.

    They hold these from here on, without the ranks that sent them: so does the one that takes a killed one's place.
    """
    ranks = TrainingGroup(cluster, world.build_rank, 2, world.ASSEMBLY, bucket_bytes=world.BUCKET)
    weights = sum(t.nbytes for _, t in worlds.training_engine(worlds.model()).named_tensors())
    engines.meter.take()
    seen, get = [], ray.get

    def watched(refs: object, **options: object) -> object:
        seen.append(get(refs, **options))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", watched)
        engines.load_weights(ranks.named_tensors(), version=7)
    ranks.close()
    sizes = [one for one in seen if isinstance(one, int)]
    assert len(sizes) > 4 and sum(sizes) == engines.meter.take()["transfer/weights_bytes"] >= weights
    assert not any(isinstance(one, Bucket) for one in seen)
    assert worlds.same(engines.generate(worlds.prompts(5), world.SAMPLING), world.alone(DEFECT))


def test_engines_take_what_was_converted(engines: RolloutGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's `convert` is applied before the bytes are counted, and engines sample from its weights."""
    one = worlds.training_engine(worlds.model())
    local = worlds.rollout_engine(DEFECT, worlds.model())
    local.load_weights(world.rounded(one.named_tensors()), version=7)
    expected = local.generate(worlds.prompts(5), world.SAMPLING)
    assert not worlds.same(expected, world.alone(DEFECT))
    whole = sum(tensor.nbytes for _, tensor in one.named_tensors())
    engines.meter.take()
    with monkeypatch.context() as patch:
        patch.setattr(engines, "convert", world.rounded)
        engines.load_weights(one.named_tensors(), version=7)
    assert whole / 2 <= engines.meter.take()["transfer/weights_bytes"] < whole / 2 * 1.2
    assert worlds.same(engines.generate(worlds.prompts(5), world.SAMPLING), expected)
    engines.load_weights(one.named_tensors(), version=7)  # for the tests that follow
    assert worlds.same(engines.generate(worlds.prompts(5), world.SAMPLING), world.alone(DEFECT))


def test_a_killed_engine_costs_no_token(
    engines: RolloutGroup, hold: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose process is killed (-9) amid `generate` is replaced, and the responses are the same. The driver
    says so in a line per engine, without Ray's own text."""
    before = engines.generate(worlds.prompts(5), world.SAMPLING)
    hold.mkdir()

    def kill() -> None:
        victim = wait_for(hold)[0]
        while len(list(hold.iterdir())) < 2:  # both engines stand in generate
            time.sleep(0.02)
        pids = [int(path.name) for path in hold.iterdir()]
        hold.rename(hold.with_name("released"))
        os.kill(int(victim.name), signal.SIGKILL)
        os.kill(next(pid for pid in pids if pid != int(victim.name)), signal.SIGKILL)

    engines.meter.take()
    after = meanwhile(lambda: engines.generate(worlds.prompts(5), world.SAMPLING), kill)
    assert worlds.same(before, after) and {r.version for r in after.responses} == {7}
    assert engines.meter.take()["rollout/engine_restarts"] == engines.restarts == 2
    time.sleep(2.0)  # Ray's text comes from a thread that polls
    said = [record.getMessage() for record in caplog.records if record.name.startswith("scaled.")]
    assert len(said) == 2 and all(re.fullmatch(r"engine \d was lost .*another takes its place", one) for one in said), (
        said
    )
    assert "raylet" not in "".join(capfd.readouterr())


def test_too_many_deaths_are_one_clear_error(engines: RolloutGroup) -> None:
    """After `max_restarts` restarts a further death is EngineLost, which names the engine and both numbers."""
    assert engines.restarts == engines.max_restarts
    os.kill(engines.pids()[1], signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"rollout.max_restarts: engine 1 was lost .*at most 2 restarts, got 3"):
        engines.generate(worlds.prompts(5), world.SAMPLING)


def test_an_engine_that_does_not_answer_is_lost(engines: RolloutGroup, hold: Path) -> None:
    """An engine that stands still for longer than timeout_s counts as lost like a dead one."""
    hold.mkdir()
    engines.timeout_s = 1.0
    with pytest.raises(EngineLost, match=r"engine 0 was lost .no answer to sample within 1 s, rollout.timeout_s"):
        engines.generate(worlds.prompts(1), world.SAMPLING)
