"""The plan's activations are those that Megatron-core's layers save: whole models and single layers, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from lab.hf import ModelShape, parse_shape
from scaled.config import TrainingBlock
from scaled.plan import memory
from tests.scaled.megatron_world import free_ports, spawn, tiny_config, tiny_folder
from tests.scaled.rank_world import training
from tests.scaled.saved_activations import measure_rank

NUM, TOKENS = 4, 65
"""Responses, and tokens of each: two micro-batches of two responses at 64 positions."""

# A width that is no multiple of the experts': a token of a slot and its gate have different sizes.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "olmoe": {"num_key_value_heads": 4},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
WIDTH = {"hidden_size": 96, "max_position_embeddings": 128}
MODES = ("none", "selective", "full")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "TP2+ETP2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "EP2": {"expert_parallel": 2},
    "CP2": {"context_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
}
CASES: dict[str, tuple[str, TrainingBlock]] = {
    **{f"{family}, {mode}": (family, training(recompute=mode)) for family in CHANGES for mode in MODES},
    **{name: ("qwen3_moe", training(2, **fields)) for name, fields in LAYOUTS.items()},
    "TP2+ETP2, selective": ("qwen3_moe", training(2, recompute="selective", **LAYOUTS["TP2+ETP2"])),
}


def shape_of(family: str) -> ModelShape:
    """The tiny model of a family."""
    return parse_shape(tiny_config(family, **WIDTH, **CHANGES[family]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, list[int]]]]:
    """By case and rank: the most bytes that were saved at a time, and those of each layer's forward."""
    root = tmp_path_factory.mktemp("activations")
    models = {family: tiny_folder(root / family, family, **WIDTH, **changes) for family, changes in CHANGES.items()}
    found = {}
    for size in (1, 2):
        worlds = {name: block for name, (_, block) in CASES.items() if block.num_ranks == size}
        folders = {name: models[CASES[name][0]] for name in worlds}
        ranks = spawn(size, measure_rank, folders, worlds, free_ports(len(worlds)), NUM, TOKENS, limit_s=300)
        found |= {name: [rank[name] for rank in ranks] for name in worlds}
    return found


def planned(name: str, stage: int) -> int:
    """The plan's bytes of a rank of this stage."""
    family, block = CASES[name]
    responses = NUM // block.data_parallel
    return memory.activation_bytes(shape_of(family), block, stage, TOKENS - 1, responses // block.micro_batch_size)


@pytest.mark.parametrize("name", CASES)
def test_a_models_activations_are_as_planned(name, measured):
    """The most bytes that layers have saved at a time are within 2% of the plan's, in every layout and mode.

    Ranks together, but for stages: the plan spreads tokens evenly over experts. What 2% leaves is a norm's statistics.
    """
    _, block = CASES[name]
    peaks = [peak for peak, _ in measured[name]]
    if block.pipeline_parallel > 1:
        assert peaks == [pytest.approx(planned(name, stage), rel=0.02) for stage in range(len(peaks))]
    else:
        assert sum(peaks) == pytest.approx(len(peaks) * planned(name, 0), rel=0.02)


@pytest.mark.parametrize("name", [name for name, (_, block) in CASES.items() if block.num_ranks == 1])
def test_a_layers_activations_are_as_planned(name, measured):
    """Each layer's forward saves what the plan says that it keeps, within 2%; under full recompute its input alone."""
    family, block = CASES[name]
    shape, positions = shape_of(family), TOKENS - 1
    ((_, layers),) = measured[name]
    rotary = 0 if block.recompute == "full" else memory.rotary_activations(shape, 4) * positions
    for number, found in enumerate(layers[: shape.num_layers]):
        kept = memory.kept_activations(shape, number, block)[0] * positions * block.micro_batch_size + rotary
        # A full recompute's input is saved by the block around the layer.
        assert found == (0 if block.recompute == "full" else pytest.approx(kept, rel=0.02)), number
