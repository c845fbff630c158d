"""The environment variables of vLLM: general settings before its import, the model runner before every engine."""

from __future__ import annotations

import os
from typing import Literal

from lab.hf import ModelShape
from scaled.config import RolloutBlock

OPTIONS = "firstorder"  # the key of our settings in vLLM's additional_config, and in a request's extra_args
OLMOE_EPS = 1e-5  # written into vLLM's OLMoE

DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # else it warns of the tokenizer that it does not load
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare(rollout: RolloutBlock) -> None:
    """Sets the environment of this process; the engine core must run in it, as routes and weights pass by reference."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if rollout.precision.batch_invariant is not None:
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(rollout.precision.batch_invariant))


def compile_nothing() -> None:
    """Lets torch.compile run functions of vLLM as they are; before the first engine of the process.

    Even an eager engine has one, which counts the ranks of log-probabilities. On a CPU compiling it takes five to nine
    seconds of every process, and saves nothing at sizes that a CPU runs.
    """
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"


def check_model(shape: ModelShape, is_cpu: bool) -> None:
    """Raises ValueError for a model that vLLM would run, but not as its config.json says."""
    if shape.family == "olmoe" and shape.norm_eps != OLMOE_EPS:
        raise ValueError(
            f"config.json: rms_norm_eps: vLLM computes OLMoE with {OLMOE_EPS} whatever the file says, "
            f"got {shape.norm_eps}"
        )
    if shape.family == "olmoe" and shape.gate.renormalise:
        raise ValueError(
            "config.json: norm_topk_prob: vLLM computes OLMoE without renormalising whatever the file says, got true"
        )
    if shape.latent_attention is not None and is_cpu:
        raise ValueError(
            f"config.json: model_type: expected a model without latent attention on a CPU (the log-probs of vLLM 0.32 "
            f"are not transformers' there: 3.7 nats off at the 20th token), got {shape.family}"
        )


def choose_routes(asked: Literal["auto", "official", "capture"]) -> Literal["official", "capture"]:
    """The source of the next engine's routes; sets the environment to the model runner that it needs.

    vLLM's own return path lives in its second model runner, which needs Triton; our capture lives in the first. Raises
    ValueError for `official` where there is no Triton. On a CPU `auto` is `capture`, as there Triton is an interpreter
    at best.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if asked == "official" and not HAS_TRITON:
        raise ValueError(
            f"rollout.routes: official needs a Triton that runs on this platform ({current_platform.device_type}), "
            "got none; use capture"
        )
    is_official = asked == "official" or (asked == "auto" and HAS_TRITON and not current_platform.is_cpu())
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(is_official))
    return "official" if is_official else "capture"
