"""Laws of the stages that machines read together: they follow the machines of the ranks, and lose no layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ray.util.placement_group import PlacementGroup

from scaled.cluster import groups
from scaled.cluster.ray_cluster import Cluster, Place
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.transfer import Meter
from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import layers_of
from scaled.model_shape import SHAPES
from scaled.objects import OF_ENGINE
from scaled.stages import MOST_SETS, layer_sets, read_together
from tests.scaled.plan_world import loaded
from tests.scaled.test_recipes import unbuilt


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_sets_are_a_partition_that_separates_machines(pp: int, of_stage: int, vpp: int, data: st.DataObject) -> None:
    """Every layer is in one set. A machine without a rank of a stage shares no set with it, unless all machines of the
    stage's set have both."""
    assume(vpp == 1 or pp > 1)
    places = data.draw(st.lists(st.integers(0, 3), min_size=pp * of_stage, max_size=pp * of_stage))
    training = TrainingBlock(num_ranks=pp * of_stage, pipeline_parallel=pp, virtual_pipeline=vpp, micro_batch_size=1)
    num_layers = 2 * pp * vpp
    sets = layer_sets(training, num_layers, places)
    assert sorted(n for layers in sets for n in layers) == list(range(num_layers))
    for machine in set(places):
        stages = {rank // of_stage for rank, place in enumerate(places) if place == machine}
        own = {n for stage in stages for chunk in layers_of(training, num_layers, stage) for n in chunk}
        assert {n for layers in sets if own.intersection(layers) for n in layers} == own


def test_stages_on_the_same_machines_are_not_cut() -> None:
    """On one machine, or where every machine has ranks of all stages, there is one set; else one for each kind of
    stage. Too many to have objects each are not cut at all."""
    assert read_together(["a"] * 8, 4) == ((0, 1, 2, 3),)
    assert read_together(["a", "b"] * 4, 4) == ((0, 1, 2, 3),)
    assert read_together(["a"] * 4 + ["b"] * 4, 4) == ((0, 1), (2, 3))
    assert read_together(["a", "a", "a", "b", "b", "b"], 3) == ((0,), (1,), (2,))
    assert len(read_together(range(MOST_SETS), MOST_SETS)) == MOST_SETS
    assert len(read_together(range(MOST_SETS + 1), MOST_SETS + 1)) == 1
    assert 3 * MOST_SETS + 2 <= OF_ENGINE  # kinds of an engine's answer: routes, hidden states, logits, and of tokens


FIRST, SECOND, THIRD, FOURTH = (tuple(range(12 * i, 12 * i + 12)) for i in range(4))


@pytest.mark.parametrize(("pp", "vpp", "expected"), [
    (1, 1, ()), (2, 1, (FIRST + SECOND, THIRD + FOURTH)), (2, 2, (FIRST + THIRD, SECOND + FOURTH)),
])  # fmt: skip
def test_engines_get_the_layers_that_machines_read(
    pp: int, vpp: int, expected: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's engines cut their records by the stages of its real places, all chunks of a stage together."""
    monkeypatch.setattr(RolloutGroup, "__init__", unbuilt)
    shutil.copy(SHAPES / "qwen3-30b-a3b.json", tmp_path / "config.json")
    words = ("--training.pipeline_parallel", str(pp), "--training.virtual_pipeline", str(vpp))
    config = loaded("qwen3_30b_a3b", *words, "--training.max_tokens_per_micro_batch", "null",
                    "--training.micro_batch_size", "1", "--model.path", str(tmp_path))  # fmt: skip
    # Bundles of 8 ranks, whose order is not that of the machines.
    places = {("rank", i): Place((3, 1, 2, 0)[i // 8]) for i in range(32)}
    cluster = Cluster(True, object.__new__(PlacementGroup), places, Path(), nodes=["b", "a", "b", "a"])
    assert groups.rollout_group(config, (1,), cluster, Meter()).layer_sets == expected
