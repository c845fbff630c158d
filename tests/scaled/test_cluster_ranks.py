"""Laws of a group of ranks, on a real Ray with real processes: it is one training engine, and a death is told at once.

The engines inside are the sandbox's (`cluster_world`); the real ones are in test_scaled_run.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch

from lab.overflow import Fp16Overflow
from scaled.cluster import rank_group, ray_cluster
from scaled.cluster.rank_group import RankDied
from scaled.cluster.ray_cluster import Cluster, Worker
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.weights import StoredTensors, stored, tensors_of
from scaled.config import LimitsBlock
from tests.contracts import worlds
from tests.scaled import cluster_world as world
from tests.scaled.ray_marks import RAY
from theory.contracts import MiniBatch
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings, fold

pytestmark = RAY

PREDICTOR = PredictorSettings(1.0, num_positions=4)


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[TrainingGroup]:
    build = partial(world.build_rank, predictor=PREDICTOR, predictor_std=0.5)
    group = TrainingGroup(cluster, build, 2, world.ASSEMBLY, bucket_bytes=world.BUCKET)
    yield group
    group.close()


def test_a_death_at_the_start_gives_the_places_back(cluster: Cluster, tmp_path: Path) -> None:
    """A rank that dies before it has met the others is RankDied, and the next group starts in the same places."""
    build = partial(world.build_rank, died=tmp_path / "died")
    before = list(cluster.actors)
    with pytest.raises(RankDied, match="rank 1 of 2 died"):
        TrainingGroup(cluster, build, 2, world.ASSEMBLY, bucket_bytes=world.BUCKET)
    assert cluster.actors == before
    TrainingGroup(cluster, build, 2, world.ASSEMBLY, bucket_bytes=world.BUCKET).close()


def test_a_rank_that_hangs_is_rank_died(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stands still is lost once a collective is late; an error that is no collective's comes as it is."""
    monkeypatch.setattr(rank_group, "SETTLE_S", 5.0)
    build = partial(world.build_rank, timeout_s=8.0)
    group = TrainingGroup(cluster, build, 2, world.ASSEMBLY, bucket_bytes=world.BUCKET)
    victim = group.pids()[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        with pytest.raises(FileNotFoundError):
            group.load(tmp_path)
        with pytest.raises(RankDied, match=r"ranks \[1\] of 2 did not answer within 5 s; rank 0 said: .*[Tt]imed out"):
            group.score(world.alone(), RoutingPlan("natural"))
        # Where no collective is late, the limit of the stage is.
        group.limits = LimitsBlock(score=1.0)
        wanted = r"ranks \[1\] of 2 did not answer to predictor_weights within 1 s \(cluster.limits.score\)"
        with pytest.raises(RankDied, match=wanted):
            group.predictor_weights()
    finally:
        os.kill(victim, signal.SIGCONT)  # a stopped process would not even end
        group.close()


class Unplaced(Worker):
    """A rank that never says its GPUs: its place is not free."""

    def devices(self) -> str:
        time.sleep(60.0)
        return ""


def test_a_rank_without_a_place_is_rank_died(cluster: Cluster, tmp_path: Path) -> None:
    """On GPUs ranks are asked for their devices within the limit of a start, and all are closed."""
    closed = []

    class OnGpus(Cluster):
        def spawn(self, role, index, cls, *args):
            return ray.remote(Unplaced).options(num_cpus=0).remote(str(tmp_path / f"{index}.log"))

        def kill(self, actor):
            closed.append(actor)
            ray.kill(actor)

    on_gpus = OnGpus(**vars(cluster) | {"has_gpus": True})
    wanted = r"ranks \[0, 1\] of 2 did not answer to devices within 3 s \(cluster.limits.start\)"
    with pytest.raises(RankDied, match=wanted):
        TrainingGroup(on_gpus, world.build_failing, 2, world.ASSEMBLY, bucket_bytes=1, limits=LimitsBlock(start=3.0))
    assert len(closed) == 2


def test_an_error_in_an_export_is_that_error(cluster: Cluster) -> None:
    """A rank whose export fails after some buckets raises its own error, which no engine has to meet."""
    group = TrainingGroup(cluster, world.build_failing, 1, world.ASSEMBLY, bucket_bytes=world.BUCKET)
    with pytest.raises(ValueError, match=r"^no more weights"):
        list(stored(group.named_tensors(), world.BUCKET))
    group.close()


def test_a_group_of_ranks_is_one_training_engine(ranks: TrainingGroup, tmp_path: Path) -> None:
    """Two ranks over gloo score, update, export, save and load to the bit what one engine in this process does."""
    one = worlds.training_engine(worlds.model(), PREDICTOR, keep_reference=True)
    rollouts = world.alone()
    routing = RoutingPlan("replay", record=rollouts.experts)
    scores = ranks.score(rollouts, routing)
    assert torch.equal(scores.logp_BT, one.score(rollouts, routing).logp_BT)
    assert torch.equal(ranks.score_reference(rollouts), one.score_reference(rollouts))
    advantages_B = torch.linspace(-1, 1, len(rollouts))
    minibatch = MiniBatch(rollouts, scores.logp_BT, advantages_B, 0, 1)
    ours = ranks.update(minibatch, preset("minirl"), routing)
    theirs = one.update(minibatch, preset("minirl"), routing)
    assert ours.metrics == theirs.metrics and torch.equal(ours.logp_pi_BT, theirs.logp_pi_BT)

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in ranks.named_tensors()}

    expected = dict(one.named_tensors())
    exported = weights()
    assert exported.keys() == expected.keys() and all(torch.equal(exported[n], expected[n]) for n in expected)
    merged = ranks.predictor_weights()
    assert list(merged) == list(one.predictor_weights()) == [0, 1, 2]

    ranks.save(tmp_path)
    ranks.update(minibatch, preset("minirl"), routing)
    assert not torch.equal(weights()["model.norm.weight"], expected["model.norm.weight"])
    ranks.load(tmp_path)
    restored = weights()
    assert all(torch.equal(restored[name], expected[name]) for name in expected)
    assert set(ranks.meter.take()) == {"timing_s/old_log_prob", "timing_s/ref", "timing_s/update_actor"}


def test_every_rank_converts_what_it_yields(ranks: TrainingGroup) -> None:
    """Weights of ranks are converted in the ranks' processes, others in this one; unasked they are as they are."""
    plain = {name: tensor.clone() for name, tensor in ranks.named_tensors()}
    assert all(tensor.dtype == torch.float32 for tensor in plain.values())
    for tensors, pids in ((ranks.named_tensors(), {*ranks.pids()}), (iter(plain.items()), {os.getpid()})):
        found = dict(tensors_of([reference for reference, _ in stored(tensors, world.BUCKET, world.signed)]))
        assert {name for name in found if name not in plain} == {f"process {pid}" for pid in pids}
        assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in plain.items())


def test_weights_that_fp16_cannot_hold_are_those_of_all_ranks(ranks: TrainingGroup) -> None:
    """Ranks whose weights overflow end their export together: one error has the names, places and values of all, and
    the ranks answer again."""
    plain = {name: tensor.clone() for name, tensor in ranks.named_tensors()}
    with pytest.raises(Fp16Overflow) as raised:
        list(stored(ranks.named_tensors(), world.BUCKET, world.enlarged))
    names = {f"process {pid}" for pid in ranks.pids()}
    assert set(raised.value.weights) == names
    for name in names:
        found = raised.value.weights[name]
        assert (found.places.tolist(), found.values.tolist()) == ([[1]], [-7e4])
        assert f"1 value of {name}" in str(raised.value)
    assert {name: tensor.clone() for name, tensor in ranks.named_tensors()}.keys() == plain.keys()


def test_ranks_hand_over_gates_with_the_predictor_by_reference(ranks: TrainingGroup) -> None:
    """Gates folded in two ranks are to the bit those of `fold` on their weights and W_p, and stay in the store."""
    plain = {name: tensor.clone() for name, tensor in ranks.named_tensors()}
    expected = dict(fold(plain.items(), ranks.predictor_weights(), worlds.model().config.shape().gates))
    assert sum(not torch.equal(expected[name], plain[name]) for name in plain) == 3  # a gate of each layer
    handed = ranks.named_tensors(folded=True)
    assert isinstance(handed, StoredTensors)
    folded = {name: tensor.clone() for name, tensor in handed}
    assert folded.keys() == expected.keys() and all(torch.equal(folded[n], expected[n]) for n in expected)


def test_an_error_in_all_ranks_is_that_error(ranks: TrainingGroup) -> None:
    """An error raised by the ranks' own code is raised here unchanged."""
    rollouts = world.alone()
    record = rollouts.experts.select(range(2))
    with pytest.raises(ValueError, match="expected"):
        ranks.score(rollouts, RoutingPlan("replay", record=record))


def test_ranks_and_ray_listen_on_loopback_alone(cluster: Cluster, ranks: TrainingGroup) -> None:
    """Where a run has Ray for itself, its processes and its ranks have no socket that another machine could reach."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert {*ranks.pids()} <= {process.pid for process in family}
    sockets = {process.pid: process.net_connections(kind="inet") for process in family}
    listening = {
        pid: [one.laddr.ip.removeprefix("::ffff:") for one in found if one.status == psutil.CONN_LISTEN]
        for pid, found in sockets.items()
    }
    first, second = (len(listening[pid]) for pid in ranks.pids())
    assert first > second >= 2, "rank 0 has the store besides gloo's and Ray's sockets"
    assert {ip for found in listening.values() for ip in found} == {"127.0.0.1"}


def test_the_death_of_a_rank_is_rank_died(ranks: TrainingGroup) -> None:
    """A rank that is killed (-9) makes the next call RankDied within seconds, also for the one that waits for it."""
    rollouts = world.alone()
    ranks.score(rollouts, RoutingPlan("natural"))
    os.kill(ranks.pids()[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 of 2 died"):
        ranks.score(rollouts, RoutingPlan("natural"))
    with pytest.raises(RankDied, match="rank 1 of 2 died"):
        list(ranks.named_tensors())
    assert time.monotonic() - start < 30


def test_a_cluster_too_small_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    """A run that asks for more places than the cluster has is refused before anything starts."""
    large = world.config(num_ranks=16, num_engines=16)
    with (
        pytest.raises(ValueError, match=r"training.num_ranks: expected a cluster with 32 CPUs .* got 4"),
        ray_cluster.cluster(large, tmp_path),
    ):
        pass
