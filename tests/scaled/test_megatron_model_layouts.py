"""Laws of the model: whole and split it computes transformers' logits and gradients, and gives back the file's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scaled.config import TrainingBlock
from scaled.model_shape import load_shape
from tests.scaled.megatron_world import file_tensors, free_ports, in_turn, spawn, tiny_folder
from tests.scaled.rank_world import LAYOUTS
from theory.streams import stream

ONE: dict[str, dict[str, Any]] = {"1": {}}
TWO = {name: LAYOUTS[name] for name in ("TP2", "TP2+EP2", "CP2", "PP2", "PP2+VPP2")}
FOUR: dict[str, dict[str, Any]] = {
    "TP2+PP2+EP2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
}
WORLDS = ((1, ONE), (2, TWO), (4, FOUR))
# Trained on 8 positions and run on 16, with a ramp over some dimensions and scales that are not their defaults.
STRETCH: dict[str, Any] = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 1.5, "beta_slow": 0.1,
}  # fmt: skip
YARN = {"rope_parameters": None, "rope_scaling": STRETCH | {"mscale": 0.7, "mscale_all_dim": 1.3}}
# A vocabulary of 97 needs one padding row under TP2.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", {"mlp_only_layers": [1], "vocab_size": 97}),
    "olmoe": ("olmoe", {}),
    "moonlight": ("deepseek_v3", {}),
    "tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "lite": ("deepseek_v2", {}),
    "yarn qwen3": ("qwen3_moe", {"rope_parameters": STRETCH | {"truncate": False, "rope_theta": 1e4}}),
    "yarn lite": ("deepseek_v2", YARN),
    "yarn": ("deepseek_v3", YARN | {"q_lora_rank": 16}),
    "grouped": ("deepseek_v3", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 16}),
}
# The layouts where a family's own modules are split. That every layout agrees with one rank is the law of
# test_megatron_layouts_agree.py.
CASES = [("qwen3", name) for name in ("1", "TP2", "TP2+PP2+EP2")]
CASES += [(family, name) for family in ("olmoe", "moonlight", "tied", "lite") for name in ("1", "TP2")]
CASES += [("moonlight", name) for name in ("TP2+EP2", "PP2", "CP2")]
CASES += [("yarn", name) for name in ("1", "TP2", "PP2", "CP2")]
CASES += [("yarn lite", "1"), ("yarn qwen3", "1"), ("yarn qwen3", "CP2")]
CASES += [("tied", "PP2"), ("tied", "PP2+VPP2"), ("grouped", "1")]
B, S, NUM_MICRO = 4, 16, 2


Ran = Callable[[str, str], list[Any]]


def _num_ranks(layout: str) -> int:
    return next(number for number, layouts in WORLDS if layout in layouts)


def _tokens(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (B, S), generator=stream(3, "tokens"))


def _cotangent(vocab_size: int) -> Tensor:
    return torch.randn(B, S, vocab_size, generator=stream(3, "cotangent"))


def run_layouts(
    rank: int, folders: dict[str, Path], cases: list[tuple[str, str, dict[str, Any]]], ports: list[int]
) -> Any:
    """On one rank, for each case: logits, gradients, exported weights, and how often each name was yielded."""
    worlds = {
        (family, name): TrainingBlock(num_ranks=_num_ranks(name), precision="fp32", timeout_s=600, **fields)
        for family, name, fields in cases
    }
    return in_turn(rank, worlds, ports, lambda key, training: _run_one(folders[key[0]], training))


def _run_one(folder: Path, training: TrainingBlock) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.model import build_model
    from scaled.megatron_engine.weights import export_hf, load_hf

    shape = load_shape(folder)
    layout = parallel.layout(training, shape.num_layers)
    chunks = build_model(shape, training)
    load_hf(chunks, shape, layout, folder)
    wrap = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model = [
        DistributedDataParallel(chunk.config, wrap, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    num_own = B // layout.dp_size
    own = slice(layout.dp_rank * num_own, (layout.dp_rank + 1) * num_own)
    tokens_BS, cotangent_BSV = _tokens(shape.vocab_size)[own], _cotangent(shape.vocab_size)[own]
    rows = -(-shape.vocab_size // layout.tp_size)
    cotangent_BSV = torch.nn.functional.pad(cotangent_BSV, (0, rows * layout.tp_size - shape.vocab_size))
    cotangent_BSV = cotangent_BSV[..., layout.tp_rank * rows :][..., :rows]
    here = torch.cat([torch.arange(run.start, run.stop) for run in layout.context_runs(S)])
    tokens_BS, cotangent_BSV = tokens_BS[:, here], cotangent_BSV[:, here]
    size = num_own // NUM_MICRO

    def forward_step(numbers: Any, chunk: Any) -> Any:
        part = slice(next(numbers) * size, None)
        ids_BS, weight_BSV = tokens_BS[part][:size], cotangent_BSV[part][:size]
        logits_BSV = chunk(ids_BS, here.expand(size, len(here)), None)
        # Megatron divides by micro-batches and multiplies by CP; its data-parallel wrapper divides by CP x DP.
        scale = NUM_MICRO * layout.dp_size

        def loss(output: Tensor) -> Any:
            return (output * weight_BSV).sum() * scale, {"logits": output.detach()}

        return logits_BSV, loss

    feeds = [iter(range(NUM_MICRO)) for _ in model]
    many = len(model) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feeds if many else feeds[0],
        model=model if many else model[0],  # type: ignore[arg-type]
        num_microbatches=NUM_MICRO,
        seq_length=S,
        micro_batch_size=size,
        forward_only=False,
    )
    finalize_model_grads(model)  # type: ignore[arg-type]
    exported = list(export_hf(model, shape, layout))
    gradients = dict(export_hf(model, shape, layout, tensors=attrgetter("main_grad")))
    return {
        "logits": torch.cat([one["logits"] for one in outputs]) if outputs else None,
        "place": (layout.dp_rank, layout.cp_rank, layout.tp_rank),
        "positions": here,
        "exported": [name for name, _ in exported],
        "weights": dict(exported),
        "gradients": gradients,
        "sizes": [sum(p.numel() for p in chunk.parameters()) for chunk in chunks],
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {name: tiny_folder(root / name, family, **changes) for name, (family, changes) in FAMILIES.items()}


@pytest.fixture(scope="module")
def ran(folders: dict[str, Path]) -> Ran:
    """The ranks' results of a case; processes are started once for each number of ranks, when first asked for."""

    @functools.cache
    def world(num_ranks: int) -> list[Any]:
        layouts = dict(WORLDS)[num_ranks]
        cases = [(family, name, layouts[name]) for family, name in CASES if name in layouts]
        return spawn(num_ranks, run_layouts, folders, cases, free_ports(len(cases)), limit_s=600)

    return lambda family, layout: [rank[family, layout] for rank in world(_num_ranks(layout))]


def _reference(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' logits, and the gradients of sum(logits * cotangent) under the names of the file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    logits_BSV = model(_tokens(model.config.vocab_size)).logits
    (logits_BSV * _cotangent(model.config.vocab_size)).sum().backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                prefix = name.removesuffix("gate_up_proj") + str(expert)
                gradients[f"{prefix}.gate_proj.weight"], gradients[f"{prefix}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            gradients |= {f"{prefix}.{expert}.down_proj.weight": one for expert, one in enumerate(parameter.grad)}
        else:
            gradients[name] = parameter.grad
    return logits_BSV.detach(), gradients


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {family: _reference(folder) for family, folder in folders.items()}


def _logits(ranks: list[Any], vocab_size: int) -> Tensor:
    """The ranks' logits put together: tensor-parallel ranks by vocabulary, context-parallel ranks by positions,
    data-parallel ranks by responses.
    """
    placed = {rank["place"]: rank["logits"] for rank in ranks if rank["logits"] is not None}
    dps, cps, tps = (sorted(set(numbers)) for numbers in zip(*placed, strict=True))
    positions = {rank["place"][1]: rank["positions"] for rank in ranks}
    order_S = torch.cat([positions[cp] for cp in cps]).argsort()
    whole = [torch.cat([torch.cat([placed[dp, cp, tp] for tp in tps], -1) for cp in cps], 1)[:, order_S] for dp in dps]
    return torch.cat(whole)[..., :vocab_size]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_are_those_of_transformers(family: str, layout: str, ran: Ran, references: Any) -> None:
    """Logits equal transformers' to fp32 rounding (measured 4.5e-6 of their spread; margin 4)."""
    expected_BSV, _ = references[family]
    logits_BSV = _logits(ran(family, layout), expected_BSV.shape[-1])
    assert (logits_BSV - expected_BSV).abs().max() < 2e-5 * expected_BSV.std()


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradients_are_those_of_transformers(family: str, layout: str, ran: Ran, references: Any) -> None:
    """Each exported gradient is transformers' (measured 4e-6 of its norm; margin 5)."""
    _, expected = references[family]
    gradients = {name: tensor for rank in ran(family, layout) for name, tensor in rank["gradients"].items()}
    assert gradients.keys() == expected.keys()
    worst = max(((gradients[n] - g).norm() / g.norm()).item() for n, g in expected.items() if g.norm() > 0)
    assert all(not gradients[n].any() for n, g in expected.items() if not g.any())
    assert worst < 2e-5


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_export_gives_back_the_bits_of_the_file(family: str, layout: str, ran: Ran, folders: dict[str, Path]) -> None:
    """Exported weights are bit-equal to the file's, and every name comes from exactly one rank, once."""
    file = file_tensors(folders[family])
    names = [name for rank in ran(family, layout) for name in rank["exported"]]
    assert sorted(names) == sorted(file)
    for rank in ran(family, layout):
        assert all(torch.equal(tensor, file[name]) for name, tensor in rank["weights"].items())
