"""Whether a layout divides the model, the batch and the cluster, by the divisors that Megatron-core and vLLM require.

Each refusal is a line with the field, both numbers and the values that serve.
"""

from __future__ import annotations

import contextlib

from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.megatron_engine.parallel import check_layout
from scaled.units import unit_of
from scaled.vllm_engine.quantize import check_precision


def check_divides(config: ScaledRun, shape: ModelShape) -> None:
    """Raises ConfigError for the first parallel size that the model or the batch cannot be split by."""
    training, rollout = config.training, config.rollout
    try:
        check_layout(shape, training)
    except ValueError as error:
        raise ConfigError(f"{error}{_sizes_that_divide(config, shape, str(error))}") from None
    if shape.num_heads % rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel: expected a divisor of {shape.num_heads} attention heads, got "
            f"{rollout.tensor_parallel}; it may be {', '.join(map(str, divisors(shape.num_heads)))}"
        )
    _check_precision(config, shape)


def _sizes_that_divide(config: ScaledRun, shape: ModelShape, message: str) -> str:
    """The sizes up to 64 of the field in the message that divide the model, as a clause."""
    # The message may name a product (pipeline_parallel x virtual_pipeline): its first factor is varied.
    field = message.split(":")[0].split(" ")[0].removeprefix("training.")
    if field not in type(config.training).model_fields:
        return ""
    fits = []
    for size in range(1, 65):
        try:
            # model_copy does not validate: the model's divisors are asked for here, whatever num_ranks is.
            check_layout(shape, config.training.model_copy(update={field: size}))
            fits.append(str(size))
        except ValueError:
            continue
    return f"; it may be {', '.join(fits)}" if fits else ""


def _check_precision(config: ScaledRun, shape: ModelShape) -> None:
    """Raises ConfigError, with the tensor-parallel sizes that serve, where vLLM's kernels on GPUs refuse a format."""
    rollout = config.rollout
    try:
        check_precision(shape, rollout, "native", is_cpu=False)
    except ValueError as error:
        fits = []
        for size in divisors(shape.num_heads):
            with contextlib.suppress(ValueError):
                check_precision(shape, rollout.model_copy(update={"tensor_parallel": size}), "native", is_cpu=False)
                fits.append(str(size))
        way = f"; rollout.tensor_parallel may be {', '.join(fits)}" if fits else ""
        raise ConfigError(f"{error}{way}") from None


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def gpus_needed(config: ScaledRun) -> int:
    """GPUs of all ranks and engines: their sum on GPUs of their own, the larger of both where they take turns."""
    ranks = config.training.num_ranks
    engines = config.rollout.num_engines * config.rollout.tensor_parallel
    return max(ranks, engines) if config.cluster.placement == "colocated" else ranks + engines


def check_places(config: ScaledRun) -> None:
    """Raises ConfigError where the cluster has too few GPUs, or where one engine would span two machines."""
    cluster, need = config.cluster, gpus_needed(config)
    have = cluster.num_nodes * cluster.gpus_per_node
    config.require_shared_gpus()
    if need > have:
        raise ConfigError(
            f"cluster.num_nodes: expected at least {need} GPUs for {config.training.num_ranks} ranks and "
            f"{config.rollout.num_engines} engines of {config.rollout.tensor_parallel}, {cluster.placement}, got "
            f"{cluster.num_nodes} x {cluster.gpus_per_node} = {have}; fits from {-(-need // cluster.gpus_per_node)} on"
            "; `firstorder plan CONFIG --search` lists layouts of the GPUs that there are"
        )
    if config.training.tensor_parallel > cluster.gpus_per_node:
        raise ConfigError(
            f"training.tensor_parallel: expected at most cluster.gpus_per_node = {cluster.gpus_per_node}, so that no "
            f"TP group spans two machines, got {config.training.tensor_parallel}"
        )
    if cluster.gpus_per_node % config.rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel: expected a divisor of cluster.gpus_per_node = {cluster.gpus_per_node}, so that "
            f"no engine spans two machines, got {config.rollout.tensor_parallel}"
        )
    unit_of(config, cluster.gpus_per_node)  # which colocated engines may refuse


__all__ = ["check_divides", "check_places", "divisors", "gpus_needed"]
