"""The arguments of vLLM's engine core that our rollouts need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaled.config import RolloutBlock
from scaled.vllm_engine import quantize
from scaled.vllm_engine.environment import OPTIONS

CPU_BLOCK = 32  # the smallest cache block of vLLM's CPU attention: the finest prefixes that can be shared


def engine_arguments(
    folder: Path, rollout: RolloutBlock, *, is_official: bool, has_graph_features: bool, is_cpu: bool
) -> dict[str, Any]:
    """The fields of vLLM's EngineArgs for the model whose config.json is in the folder.

    `is_official` takes routes by vLLM's own path; `has_graph_features` captures features in CUDA graphs.
    """
    options = {"capture": not is_official, "features": has_graph_features}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(quantize.DTYPES[rollout.precision.compute]).removeprefix("torch."),
        "kv_cache_dtype": "auto" if rollout.precision.kv_cache == "same" else "fp8",
        "logprobs_mode": "processed_logprobs",  # the default, raw_logprobs, is before temperature
        "max_logprobs": -1,  # no cap: the objective says how many of mu's likeliest tokens are recorded
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        # vLLM returns routes only with its prefix cache; requests can skip reading it.
        "enable_prefix_caching": rollout.prefix_caching or is_official,
        "enforce_eager": rollout.enforce_eager,
        # vLLM's default on a GPU leaves a step in flight after the last response, and a push, which resets the
        # prefix cache, then fails.
        "async_scheduling": False,
        "worker_cls": "scaled.vllm_engine.worker.RolloutWorker",
        "additional_config": {OPTIONS: options},
        "disable_log_stats": True,
        "seed": 0,  # of vLLM's own generators, which no request of ours draws from
    }
    if rollout.tensor_parallel > 1:
        # In an actor's placement group vLLM would take Ray, which wants a bundle for every GPU: ours hold several.
        arguments["distributed_executor_backend"] = "mp"
    if is_official:
        arguments["enable_return_routed_experts"] = True
    if is_cpu:
        arguments |= {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30), "block_size": CPU_BLOCK}
    else:
        arguments |= {"gpu_memory_utilization": rollout.gpu_memory_utilization, "enable_sleep_mode": True}
    return arguments
