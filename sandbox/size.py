"""A lower bound on the memory of a run, from its config alone; a run that cannot fit is refused before it allocates."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lab.strict import ConfigError
from sandbox.config import SandboxRun
from sandbox.model.config import ModelConfig

COPIES = 6
"""float32 numbers per weight: itself, its gradient, Adam's two moments, the copies of the rollout and exact engines."""
BOOKKEEPING = 1_000
"""Bytes per response besides its tensors."""


def check_memory(config: SandboxRun, model: ModelConfig) -> None:
    """Raises ConfigError, with the estimate and the fields behind it, if it exceeds this machine's memory."""
    sampling, batch = config.algorithm.sampling, config.algorithm.batch
    evaluated = config.evaluation.num_problems(config.task.count_held_out()) * config.evaluation.num_samples
    num_responses = max(batch.num_prompts * batch.num_responses, evaluated)
    weights = 4 * COPIES * num_weights(model)
    cache = 4 * sampling.max_tokens * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    rollout = num_responses * (cache + 4 * model.vocab_size + BOOKKEEPING)
    there = memory_bytes()
    if weights + rollout > there:
        raise ConfigError(
            f"expected a run that fits into {_size(there)} of memory, got one of at least {_size(weights + rollout)}: "
            f"{_size(weights)} for model.* ({num_weights(model):.3g} weights), {_size(rollout)} for {num_responses:,} "
            f"responses (algorithm.batch, evaluation) of {sampling.max_tokens:,} tokens (algorithm.sampling.max_tokens)"
        )


def num_weights(model: ModelConfig) -> int:
    """The number of weights in embeddings, attention, MLPs and routers; norms are not counted."""
    D, heads = model.hidden_size, model.num_heads * model.head_dim
    attention = D * (2 * heads + 2 * model.num_kv_heads * model.head_dim)
    num_moe = len(model.moe_layers)
    moe = model.num_experts * (3 * D * model.expert_size + D) + 3 * D * model.shared_expert_size
    dense = (model.num_layers - num_moe) * 3 * D * model.dense_size
    embeddings = model.vocab_size * D * (1 if model.tied_head else 2)
    return embeddings + model.num_layers * attention + num_moe * moe + dense


def memory_bytes() -> int:
    """Bytes of memory of the machine, or of the container if less; sys.maxsize where the system does not report it."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # sysconf reports the host's memory inside a container too; cgroup v2 has the container's limit.
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(there, int(text)) if text.isdigit() else there


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes < 1e15 else f"{num_bytes / 1e9:.3g} GB"


__all__ = ["check_memory", "memory_bytes", "num_weights"]
