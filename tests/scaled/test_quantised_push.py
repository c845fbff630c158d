"""Ranks quantise what they yield: in every layout the tensors that travel have the bits of the whole weights quantised.

Blocks of 128 x 128 straddle the shards of this model under tensor parallelism: a matrix of 128 rows has 64 on a rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sandbox.model import MoE
from sandbox.model.checkpoint import save, to_hf
from scaled.config import ModelBlock, PrecisionBlock, TrainingBlock
from scaled.plan.compute import yielded_parameters
from scaled.vllm_engine.quantize import (
    Sent,
    block_fp8,
    channel_int8,
    dequantised,
    is_quantised,
    quantised,
    rounded,
    sent,
)
from scaled.vllm_engine.weights_check import check_weights
from tests.scaled import vllm_world
from tests.scaled.megatron_world import free_ports, in_turn, spawn
from tests.scaled.rank_world import LAYOUTS, algorithm, training
from tests.scaled.test_cluster_buckets import same
from theory.routing.predictor import fold
from theory.streams import stream

PRECISIONS = {
    "fp8_block": PrecisionBlock(weights="fp8_block"),
    "int8": PrecisionBlock(weights="int8", compute="fp16"),
    "same": PrecisionBlock(compute="bf16"),
}
CONFIG = replace(vllm_world.model_config(), num_layers=4)  # two stages of two chunks


def model() -> MoE:
    """All its matrices have widths in multiples of 128."""
    return MoE(CONFIG, stream(0, "quantised-push"))


# -- formats


@pytest.mark.parametrize("weights", PRECISIONS)
def test_the_table_is_that_of_the_tensors(weights: str) -> None:
    """Names, order, shapes and types that an engine expects are those of the tensors that ranks send."""
    precision, shapes, tensors = PRECISIONS[weights], CONFIG.shape().weights(), dict(to_hf(model()))
    table = sent(shapes, precision.weights)
    pushed = dict(quantised(((name, tensors[name]) for name in shapes), precision))
    assert list(pushed) == list(table)
    assert all(tuple(pushed[name].shape) == tuple(one.shape) for name, one in table.items())
    assert all(one.dtype in (None, pushed[name].dtype) for name, one in table.items())
    assert {one.dtype for one in table.values()} == {
        "same": {None},
        "int8": {None, torch.int8, torch.float32},
        "fp8_block": {None, torch.float8_e4m3fn, torch.float32},
    }[weights]
    check_weights(pushed, [], table)


def test_the_selection_bias_keeps_its_bits() -> None:
    """Whatever the precision, a router's bias travels in fp32; gates and norms in the compute type."""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors = {bias: torch.rand(8), "model.layers.0.mlp.gate.weight": torch.rand(8, 128)}
    for precision in PRECISIONS.values():
        pushed = dict(quantised(tensors.items(), precision))
        assert same(pushed[bias], tensors[bias]) and list(pushed) == list(tensors)
        assert pushed["model.layers.0.mlp.gate.weight"].dtype != torch.float32


def test_a_weight_that_was_not_quantised_is_refused() -> None:
    """An engine of int8 weights is not given the training weights: ValueError names the scale and the type."""
    table = sent({"q_proj.weight": (4, 6)}, PRECISIONS["int8"].weights)
    assert table == {"q_proj.weight": Sent((4, 6), torch.int8), "q_proj.weight_scale": Sent((4, 1), torch.float32)}
    with pytest.raises(
        ValueError,
        match=r"missing q_proj.weight_scale; misshapen q_proj.weight .expected \(4, 6\) int8, got \(4, 6\) bfloat16.$",
    ):
        check_weights({"q_proj.weight": torch.zeros(4, 6, dtype=torch.bfloat16)}, [], table)
    turned = {"q_proj.weight": torch.zeros(4, 6, dtype=torch.int8), "q_proj.weight_scale": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"q_proj.weight_scale .expected \(4, 1\) float32, got \(4,\) float32.$"):
        check_weights(turned, [], table)


@pytest.mark.parametrize("weights", ["fp8_block", "int8"])
def test_an_engine_without_kernels_multiplies_out(weights: str) -> None:
    """`rounded` gives each weight once, by its own name and in the compute type, to the bit q s."""
    precision, tensors = PRECISIONS[weights], dict(to_hf(model()))
    quantise = block_fp8 if weights == "fp8_block" else channel_int8
    dtype = torch.bfloat16 if weights == "fp8_block" else torch.float16
    held = dict(rounded(quantised(tensors.items(), precision), precision))
    assert list(held) == list(tensors)
    for name, tensor in tensors.items():
        plain = dequantised(*quantise(tensor)) if is_quantised(name) else tensor
        assert same(held[name], plain.to(dtype)), name


@pytest.mark.parametrize("size", [(128, 64), (130, 128)])
def test_fp8_refuses_what_is_no_multiple_of_a_block(size: tuple[int, int]) -> None:
    """A shard, or any width beside the grid, is ValueError with both widths."""
    with pytest.raises(ValueError, match=rf"expected widths in multiples of 128, got {size[0]} x {size[1]}$"):
        block_fp8(torch.zeros(size))


# -- ranks


def run_layouts(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """On one rank, for each layout: what it yields plain and quantised, and with a predictor in the gates."""
    from scaled.megatron_engine.rank import MegatronRank

    def act(_: str, layout: TrainingBlock) -> dict[str, Any]:
        engine = MegatronRank(ModelBlock(path=str(folder)), layout, algorithm())
        if engine.predictor is not None:
            for number, W_p in engine.predictor.trainer.parameters.items():
                W_p.data.fill_(0.25 * (1 + number))
        return {
            "predictor": {n: w.clone() for n, w in engine.predictor_weights().items()},
            **{key: dict(quantised(engine.export(folded=True), PRECISIONS[key])) for key in PRECISIONS},
        }

    return in_turn(rank, {name: training(2, **fields) for name, fields in LAYOUTS.items()}, ports, act)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model's folder and its weights."""
    folder = tmp_path_factory.mktemp("quantised") / "model"
    save(model(), folder)
    return folder, dict(to_hf(model()))


@pytest.fixture(scope="module")
def ranks(file: tuple[Path, dict[str, Tensor]]) -> list[dict[str, Any]]:
    return spawn(2, run_layouts, file[0], free_ports(len(LAYOUTS)), limit_s=300)


@pytest.mark.parametrize("weights", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_send_the_whole_weights_quantised(
    layout: str, weights: str, ranks: list[dict[str, Any]], file: tuple[Path, dict[str, Tensor]]
) -> None:
    """Two ranks' tensors together are to the bit those of the file's weights, with the predictor in the gates.

    Each is sent once, a weight and its scales by the same rank.
    """
    parts = [rank[layout][weights] for rank in ranks]
    predictor = ranks[0][layout]["predictor"] | ranks[1][layout]["predictor"]
    assert len(predictor) == 3 and all(bool((W_p != 0).all()) for W_p in predictor.values())
    expected = dict(quantised(fold(file[1].items(), predictor, CONFIG.shape().gates), PRECISIONS[weights]))
    assert not parts[0].keys() & parts[1].keys()
    sent_together = parts[0] | parts[1]
    assert sent_together.keys() == expected.keys()
    assert [name for name in expected if not same(sent_together[name], expected[name])] == []
    for part in parts:
        assert {name.rsplit("_scale", 1)[0] for name in part if "_scale" in name} <= part.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_work_as_planned(layout: str, ranks: list[dict[str, Any]]) -> None:
    """Replicas, stages and owners of experts quantise at the same time: the busiest rank has what `plan` counts.

    Within a tenth, as whole weights are shared out. Only where all that is split is split by tensor parallelism the
    first rank of the group has everything; in the other layouts the busier rank has at most two thirds, and with three
    of four layers, one of which is dense, at most three quarters.
    """
    done = [sum(t.numel() for t in rank[layout]["int8"].values() if t.dtype == torch.int8) for rank in ranks]
    block = training(2, **LAYOUTS[layout])
    planned = max(yielded_parameters(CONFIG.shape(), block, stage) for stage in range(block.pipeline_parallel))
    assert max(done) == pytest.approx(planned, rel=0.1)
    assert (max(done) == sum(done)) == (layout == "TP2+ETP2")
    most = 3 / 4 if "3 + 1" in layout else 2 / 3
    assert layout == "TP2+ETP2" or max(done) < most * sum(done), done
