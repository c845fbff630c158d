"""Laws of a cluster run's export on real Megatron-core ranks: the trainer's own bits, and its log-probs elsewhere.

transformers and vLLM compute the exported model with kernels of their own, so their log-probs are the trainer's to its
precision's rounding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from firstorder.cli import main
from lab.records import RunFolder
from scaled.cluster.probe import allowed
from scaled.config import ModelBlock, PrecisionBlock, ProbeBlock, RolloutBlock, TrainingBlock
from tests.scaled import vllm_world
from tests.scaled.megatron_world import file_tensors, free_ports, in_turn, spawn, tiny_folder
from tests.scaled.rank_world import LAYOUTS, algorithm, batch, merged, on_host, training
from theory.contracts import MiniBatch
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

FP32 = {"precision": "fp32", "distributed_optimizer": True}
BF16 = {"precision": "bf16", "distributed_optimizer": True}
# Sizes that vLLM's kernels take on a CPU; an odd vocabulary has a row that only fills it up under TP2.
WIDE: dict[str, Any] = {
    "vocab_size": 63, "hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128, "intermediate_size": 256,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3 TP2+EP2 fp32": ("qwen3_moe", WIDE, {**LAYOUTS["TP2+EP2"], **FP32}),
    "qwen3 TP2+EP2 bf16": ("qwen3_moe", WIDE, {**LAYOUTS["TP2+EP2"], **BF16}),
    "tied qwen3 PP2+VPP2 fp32": ("qwen3_moe", {"tie_word_embeddings": True}, {**LAYOUTS["PP2+VPP2"], **FP32}),
    "olmoe TP2+ETP2 fp32": ("olmoe", {"vocab_size": 97}, {**LAYOUTS["TP2+ETP2"], **FP32}),
    "deepseek_v3 EP2 fp32": ("deepseek_v3", {}, {**LAYOUTS["EP2"], **FP32}),
    "deepseek_v3 TP2 bf16": ("deepseek_v3", {}, {**LAYOUTS["TP2"], **BF16}),
}


def train(rank: int, root: Path, ports: list[int]) -> dict[str, Any]:
    """On one rank, for every case: one update, a checkpoint, this rank's part of the weights and of log p after it."""
    from scaled.megatron_engine.rank import MegatronRank

    rollouts = batch()

    def act(name: str, layout: TrainingBlock) -> tuple[dict[str, Tensor], Any]:
        engine = MegatronRank(ModelBlock(path=str(root / name / "model")), layout, algorithm("none"))
        natural = RoutingPlan("natural")
        logp_old_BT = torch.full_like(rollouts.padded().logp_mu_BT, -2.0)
        minibatch = MiniBatch(rollouts, logp_old_BT, torch.linspace(-1, 1, len(rollouts)), 0, 1)
        engine.update(minibatch, preset("reinforce"), natural)
        engine.save(root / name / "saved")
        return on_host(engine.export()), engine.score(rollouts, natural)

    return in_turn(rank, {name: training(2, **fields) for name, (_, _, fields) in CASES.items()}, ports, act)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run folder and its export for every case, and what its ranks held."""
    root = tmp_path_factory.mktemp("export")
    for name, (family, changes, _) in CASES.items():
        tiny_folder(root / name / "model", family, **changes)
    ranks = spawn(2, train, root, free_ports(len(CASES)), limit_s=500)
    for name in CASES:
        run = root / name / "run"
        run.mkdir()
        (run / "config.yaml").write_text(config(root / name / "model", name.split(" ")[-1]))
        with RunFolder(run).sharded(1) as to:
            move(root / name / "saved", to)
        assert main(["export", str(run), "--step", "1", "--to", str(root / name / "out")]) == 0
    return root, ranks


def config(model: Path, precision: str) -> str:
    """config.yaml of a run on the cluster."""
    return (
        f"name: tiny\nbackend: scaled\nnum_steps: 1\ntask: {{kind: arithmetic}}\nmodel: {{path: {model}}}\n"
        f"training: {{precision: {precision}, micro_batch_size: 2}}\n"
        "algorithm: {objective: {preset: minirl}, batch: {num_prompts: 4, num_responses: 2}, "
        "sampling: {max_tokens: 8}}\n"
    )


def move(saved: Path, to: Path) -> None:
    """Puts what ranks saved where a run keeps it."""
    for file in list(saved.iterdir()):
        shutil.move(file, to / file.name)


def trainers_logp(ranks: list[dict[str, Any]], name: str) -> Tensor:
    """log p of every response token, by the ranks."""
    from scaled.megatron_engine.parts import assemble_logp

    return assemble_logp([rank[name][1] for rank in ranks])


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_trainers_to_the_bit(name: str, trained) -> None:
    """Every layout's shards give the tensors that its ranks hand to engines, with their types; training moved them."""
    root, ranks = trained
    ours, theirs = file_tensors(root / name / "out"), merged([rank[name][0] for rank in ranks])
    start = file_tensors(root / name / "model")
    assert ours.keys() == theirs.keys() == start.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    moved = [key for key, tensor in start.items() if not torch.equal(tensor.to(ours[key].dtype), ours[key])]
    assert len(moved) > 0.8 * len(start)


def differences(model: Any, ranks: list[dict[str, Any]], name: str) -> Tensor:
    """|log p - the trainer's| of every sampled token of the batch, in nats; transformers computes log p."""
    rollouts = batch()
    logp_BT, mine = trainers_logp(ranks, name), rollouts.padded().is_response_BT
    found = []
    for b, response in enumerate(rollouts.responses):
        ids = torch.cat([torch.tensor(response.prompt.tokens), response.tokens])
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()
        first, T = len(response.prompt.tokens), len(response.tokens)
        logp_T = logits.log_softmax(-1)[first - 1 : -1].gather(1, response.tokens[:, None])[:, 0]
        found.append((logp_T - logp_BT[b, :T])[mine[b, :T]].abs())
    return torch.cat(found)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("fp32")])
def test_transformers_computes_the_trainers_log_probs(name: str, trained) -> None:
    """transformers opens the folder in fp32 and agrees with the trainer's log-probs to fp32's rounding."""
    root, ranks = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(root / name / "out")
    assert model.dtype == torch.float32
    farthest = differences(model, ranks, name).max().item()
    # Measured 3e-7 of the largest |log p| (59 nats with a tied head): a few roundings of the logits.
    assert farthest < 1e-6 * trainers_logp(ranks, name).abs().max().item()


def test_transformers_agrees_in_bf16(trained) -> None:
    """In bf16, where near ties may go to other experts, they agree on average as the run's own probe asks."""
    root, ranks = trained
    name = "qwen3 TP2+EP2 bf16"
    model = transformers.AutoModelForCausalLM.from_pretrained(root / name / "out")
    assert model.dtype == torch.bfloat16
    limit = allowed(ProbeBlock(), PrecisionBlock(), TrainingBlock())
    mean = differences(model, ranks, name).mean().item()
    assert mean < limit


@pytest.mark.filterwarnings(*vllm_world.WARNINGS)
def test_vllm_opens_it(trained) -> None:
    """vLLM reads the folder by itself, tokenizer and all, and scores the same tokens as the trainer."""
    from scaled.vllm_engine import environment

    environment.prepare(RolloutBlock())
    environment.choose_routes("capture")
    from vllm import LLM, SamplingParams

    from scaled.vllm_engine.arguments import CPU_BLOCK

    root, ranks = trained
    name = "qwen3 TP2+EP2 fp32"
    engine = LLM(
        str(root / name / "out"), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=32,
        max_num_seqs=8, kv_cache_memory_bytes=2**24, block_size=CPU_BLOCK, disable_log_stats=True,
    )  # fmt: skip
    rollouts = batch()
    ids = [[*r.prompt.tokens, *r.tokens.tolist()] for r in rollouts.responses]
    options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs: Any = engine.generate([{"prompt_token_ids": one} for one in ids], options, use_tqdm=False)
    logp_BT, mine = trainers_logp(ranks, name), rollouts.padded().is_response_BT
    farthest = 0.0
    for b, (response, output) in enumerate(zip(rollouts.responses, outputs, strict=True)):
        first, T = len(response.prompt.tokens), len(response.tokens)
        found = [output.prompt_logprobs[first + t][ids[b][first + t]].logprob for t in range(T)]
        farthest = max(farthest, (torch.tensor(found) - logp_BT[b, :T])[mine[b, :T]].abs().max().item())
    assert farthest < 1e-6 * logp_BT.abs().max().item()
