"""Laws of checkpoints: the same layout continues with the same bits, another layout with the same weights and moments.

After resharding, the next steps differ by the layouts' own rounding: measured 2.4e-7 in fp32 weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from scaled.config import ModelBlock, TrainingBlock
from scaled.megatron_engine.checkpoint_index import INDEX, read_index
from tests.scaled.megatron_world import free_ports, in_turn, joined, said, spawn
from tests.scaled.rank_world import (
    LAYOUTS,
    algorithm,
    batch,
    farthest,
    layers,
    merged,
    minibatches,
    on_host,
    passes,
    sandbox_engine,
    training,
    write_model,
)
from theory.contracts import TokenScores
from theory.objectives import preset

# No trust region: what two steps at this rate leave of MiniRL's would be a gradient of 0.
OBJECTIVE = preset("reinforce")
PRECISE = {"fp32": {}, "fp32 sharded": {"distributed_optimizer": True}}
ROUNDED = {
    "bf16": {"precision": "bf16"},
    "bf16 sharded": {"precision": "bf16", "distributed_optimizer": True},
}
SAVED = {
    **{(name, kind): {**LAYOUTS[name], **PRECISE[kind]} for name in ("DP2", "TP2+EP2", "PP2+VPP2") for kind in PRECISE},
    **{
        (name, kind): {**LAYOUTS[name], **ROUNDED[kind]}
        for name, kind in (("DP2", "bf16"), ("TP2+EP2", "bf16 sharded"))
    },
    ("CP2+EP2", "fp32 sharded"): {**LAYOUTS["CP2+EP2"], **PRECISE["fp32 sharded"]},
    ("PP2, 3 + 1 layers", "fp32 sharded"): {**LAYOUTS["PP2, 3 + 1 layers"], **PRECISE["fp32 sharded"]},
    # Each stage's copy of the embeddings has a bucket of its own, which the odd vocabulary makes Megatron pad.
    ("tied PP2", "fp32 sharded"): {**LAYOUTS["PP2"], **PRECISE["fp32 sharded"]},
    ("tied PP2", "bf16 sharded"): {**LAYOUTS["PP2"], **ROUNDED["bf16 sharded"]},
    # With the odd vocabulary the shards of two ranks end within a matrix, which else they do not.
    ("tied DP2", "fp32 sharded"): {**LAYOUTS["DP2"], **PRECISE["fp32 sharded"]},
    ("tied DP2", "bf16 sharded"): {**LAYOUTS["DP2"], **ROUNDED["bf16 sharded"]},
}
SHIFTED = [key for key in SAVED if key[0] == "tied PP2"]
GATHERED = [key for key in SAVED if key[1].endswith("sharded") and key not in SHIFTED]
# Their threads write: weights in bf16 beside their masters, and two chunks of a stage.
BY_THREADS = (("TP2+EP2", "bf16 sharded"), ("PP2+VPP2", "fp32 sharded"))
DENSE = (0, 1)  # the first of two pipeline stages has no router
# A sharded optimizer has more to lose: it meets every pair of layouts, a whole one two of them.
RESHARDED = [
    ("DP2", "TP2", "fp32 sharded"), ("TP2+EP2", "DP2", "fp32 sharded"), ("TP2+EP2", "PP2", "fp32 sharded"),
    ("PP2+VPP2", "EP2", "fp32 sharded"), ("DP2", "PP2+VPP2", "fp32 sharded"),
    ("CP2+EP2", "TP2", "fp32 sharded"), ("TP2+EP2", "PP2", "fp32"), ("PP2+VPP2", "EP2", "fp32"),
    ("tied PP2", "tied TP2", "fp32 sharded"), ("tied DP2", "tied TP2", "fp32 sharded"),
    ("tied PP2", "tied DP2", "fp32 sharded"),
]  # fmt: skip


def jobs_in(root: Path) -> dict[Any, tuple[Path, dict[str, Any]]]:
    """Each job's checkpoint and layout, those that save before those that load."""
    jobs: dict[Any, tuple[Path, dict[str, Any]]] = {}
    for (name, kind), fields in SAVED.items():
        checkpoint = root / f"{name} {kind}"
        jobs["saved", name, kind] = jobs["loaded", name, kind] = checkpoint, fields
        if (name, kind) in BY_THREADS:
            jobs["by threads", name, kind] = _by_threads(checkpoint), fields
        if (name, kind) in SHIFTED:
            jobs["shifted", name, kind] = root / f"shifted {kind}", fields
        if (name, kind) in GATHERED:
            jobs["gathered", name, kind] = _gathered(checkpoint), fields
    for source, target, kind in RESHARDED:
        fields = {**LAYOUTS[target.removeprefix("tied ")], **PRECISE[kind]}
        jobs["resharded", source, target, kind] = root / f"{source} {kind}", fields
    return jobs


def run_jobs(
    rank: int, folder: Path, tied: Path, old: TokenScores, root: Path, ports: list[int]
) -> dict[Any, tuple[Any, ...]]:
    """On one rank: saves after two updates, continues; loads in the same and in other layouts, continues."""
    from scaled.megatron_engine import optimizer_states
    from scaled.megatron_engine.rank import MegatronRank

    rollouts, jobs = batch(), jobs_in(root)
    made = minibatches(rollouts, old, passes(rollouts, layers())["replay"])

    def act(key: Any, layout: TrainingBlock) -> tuple[Any, ...]:
        checkpoint, _ = jobs[key]
        model = ModelBlock(path=str(tied if key[1].startswith("tied") else folder))
        engine = MegatronRank(model, layout, algorithm())
        if key[0] == "shifted":
            with mock.patch.object(optimizer_states, "shard_tree", megatrons_tree):
                engine.save(checkpoint)
            return (said(lambda: engine.load(checkpoint)),)
        if key[0] == "saved":
            for part, routing in made:
                engine.update(part, OBJECTIVE, routing)
            engine.save(checkpoint)
            if ("gathered", *key[1:]) in jobs:
                with mock.patch.object(optimizer_states, "shard_tree", megatrons_tree):
                    engine.save(_gathered(checkpoint))
            if ("by threads", *key[1:]) in jobs:
                engine.begin_save(_by_threads(checkpoint))
        else:
            engine.load(checkpoint)
        at = engine.num_updates, on_host(engine.export()), engine.predictor_weights()
        part_metrics = [engine.update(part, OBJECTIVE, routing).step_metrics for part, routing in made]
        assert engine.has_saved(wait=True)
        return (*at, on_host(engine.export()), engine.predictor_weights(), part_metrics)

    return in_turn(rank, {key: training(2, **fields) for key, (_, fields) in jobs.items()}, ports, act)


def _by_threads(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name} by threads")


def _gathered(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name} gathered")


def megatrons_tree(one: Any, models: dict[str, Any], is_loading: bool) -> Any:
    """The states as Megatron's own format has them: whole, on the first data-parallel rank."""
    form = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }
    return one.sharded_state_dict(models, is_loading, metadata=form)["param_state"]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def writers(checkpoint: Path) -> dict[str, set[str]]:
    """The files that have pieces of each state of the optimizer."""
    found: dict[str, set[str]] = {}
    for key, place in read_index(checkpoint / INDEX).storage_data.items():
        if key.fqn.startswith("optimizer.state."):
            found.setdefault(key.fqn, set()).add(place.relative_path)
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[list[dict[Any, Any]], dict[Any, Any]]:
    """Each rank's results, and the content of the checkpoints that Megatron's own format wrote and of ours."""
    root = tmp_path_factory.mktemp("checkpoints")
    folder = write_model(root / "model")
    rollouts = batch()
    old = sandbox_engine(folder, algorithm()).score(rollouts, passes(rollouts, layers())["replay"])
    tied = write_model(root / "tied", tied=True)
    results = spawn(2, run_jobs, folder, tied, old, root, free_ports(len(jobs_in(root))), limit_s=600)
    contents = {
        key: [(tensors_of(path), writers(path)) for path in (root / " ".join(key), _gathered(root / " ".join(key)))]
        for key in GATHERED
    }
    shutil.rmtree(root)
    return results, contents


@pytest.fixture(scope="module")
def ranks(worlds) -> list[dict[Any, Any]]:
    return worlds[0]


@pytest.mark.parametrize(
    ("how", "name", "kind"), [key for key in jobs_in(Path()) if key[0] in ("loaded", "by threads", "gathered")]
)
def test_the_same_layout_goes_on_with_the_same_bits(how, name, kind, ranks):
    """Weights, predictor, metrics and the two next steps are those of the run that was not interrupted, bit for bit;
    also from a checkpoint that the ranks' threads wrote during those steps, and from one of Megatron's own format."""
    for rank in ranks:
        saved, loaded = rank["saved", name, kind], rank[how, name, kind]
        assert loaded[0] == saved[0] == 2 and loaded[5] == saved[5]
        for position in (1, 2, 3, 4):
            assert loaded[position].keys() == saved[position].keys()
            assert all(torch.equal(loaded[position][key], tensor) for key, tensor in saved[position].items())
    moved = [farthest(saved[3], saved[1]) for saved in (rank["saved", name, kind] for rank in ranks) if saved[1]]
    assert max(moved) > 1e-3


@pytest.mark.parametrize(("name", "kind"), GATHERED)
def test_every_rank_writes_its_part_of_the_tensors_that_megatron_gathers(name, kind, worlds):
    """A checkpoint has the tensors of Megatron's fully reshardable format, bit for bit, from the files of all ranks."""
    (ours, files), (theirs, _) = worlds[1][name, kind]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    assert any(key.startswith("optimizer.state.exp_avg_sq.") and tensor.any() for key, tensor in ours.items())
    assert {file for some in files.values() for file in some} == {"__0_0.distcp", "__1_0.distcp"}
    assert name != "tied DP2" or any(len(some) == 2 for some in files.values())  # a matrix that the shards cut


@pytest.mark.parametrize(("source", "target", "kind"), RESHARDED)
def test_another_layout_goes_on_as_the_first_would(source, target, kind, ranks):
    """In another layout weights and predictor have the same bits, and the next steps agree: moments came too."""
    saved = [rank["saved", source, kind] for rank in ranks]
    loaded = [rank["resharded", source, target, kind] for rank in ranks]
    assert loaded[0][0] == 2
    for position in (1, 2):
        ours, theirs = (merged([one[position] for one in world]) for world in (loaded, saved))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    weights, predictor = ((merged([one[p] for one in loaded]), merged([one[p] for one in saved])) for p in (3, 4))
    assert farthest(*weights) < 2e-6
    assert farthest(*predictor) < 2e-6


@pytest.mark.parametrize(("name", "kind"), SHIFTED)
def test_states_of_other_places_are_refused(name, kind, ranks):
    """A checkpoint cut at Megatron's own places is refused in one line by the stage whose states are shifted."""
    words = [rank["shifted", name, kind][0] for rank in ranks]
    # No bucket of the first stage needs padding, and so the last one refuses for both.
    assert words[0] == "ran"
    assert words[1].startswith("checkpoint: expected optimizer states of its own weights, got shifted ones for ")


def run_dense_stage(rank: int, folder: Path, old: TokenScores, root: Path, ports: list[int]) -> list[Any]:
    """On one rank, for each load: (state, source, target), updates and predictor as saved, and as loaded."""
    from scaled.megatron_engine.rank import MegatronRank

    def held() -> tuple[int, dict[str, Tensor]]:
        predictor = engine.predictor
        return engine.num_updates, on_host(predictor.trainer.state_tensors().items()) if predictor else {}

    rollouts = batch()
    made = minibatches(rollouts, old, passes(rollouts, layers(DENSE))["replay"])
    saved: dict[tuple[str, str], Any] = {}
    results = []
    for target, port in zip(("DP2", "PP2", "DP2"), ports, strict=True):
        layout = training(2, **LAYOUTS[target])
        with joined(layout, rank, port):
            engine = MegatronRank(ModelBlock(path=str(folder)), layout, algorithm())
            if ("fresh", target) not in saved:
                saved["fresh", target] = held()
                engine.save(root / f"fresh {target}")
                for part, routing in made:
                    engine.update(part, OBJECTIVE, routing)
                saved["trained", target] = held()
                engine.save(root / f"trained {target}")
            for (state, source), before in saved.items():
                engine.load(root / f"{state} {source}")
                results.append(((state, source, target), before, held()))
    return results


def test_a_stage_without_routers(tmp_path):
    """Where pipeline stage 0 has no predictor, checkpoints come and go all the same: its bits, its moments or none."""
    folder = write_model(tmp_path / "model", DENSE)
    old = sandbox_engine(folder, algorithm()).score(batch(), passes(batch(), layers(DENSE))["replay"])
    ranks = spawn(2, run_dense_stage, folder, old, tmp_path, free_ports(3), limit_s=300)
    for results in zip(*ranks, strict=True):
        (state, source, target), *_ = results[0]
        assert {one[step][0] for one in results for step in (1, 2)} == {2 if state == "trained" else 0}
        saved, loaded = (merged([one[step][1] for one in results]) for step in (1, 2))
        assert saved.keys() == loaded.keys(), (state, source, target)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
        assert any(name.endswith(".step") for name in loaded) == (state == "trained")
        assert target == "DP2" or results[0][2][1] == {}
