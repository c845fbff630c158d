"""The conditions of a run that its config and its model's shape decide, for a plan and for the run itself alike."""

from __future__ import annotations

from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.plan.engine_memory import bucket_bytes, engine_weights


def check_settings(config: ScaledRun, shape: ModelShape) -> None:
    """Raises ConfigError, naming the field, for the first setting that the others or the model rule out."""
    check_batch(config)
    check_lengths(config, shape)
    check_engine_step(config)
    check_object_store(config, shape)
    # Less, not at most: vLLM scores a sequence as a prompt, and must sample one token after it.
    if config.probe.num_tokens >= config.rollout.max_model_len:
        raise ConfigError(
            f"probe.num_tokens: expected less than rollout.max_model_len = {config.rollout.max_model_len}, got "
            f"{config.probe.num_tokens}"
        )
    if config.cluster.placement == "colocated" and config.schedule.steps_off > 0:
        raise ConfigError(
            f"schedule.steps_off: expected 0 where cluster.placement is colocated, got {config.schedule.steps_off}"
        )


MOST_RESPONSES = 10**6
"""Responses of a step, or of an evaluation, whose lengths a plan lists one by one."""


def check_batch(config: ScaledRun) -> None:
    """Raises ConfigError for more responses than MOST_RESPONSES."""
    batch, over = config.algorithm.batch, config.algorithm.oversampling
    drawn = (batch.num_prompts + (0 if over is None else over.extra_prompts)) * batch.num_responses
    if drawn > MOST_RESPONSES:
        raise ConfigError(f"algorithm.batch: expected at most {MOST_RESPONSES:,} responses, got {drawn:,}")
    prompts, samples = evaluated_prompts(config), config.evaluation.num_samples
    if prompts * samples > MOST_RESPONSES:
        source = "" if _num_held_out(config) is not None else ", max_prompts, as a plan reads no problem file"
        raise ConfigError(
            f"evaluation: expected at most {MOST_RESPONSES:,} responses, got {prompts * samples:,} ({samples:,} of "
            f"each of {prompts:,} problems{source})"
        )


def evaluated_prompts(config: ScaledRun) -> int:
    """Problems of an evaluation; `max_prompts`, thus at most so many, where they come from a file.

    A plan reads none: it is made where the file may not be, and each layout of a search would read it again.
    """
    return config.evaluation.num_problems(_num_held_out(config))


def _num_held_out(config: ScaledRun) -> int | None:
    return getattr(config.task, "num_held_out", None)


def check_lengths(config: ScaledRun, shape: ModelShape) -> None:
    """Raises ConfigError where sequences are longer than the model's positions or than an engine's."""
    longest, sampling = config.rollout.max_model_len, config.algorithm.sampling
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_model_len: expected at most the model's {shape.max_positions} positions, got {longest}"
        )
    prompt = getattr(config.task, "max_prompt_tokens", None)
    if prompt is not None and prompt + sampling.max_tokens > longest:
        need = prompt + sampling.max_tokens
        raise ConfigError(
            f"rollout.max_model_len: expected at least task.max_prompt_tokens + algorithm.sampling.max_tokens = "
            f"{prompt} + {sampling.max_tokens} = {need}, got {longest}"
        )


def check_engine_step(config: ScaledRun) -> None:
    """Raises ConfigError where an engine step cannot hold a token of every sequence, which vLLM refuses."""
    tokens, sequences = config.rollout.max_num_batched_tokens, config.rollout.max_num_seqs
    if tokens < sequences:
        raise ConfigError(
            f"rollout.max_num_batched_tokens: expected at least rollout.max_num_seqs = {sequences}, got {tokens}"
        )


def check_object_store(config: ScaledRun, shape: ModelShape) -> None:
    """ConfigError where a store of our own cannot hold two buckets of weights, one leaving ranks, one entering engines,
    or where it is larger than the machine's memory.

    A bucket has `engine_memory.bucket_bytes`.
    """
    # A cluster that runs already has its own store, of a size that no config states.
    if config.cluster.address is not None:
        return
    bucket = bucket_bytes(config, shape)
    needed, has = 2 * bucket / 2**30, config.cluster.object_store_gib
    if needed > has:
        raise ConfigError(
            f"cluster.object_store_gib: expected at least {needed:.3g} for two buckets of weights of "
            f"{bucket / 2**20:.4g} MiB (cluster.bucket_mib, or the largest weight), got {has:g}"
        )
    # Ray refuses to start with a store above 10 GB that /dev/shm cannot hold; by default that is half of the memory.
    if config.cluster.host_gib is not None and has > config.cluster.host_gib:
        raise ConfigError(
            f"cluster.object_store_gib: expected at most cluster.host_gib = {config.cluster.host_gib:g}, in whose "
            f"memory Ray keeps the store (/dev/shm), got {has:g}"
        )


def spilling(config: ScaledRun, shape: ModelShape) -> str | None:
    """A line that says so where the weights of a push alone exceed a store of our own; else None.

    `firstorder plan` counts all that lies in the store; a run says what is certain.
    """
    needed, has = engine_weights(config, shape) / 2**30, config.cluster.object_store_gib
    if config.cluster.address is not None or needed <= has:
        return None
    return (
        f"cluster.object_store_gib: expected at least {needed:.3g} for the weights of a push, got {has:g}: Ray writes "
        f"the rest to disk, and pushes take many times as long"
    )


__all__ = [
    "check_batch", "check_engine_step", "check_lengths", "check_object_store", "check_settings", "evaluated_prompts",
    "spilling",
]  # fmt: skip
