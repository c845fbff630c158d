"""Laws of the dry run: Megatron's counts are the shape's formulas; what does not divide is told what to change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import Layout, layers_of, smaller_last_stage
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
    # 24 + 24 + 24 + 22 layers, as the frameworks' own scripts for this model have them.
    "qwen3-235b TP4 PP4 EP8 uneven": (
        "qwen3-235b-a22b",
        {"tensor_parallel": 4, "pipeline_parallel": 4, "expert_parallel": 8, "num_layers_in_last_pipeline_stage": 22},
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
        "qwen3-235b-a22b",
        {"pipeline_parallel": 4},
        "training.pipeline_parallel x training.virtual_pipeline: expected a divisor of 94 decoder layers, or 22 layers "
        "in training.num_layers_in_last_pipeline_stage, got 4",
    ),
    (
        "qwen3-30b-a3b",
        {"pipeline_parallel": 4, "num_layers_in_last_pipeline_stage": 10},
        "training.num_layers_in_last_pipeline_stage: expected to leave a multiple of 3 of 48 decoder layers to 3 other "
        "stages, got 10, which leaves 38",
    ),
    (
        "qwen3-30b-a3b",
        {"pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 20, "num_layers_in_last_pipeline_stage": 20},
        "training.num_layers_in_last_pipeline_stage: expected to leave none of 48 decoder layers to 0 other stages, "
        "got 20 + 20, which leaves 8",
    ),
    (
        "qwen3-30b-a3b",
        {"pipeline_parallel": 4, "virtual_pipeline": 2, "num_layers_in_first_pipeline_stage": 9},
        "training.num_layers_in_first_pipeline_stage: expected a multiple of training.virtual_pipeline 2, got 9",
    ),
    (
        "qwen3-30b-a3b",
        {
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "num_layers_in_first_pipeline_stage": 24,
            "num_layers_in_last_pipeline_stage": 24,
        },
        "training.num_layers_in_first_pipeline_stage: expected null with two stages of 2 chunks, whose last one has "
        "24, got 24",
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


def test_a_config_with_equal_stages_keeps_its_dump() -> None:
    """So do fields of unequal stages, which one stage cannot have."""
    field = "num_layers_in_last_pipeline_stage"
    assert field not in TrainingBlock(num_ranks=2, pipeline_parallel=2).model_dump()
    assert TrainingBlock(num_ranks=2, pipeline_parallel=2, **{field: 3}).model_dump()[field] == 3
    with pytest.raises(ValueError, match=f"{field}: expected null where pipeline_parallel is 1, got 3"):
        TrainingBlock(**{field: 3})


@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), sizes=st.tuples(*[st.integers(1, 3)] * 3), fixed=st.integers(1, 3))
def test_unequal_stages_are_megatrons(pp: int, vpp: int, sizes: tuple[int, ...], fixed: int) -> None:
    """Chunks and their first layers are those that Megatron-core computes; all layers are dealt once, in order."""
    block, layer = (pytest.importorskip(f"megatron.core.transformer.transformer_{x}") for x in ("block", "layer"))
    first, last = (vpp * size if fixed & bit else None for size, bit in zip(sizes[:2], (1, 2), strict=True))
    assume(pp > 2 or vpp == 1 or fixed < 3)  # refused, as Megatron divides by the number of other stages
    middle = pp - (first is not None) - (last is not None)
    num_layers = (first or 0) + (last or 0) + middle * vpp * sizes[2]
    training = TrainingBlock(
        num_ranks=pp, pipeline_parallel=pp, virtual_pipeline=vpp, num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )  # fmt: skip
    theirs = SimpleNamespace(
        num_layers=num_layers, pipeline_model_parallel_size=pp, pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last, account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )  # fmt: skip
    stages = [layers_of(training, num_layers, stage) for stage in range(pp)]
    for stage, chunks in enumerate(stages):
        for v, chunk in enumerate(chunks):
            start = layer.get_transformer_layer_offset(theirs, vp_stage=v if vpp > 1 else None, pp_rank=stage)
            number = block.get_num_layers_to_build(theirs, vp_stage=v if vpp > 1 else None, pp_rank=stage)
            assert chunk == tuple(range(start, start + number))
    assert [n for v in range(vpp) for chunks in stages for n in chunks[v]] == list(range(num_layers))


@given(num_layers=st.integers(1, 100), pp=st.integers(1, 40))
def test_a_smaller_last_stage_is_the_largest_possible(num_layers: int, pp: int) -> None:
    """All other stages are equal, the last one has fewer layers, at least one, and no larger one would do."""
    found = smaller_last_stage(num_layers, pp)
    fits = [n for n in range(1, num_layers) if pp > 1 and (num_layers - n) % (pp - 1) == 0]
    assert found == max((n for n in fits if n < (num_layers - n) // (pp - 1)), default=None) or num_layers % pp == 0
    if num_layers % pp == 0:
        assert found is None


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
