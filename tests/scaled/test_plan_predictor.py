"""The plan's memory of a predictor, a reference and their rank is that of real Megatron ranks, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.hf import parse_shape
from sandbox.bench.memory import peak_bytes
from scaled.config import ModelBlock, ScaledRun, TrainingBlock
from scaled.plan.memory import PREDICTOR_STEP, WORKING, resident_memory, training_memory
from scaled.plan.predictor_memory import predictor_step_bytes, step_rows
from tests.scaled.megatron_world import free_ports, in_turn, spawn, tiny_config, tiny_folder
from tests.scaled.plan_world import QWEN, loaded
from tests.scaled.rank_world import algorithm, gradient_bytes, one_minibatch, training
from tests.scaled.saved_activations import batch
from theory.routing.features import draw_rows
from theory.routing.passes import RoutingPlan
from theory.streams import stream

NUM, TOKENS, ROWS = 16, 65, 48
"""Responses of a mini-batch, tokens of each, and its feature rows."""

FEW, MANY = {"num_experts": 32}, {"num_experts": 32, "num_hidden_layers": 16}
CASES: dict[str, tuple[dict[str, Any], TrainingBlock]] = {
    "fp32": (FEW, training()),
    "bf16": (FEW, training(precision="bf16")),
    "bf16, 16 layers": (MANY, training(precision="bf16")),
    "DP2": (FEW, training(2)),
    "TP2": (FEW, training(2, tensor_parallel=2)),
    "CP2": (FEW, training(2, context_parallel=2)),
    "PP2": (FEW, training(2, pipeline_parallel=2)),
}


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(folder: Path, block: TrainingBlock) -> dict[str, int]:
    """Bytes of a rank's parts after two updates with a predictor, and of a step of it."""
    from scaled.megatron_engine.parts import assemble_scores
    from scaled.megatron_engine.rank import MegatronRank

    recipe = algorithm("Pr2", num_prompts=NUM // 2)
    rank = MegatronRank(ModelBlock(path=str(folder)), block, recipe, keep_reference=True)
    rollouts = batch(NUM, TOKENS, 96)
    rows = draw_rows([TOKENS - 1] * NUM, [0] * NUM, ROWS, stream(0, "plan-predictor"))
    plan = RoutingPlan("natural", feature_rows=rows, keep_hidden=True)
    parts = [rank.score(rollouts, plan)]
    kept = Counter[tuple[int, ...]]()
    for route in parts[0].routes:
        assert route.features is not None and route.features.hidden is not None
        # CP cuts a micro-batch into several parts.
        kept[route.indices] += route.features.hidden.nbytes + route.features.logits.nbytes
    if block.num_ranks > 1:
        gathered: list[Any] = [None] * block.num_ranks
        torch.distributed.all_gather_object(gathered, parts[0])
        parts = gathered
    scores = assemble_scores(parts)
    minibatch = one_minibatch(rollouts, scores.logp_BT, features=scores.features)
    assert rank.predictor is not None
    step, peaks = rank.predictor.step, []

    def profiled(*arguments: Any) -> Any:
        answers = []
        peaks.append(peak_bytes(lambda: answers.append(step(*arguments))))
        return answers[0]

    rank.predictor.step = profiled  # type: ignore[method-assign]
    for _ in range(2):
        rank.update(minibatch, recipe.objective, replace(plan, keep_hidden=False))
    trainer = rank.predictor.trainer
    moments = [t for state in trainer.optimizer.state.values() for t in state.values()]
    return {
        "weights": storages(p for chunk in rank.policy.chunks for p in chunk.parameters()),
        "gradients, fp32": gradient_bytes(rank),
        "reference weights": storages(p for chunk in rank.reference.chunks for p in chunk.parameters()),
        "predictor and its optimizer": storages([*trainer.parameters.values(), *moments]),
        "features of a micro-batch": max(kept.values()),
        "step": peaks[-1],
    }


def ranks_of(rank: int, folders: dict[str, Path], worlds: dict[str, TrainingBlock], ports: list[int]) -> Any:
    """As this rank of each world in turn."""
    return in_turn(rank, worlds, ports, lambda name, block: measure(folders[name], block))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """By case, what each rank has."""
    root = tmp_path_factory.mktemp("predictor")
    folders = {name: tiny_folder(root / name.replace(" ", "-"), **fields) for name, (fields, _) in CASES.items()}
    found: dict[str, list[dict[str, int]]] = {}
    for size in (1, 2):
        worlds = {name: block for name, (_, block) in CASES.items() if block.num_ranks == size}
        ranks = spawn(size, ranks_of, folders, worlds, free_ports(len(worlds)), limit_s=300)
        found |= {name: [rank[name] for rank in ranks] for name in worlds}
    return found


def config_of(block: TrainingBlock, num_minibatches: int = 1) -> ScaledRun:
    """A recipe with Pr2 and a KL penalty, of mini-batches of this size."""
    words = (
        "--algorithm.objective.kl_coefficient", "0.001", "--algorithm.batch.num_minibatches", str(num_minibatches),
        "--algorithm.batch.num_prompts", str(num_minibatches * NUM // 2), "--algorithm.batch.num_responses", "2",
        "--algorithm.replay.mode", "Pr2", "--algorithm.replay.predictor.num_positions", str(ROWS),
    )  # fmt: skip
    return loaded("qwen3_30b_a3b", *words).model_copy(update={"training": block})


@pytest.mark.parametrize("name", CASES)
def test_a_ranks_parts_are_as_planned(name: str, measured: dict[str, list[dict[str, int]]]) -> None:
    """Weights, gradients and the reference's weights of each rank are the plan's to 1%; so are W_p and AdamW's moments,
    without the gradient of a step."""
    fields, block = CASES[name]
    shape = parse_shape(tiny_config(**fields))
    for number, rank in enumerate(measured[name]):
        plan = training_memory(config_of(block), shape, number if block.pipeline_parallel > 1 else 0).parts
        for part in ("weights", "gradients, fp32", "reference weights"):
            assert rank[part] == pytest.approx(plan[part], rel=0.01), part
        held = plan["predictor and its optimizer"] * 12 / 16
        assert rank["predictor and its optimizer"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batchs_features_are_as_planned(name: str, measured: dict[str, list[dict[str, int]]]) -> None:
    """The features that a rank keeps of a micro-batch have the plan's bytes to 10%; TP and CP split the rows."""
    fields, block = CASES[name]
    part, shape = "features of a micro-batch", parse_shape(tiny_config(**fields))
    planned = [
        training_memory(config_of(block), shape, number if block.pipeline_parallel > 1 else 0).parts[part]
        for number in range(block.num_ranks)
    ]
    assert sum(rank[part] for rank in measured[name]) == pytest.approx(sum(planned), rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_a_predictors_step_is_as_planned(name: str, measured: dict[str, list[dict[str, int]]]) -> None:
    """The most bytes that a predictor's step has at a time are the plan's to 10%, with the gradient of W_p; ranks that
    share responses together, as a rank has the rows of its own positions."""
    fields, block = CASES[name]
    shape = parse_shape(tiny_config(**fields))
    planned = sum(
        predictor_step_bytes(config_of(block, 2), shape, number if block.pipeline_parallel > 1 else 0)
        for number in range(block.num_ranks)
    )
    assert sum(rank["step"] for rank in measured[name]) == pytest.approx(planned, rel=0.1)


def test_the_larger_of_pass_and_predictors_step_counts() -> None:
    """A micro-batch's memory is free when a predictor learns, so that the plan counts the larger of both, and neither
    while engines use the GPU. With one mini-batch no predictor learns."""
    brief = (
        "--rollout.max_model_len", "2048", "--algorithm.sampling.max_tokens", "1024",
        "--training.max_tokens_per_micro_batch", "2048",
    )  # fmt: skip
    long, short = loaded("pr2/qwen3_off2"), loaded("pr2/qwen3_off2", *brief)
    parts, other = training_memory(short, QWEN, 0).parts, training_memory(long, QWEN, 0).parts
    assert sum(parts.get(name, 0) for name in (*WORKING, PREDICTOR_STEP)) == predictor_step_bytes(short, QWEN, 0)
    assert PREDICTOR_STEP not in other
    assert not {*WORKING, PREDICTOR_STEP} & {*resident_memory(short, QWEN).parts}
    single = loaded("pr2/qwen3_off2", "--algorithm.batch.num_minibatches", "1")
    assert predictor_step_bytes(single, QWEN, 0) == 0


def test_a_step_of_many_rows_has_the_memory_of_a_block() -> None:
    """Up to a block (2,730 rows of Qwen3-30B) memory grows with the rows; beyond, one more gradient of W_p is all."""
    rows = ("16", "32", "2048")
    few, more, many = (loaded("pr2/qwen3_off2", "--algorithm.replay.predictor.num_positions", T_c) for T_c in rows)
    assert [step_rows(one) for one in (few, more, many)] == [256, 512, 32_768]
    of_row = predictor_step_bytes(few, QWEN, 0) / 256
    assert predictor_step_bytes(more, QWEN, 0) == 512 * of_row
    assert predictor_step_bytes(many, QWEN, 0) == 2730 * of_row + 4 * 48 * 2048 * 128
