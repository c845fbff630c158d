"""The world of the vLLM tests: a Qwen3-MoE as small as vLLM's CPU kernels take, and engines that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sandbox.model import MoE
from sandbox.model.checkpoint import save, to_hf
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from scaled.config import PrecisionBlock, RolloutBlock
from scaled.vllm_engine.engine import VllmEngine
from scaled.vllm_engine.quantize import quantised
from theory.algorithm import OptimizerSettings
from theory.contracts import Prompt, Rollouts, TokenScores
from theory.routing.passes import RoutingPlan
from theory.streams import stream

VOCABULARY = 64
STOP = 1

# Raised inside vLLM and torch while vLLM starts; neither is called by us.
WARNINGS = [
    "ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning",
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
]


SMALL: dict[str, Any] = {
    "precision": PrecisionBlock(compute="fp32"), "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64,
    "kv_cache_gib": 0.05,
}  # fmt: skip
"""Fields of an engine in which prompts of 70 tokens take more than one step."""


def model_config(dense_layers: tuple[int, ...] = (1,)) -> ModelConfig:
    """Three layers, the middle one dense, so that an expert's layer number is not its place among MoE layers."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        num_experts=8,
        experts_per_token=2,
        expert_size=128,
        dense_size=256,
        dense_layers=dense_layers,
    )


def model(seed: int = 0, dense_layers: tuple[int, ...] = (1,)) -> MoE:
    """A fresh model whose weights depend on the seed alone."""
    return MoE(model_config(dense_layers), stream(seed, "vllm-model"))


def engine(
    weights: MoE,
    folder: Path,
    precision: PrecisionBlock | None = None,
    stop_tokens: Sequence[int] = (STOP,),
    **rollout: Any,
) -> VllmEngine:
    """A vLLM engine that holds the model's weights as version 0; float32 unless `precision` says else.

    `folder` gets the model's config.json. The engine must be closed before another is made in this process.
    """
    save(weights, folder)
    block = RolloutBlock(**SMALL | ({} if precision is None else {"precision": precision}) | rollout)
    made = VllmEngine(folder, block, stop_tokens)
    made.load_weights(quantised(to_hf(weights), block.precision), version=0)
    return made


@contextmanager
def loading(is_stopped: bool = False) -> Iterator[dict[str, int]]:
    """Bytes of the parameters and buffers that vLLM makes for a model inside the block, by name.

    Before its CPU kernels pack dense weights into memory of their own. `is_stopped`: the start goes no further, with
    a RuntimeError.
    """
    from vllm.model_executor.model_loader import base_loader

    found: dict[str, int] = {}
    process = base_loader.process_weights_after_loading

    def noted(made: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        found.update({name: t.nbytes for name, t in [*made.named_parameters(), *made.named_buffers()]})
        if is_stopped:
            raise RuntimeError("stopped")
        process(made, *arguments, **options)

    base_loader.process_weights_after_loading = noted
    try:
        yield found
    finally:
        base_loader.process_weights_after_loading = process


def prompts(lengths: tuple[int, ...] = (3, 9, 5, 1, 100, 70), seed: int = 0) -> list[Prompt]:
    """Prompts within one cache block and over several, within one engine step and over several."""
    draws = stream(seed, "vllm-prompts")
    return [
        Prompt(str(i), tuple(torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()), "")
        for i, length in enumerate(lengths)
    ]


def trainer_scores(weights: MoE, rollouts: Rollouts, rows: tuple[torch.Tensor, ...] | None = None) -> TokenScores:
    """The sandbox training engine's naturally routed scores of the rollouts, with features on `rows`."""
    trainer = SandboxTrainingEngine(weights, OptimizerSettings(learning_rate=1e-3))
    return trainer.score(rollouts, RoutingPlan("natural", feature_rows=rows, keep_hidden=rows is not None))


def abs_diff(weights: MoE, rollouts: Rollouts) -> torch.Tensor:
    """|logp_mu - logp_old| of every sampled token, in nats."""
    batch = rollouts.padded()
    diff_BT = (trainer_scores(weights, rollouts).logp_BT - batch.logp_mu_BT).abs()
    return diff_BT[batch.is_response_BT]
