"""Laws of the dry run: Megatron's counts are the shape's formulas; what does not divide is told what to change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import Layout, layers_of
from scaled.model_shape import load_shape
from scaled.plan import parameters
from scaled.plan.layout import RankPlan, dry_run
from tests.scaled.plan_world import forked_builds

GIB = 2**30
ROOT = Path(__file__).parents[2]

# Model and layout; of 32 ranks unless it says otherwise.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 TP4 EP8": ("qwen3-30b-a3b", {"tensor_parallel": 4, "expert_parallel": 8}),
    "qwen3 TP2 CP4 EP8": ("qwen3-30b-a3b", {"tensor_parallel": 2, "context_parallel": 4, "expert_parallel": 8}),
    "qwen3 TP4 PP4 VPP3 EP2 ETP2": (
        "qwen3-30b-a3b",
        {"tensor_parallel": 4, "pipeline_parallel": 4, "virtual_pipeline": 3, "expert_parallel": 2,
         "expert_tensor_parallel": 2},
    ),
    "moonlight TP2 PP3 EP4": (
        "moonlight-16b-a3b",
        {"num_ranks": 24, "tensor_parallel": 2, "pipeline_parallel": 3, "expert_parallel": 4,
         "offload": ("gradients", "optimizer")},
    ),
    "olmoe EP8 ETP2": ("olmoe-1b-7b", {"tensor_parallel": 2, "expert_parallel": 8, "expert_tensor_parallel": 2}),
}  # fmt: skip


def _shape(name: str) -> ModelShape:
    return load_shape(ROOT / "nowhere", name)


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[ModelShape, TrainingBlock, list[RankPlan]]]:
    """The dry run of each layout: the first one's in a process as users have it, the others' in copies."""
    made = {}
    ours = b"1" * 2**30  # what the caller holds is no part of a dry run's own memory
    for case, (name, fields) in LAYOUTS.items():
        shape, training = _shape(name), TrainingBlock(**{"num_ranks": 32, **fields})
        with forked_builds() if made else nullcontext():
            made[case] = (shape, training, dry_run(shape, training))
    assert len(ours) == 2**30
    return made


def total_parameters(plans: Sequence[RankPlan], training: TrainingBlock) -> int:
    """Parameters of the whole model from one plan of each stage; rows that pad the vocabulary count, copies do not.

    sum over stages of  (dense - replicated) x TP + replicated + experts x EP x ETP
    """
    tp, expert_ranks = training.tensor_parallel, training.expert_parallel * training.expert_tensor_parallel
    return sum(
        (p.dense_parameters - p.replicated_parameters) * tp
        + p.replicated_parameters
        + p.expert_parameters * expert_ranks
        for p in plans
    )


@pytest.mark.parametrize("case", LAYOUTS)
def test_stages_sum_to_the_model(case: str, plans: Any) -> None:
    """The stages' shards, each counted once, are exactly ModelShape.num_parameters."""
    shape, training, ranks = plans[case]
    assert total_parameters(ranks, training) == shape.num_parameters
    assert [rank.stage for rank in ranks] == list(range(training.pipeline_parallel))


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_rank_holds_its_part_of_the_formulas(case: str, plans: Any) -> None:
    """Experts of a rank are layers x experts / EP x size / ETP; layers are dealt in equal runs, chunk by chunk. Where
    TP, PP, VPP, EP and ETP mix, the count of `plan` has the weights and bytes of each stage of the build.
    """
    shape, training, ranks = plans[case]
    for rank in ranks:
        num_moe = sum(n in shape.moe_layers for chunk in rank.layers for n in chunk)
        local = shape.num_experts // training.expert_parallel
        assert rank.num_local_experts == (local if num_moe else 0)
        expected = num_moe * local * shape.num_expert_parameters // training.expert_tensor_parallel
        assert rank.expert_parameters == expected
        assert rank.layers == layers_of(training, shape.num_layers, rank.stage)
        found = parameters.rank_parameters(shape, training, rank.stage)
        assert (found.dense, found.experts) == (rank.dense_parameters, rank.expert_parameters)
        assert parameters.optimizer_bytes(found, training) == pytest.approx(rank.optimizer_bytes, abs=2)
    assert sorted(n for rank in ranks for chunk in rank.layers for n in chunk) == list(range(shape.num_layers))


@pytest.mark.parametrize(
    ("name", "fields", "experts"),
    [
        ("qwen3-30b-a3b", {"num_experts": 0, "dense_size": 6144, "dense_layers": tuple(range(48))}, [0, 0]),
        ("moonlight-16b-a3b", {"num_layers": 2}, [0, 64]),
    ],
    ids=["no experts", "a dense first stage"],
)
def test_stages_without_experts_are_built(name: str, fields: dict[str, Any], experts: list[int]) -> None:
    """Megatron builds them with the plan's weights, all of them dense, and they have no experts."""
    shape = replace(_shape(name), **fields)
    training = TrainingBlock(num_ranks=4, tensor_parallel=2, pipeline_parallel=2, recompute="selective")
    with forked_builds():
        ranks = dry_run(shape, training)
    assert total_parameters(ranks, training) == shape.num_parameters
    for rank in ranks:
        found = parameters.rank_parameters(shape, training, rank.stage)
        assert (found.dense, found.experts) == (rank.dense_parameters, rank.expert_parameters)
    assert [rank.num_local_experts for rank in ranks] == experts


def test_a_module_of_our_name_in_the_working_folder_does_no_harm(tmp_path: Path, monkeypatch: Any) -> None:
    """The process of the dry run imports this project's packages, whatever lies where the command was called."""
    (tmp_path / "lab.py").write_text("raise RuntimeError('not ours')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (rank,) = dry_run(replace(_shape("qwen3-30b-a3b"), num_layers=1), TrainingBlock())
    assert rank.layers == ((0,),)


def test_qwen3_30b_is_the_published_size(plans: Any) -> None:
    """Qwen3-30B-A3B under TP4 EP8 on 32 ranks: 4.0187 B parameters a rank, 30.53 B in all, 7.49 / 14.97 / 10.68 GiB."""
    _, training, (rank,) = plans["qwen3 TP4 EP8"]
    assert round(rank.num_parameters / 1e9, 4) == 4.0187
    assert round(rank.expert_parameters / 1e9, 4) == 3.6239
    assert round(total_parameters([rank], training) / 1e9, 2) == 30.53
    sizes = (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes)
    assert [round(size / GIB, 2) for size in sizes] == [7.49, 14.97, 10.68]


def test_a_dry_run_costs_no_memory(plans: Any) -> None:
    """Building 30 B parameters takes less than 1 GB of resident memory (measured 0.48 GB: the imports)."""
    assert all(rank.peak_bytes < 1e9 for _, _, ranks in plans.values() for rank in ranks)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen3-30b-a3b",
        {"pipeline_parallel": 8, "virtual_pipeline": 4},
        "training.pipeline_parallel x training.virtual_pipeline: expected a divisor of 48 decoder layers, got 32",
    ),
    (
        "olmoe-1b-7b",
        {"expert_tensor_parallel": 3},
        "training.expert_tensor_parallel: expected a divisor of 1024 hidden units of an expert, got 3",
    ),
]


@pytest.mark.parametrize(("name", "fields", "line"), REFUSED)
def test_what_does_not_divide_is_one_clear_line(name: str, fields: dict[str, Any], line: str) -> None:
    """A layout that does not divide the model is refused before Megatron sees it, naming the field and both numbers."""
    with pytest.raises(ValueError) as error:
        dry_run(_shape(name), TrainingBlock(num_ranks=96, **fields))
    assert str(error.value) == line


def test_a_config_without_context_parallelism_keeps_its_dump() -> None:
    """1, the default, is left out of the dump that is hashed, so configs from before the field keep their hashes."""
    assert "context_parallel" not in TrainingBlock(context_parallel=1).model_dump()
    assert TrainingBlock(num_ranks=2, context_parallel=2).model_dump()["context_parallel"] == 2
    with pytest.raises(ValueError, match="tensor_parallel x context_parallel x pipeline_parallel = 4, got 6"):
        TrainingBlock(num_ranks=6, tensor_parallel=2, context_parallel=2)


@given(pp=st.integers(1, 4), vpp=st.integers(1, 3), size=st.integers(1, 3))
def test_layers_are_dealt_once_each(pp: int, vpp: int, size: int) -> None:
    """Over all stages and chunks every layer comes once; the order of execution (chunk, then stage) is ascending."""
    training = TrainingBlock(num_ranks=pp, pipeline_parallel=pp, virtual_pipeline=vpp if pp > 1 else 1)
    stages = [layers_of(training, pp * training.virtual_pipeline * size, rank) for rank in range(pp)]
    order = [n for chunk in range(training.virtual_pipeline) for stage in stages for n in stage[chunk]]
    assert order == list(range(pp * training.virtual_pipeline * size))


def _places(tp: int, cp: int) -> list[Layout]:
    return [Layout(tp_rank=t, tp_size=tp, cp_rank=c, cp_size=cp) for c in range(cp) for t in range(tp)]


@given(tp=st.integers(1, 5), cp=st.integers(1, 4), size=st.integers(1, 3))
def test_routers_see_each_position_once(tp: int, cp: int, size: int) -> None:
    """Router runs of all TP and CP ranks partition the positions; each rank's ascend, and all have equally many."""
    training = TrainingBlock(num_ranks=tp * cp, tensor_parallel=tp, context_parallel=cp)
    width = size * training.width_multiple
    seen = [[n for run in place.router_runs(width) for n in run] for place in _places(tp, cp)]
    assert sorted(n for rank in seen for n in rank) == list(range(width))
    assert all(rank == sorted(rank) and len(rank) == width // (tp * cp) for rank in seen)


@given(cp=st.integers(1, 6), size=st.integers(1, 4))
def test_context_ranks_share_the_causal_mask_equally(cp: int, size: int) -> None:
    """Each context-parallel rank has as many pairs of a query and a key before it as every other."""
    width = 2 * cp * size
    pairs = [sum(n + 1 for run in place.context_runs(width) for n in run) for place in _places(1, cp)]
    assert len(set(pairs)) == 1 and sum(pairs) == width * (width + 1) // 2


def test_uneven_chunks_are_refused() -> None:
    """A width that does not divide over the ranks is an error with both numbers, never a shorter chunk."""
    with pytest.raises(ValueError, match="expected a multiple of 4 sequence-parallel chunks, got 6 positions"):
        Layout(tp_rank=1, tp_size=4).router_runs(6)
    with pytest.raises(ValueError, match="expected a multiple of 4 context-parallel runs, got a width of 6"):
        Layout(cp_rank=1, cp_size=2).router_runs(6)
