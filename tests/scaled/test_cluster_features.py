"""Router features on a real Ray: global steps that learn from stored features, which the driver never reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from scaled.cluster import ray_cluster
from scaled.cluster.features import StoredFeatures, StoredRows
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.training_group import TrainingGroup
from tests.contracts import worlds
from tests.scaled import cluster_world
from tests.scaled.ray_marks import RAY
from tests.scaled.schedule_world import algorithm
from theory.loop import global_step, hand_over

pytestmark = RAY

STEPS, BUCKET = 3, 20_000


def refuse(self: StoredRows, layer_numbers: object) -> NoReturn:
    raise AssertionError("the driver reads stored rows")


def test_features_pass_the_driver_by(one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Pr2 and Pr3 every metric and weight of three steps has the bits of a step in one process."""
    monkeypatch.setattr(StoredRows, "read", refuse)  # in this process; ranks and engines have their own
    with ray_cluster.cluster(cluster_world.config(), tmp_path) as cluster:
        engines = RolloutGroup(
            # One engine: each draws the rows whose features it keeps, so that two keep other rows than one.
            cluster, partial(cluster_world.build_engine, "weights-bf16"), 1,
            max_num_seqs=128, timeout_s=60.0, max_restarts=0, bucket_bytes=BUCKET,
        )  # fmt: skip
        for mode in ("Pr2", "Pr3"):
            recipe = algorithm(mode)
            build = partial(cluster_world.build_rank, predictor=recipe.predictor)
            ranks = TrainingGroup(cluster, build, 2, cluster_world.ASSEMBLY, bucket_bytes=BUCKET)
            engine = cluster_world.build_engine("weights-bf16")
            learner = worlds.training_engine(worlds.model(), recipe.predictor)
            for one in ((engines, ranks), (engine, learner)):
                hand_over(recipe, *one, version=0)
            for step in range(STEPS):
                ours = global_step(step, recipe, engines, ranks, worlds.EvenTokens(), seed=3)
                theirs = global_step(step, recipe, engine, learner, worlds.EvenTokens(), seed=3)
                assert ours.metrics == theirs.metrics and ours.metrics["predictor/loss"] > 0
                made = ours.rollouts.features if mode == "Pr3" else ours.scores.features
                assert isinstance(made, StoredFeatures)
            for (name, a), (_, b) in zip(sorted(ranks.named_tensors()), sorted(learner.named_tensors()), strict=True):
                assert torch.equal(a, b), name
            for number, W in ranks.predictor_weights().items():
                assert bool(W.any()) and torch.equal(W, learner.predictor_weights()[number])
            ranks.close()
        engines.close()
