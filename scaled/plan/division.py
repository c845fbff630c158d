"""Whether a layout divides the model, the batch and the cluster, by the divisors that Megatron-core and vLLM require.

Each refusal is a line with the field, both numbers and the values that serve.
"""

from __future__ import annotations

import contextlib

from lab.doctor.words import counted
from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun, TrainingBlock
from scaled.megatron_engine.parallel import check_layout
from scaled.units import shares, unit_of
from scaled.vllm_engine.quantize import check_precision


def pipeline_words(training: TrainingBlock) -> str:
    """The pipeline in a few words, with the layers of the stages that are unequal to the others."""
    places = zip(("first", "last"), training.uneven_stages, strict=True)
    uneven = [f"{place} {counted(number, 'layer')}" for place, number in places if number is not None]
    return f"PP {training.pipeline_parallel}" + (f" ({', '.join(uneven)})" if uneven else "")


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


def machines_needed(config: ScaledRun) -> int:
    """Machines of cluster.gpus_per_node GPUs that the run's start takes, if all are free: `units.shares`."""
    return len(shares(config, config.cluster.gpus_per_node))


def check_places(config: ScaledRun) -> None:
    """Raises ConfigError where the cluster has too few GPUs or machines, or one engine would span two of them."""
    cluster = config.cluster
    config.require_shared_gpus()
    if config.training.tensor_parallel > cluster.gpus_per_node:
        raise ConfigError(
            f"training.tensor_parallel: expected at most cluster.gpus_per_node = {cluster.gpus_per_node}, so that no "
            f"TP group spans two machines, got {config.training.tensor_parallel}"
        )
    if config.rollout.tensor_parallel > cluster.gpus_per_node:
        raise ConfigError(
            f"rollout.tensor_parallel: expected at most cluster.gpus_per_node = {cluster.gpus_per_node}, so that no "
            f"engine spans two machines, got {config.rollout.tensor_parallel}"
        )
    need, have = gpus_needed(config), cluster.num_nodes * cluster.gpus_per_node
    num_machines = machines_needed(config)
    search = "; `firstorder plan CONFIG --search` lists layouts of the GPUs that there are"
    actors = (
        f"{config.training.num_ranks} ranks and {config.rollout.num_engines} engines of "
        f"{config.rollout.tensor_parallel}, {cluster.placement}"
    )
    if need > have:
        raise ConfigError(
            f"cluster.num_nodes: expected at least {need} GPUs for {actors}, got "
            f"{cluster.num_nodes} x {cluster.gpus_per_node} = {have}; fits from {num_machines} on{search}"
        )
    if num_machines > cluster.num_nodes:
        size = unit_of(config, cluster.gpus_per_node).size
        raise ConfigError(
            f"cluster.num_nodes: expected at least {num_machines} machines of {cluster.gpus_per_node} GPUs for "
            f"{actors}, as units of {size} ranks and engines are whole on a machine, got {cluster.num_nodes}{search}"
        )


__all__ = ["check_divides", "check_places", "divisors", "gpus_needed", "machines_needed"]
