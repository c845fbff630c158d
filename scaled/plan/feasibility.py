"""Whether a layout fits; each misfit is a line with the field, both numbers and a way out.

Memory is `memory.py`'s count against one GPU, and `host_memory`'s against one machine. `division` has the divisors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pydantic

from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.plan import compute, engine_memory, host_memory, memory
from scaled.plan.division import check_divides, check_places, divisors
from scaled.plan.engine_memory import Lengths
from scaled.plan.hardware import Gpu
from scaled.plan.memory import GIB, Memory
from scaled.plan.waits import Wait

MAX_WAYS = 3
"""Ways out that a message names."""

MemoryOf = Callable[[ScaledRun, ModelShape], Memory]
Budget = Callable[[ScaledRun, Gpu], float]
Changes = Callable[[ScaledRun, ModelShape, Gpu], Iterator[tuple[str, ScaledRun]]]


def training_budget(config: ScaledRun, gpu: Gpu) -> float:
    """Bytes of a GPU that a rank may take in an update.

    All of it; colocated all but the context of an engine that sleeps, or, where engines do not sleep, all but vLLM's
    gpu_memory_utilization.
    """
    if config.takes_turns:
        return gpu.memory_gib * GIB - memory.CONTEXT
    return resident_budget(config, gpu) if config.cluster.placement == "colocated" else gpu.memory_gib * GIB


def resident_budget(config: ScaledRun, gpu: Gpu) -> float:
    """Bytes of a GPU that ranks may keep while a colocated engine uses its gpu_memory_utilization of it."""
    return gpu.memory_gib * GIB * (1 - config.rollout.gpu_memory_utilization)


def rollout_budget(config: ScaledRun, gpu: Gpu) -> float:
    """Bytes of a GPU that vLLM takes: gpu_memory_utilization of it."""
    return gpu.memory_gib * GIB * config.rollout.gpu_memory_utilization


def with_fields(config: ScaledRun, block: str, **fields: Any) -> ScaledRun:
    """The config with these fields of a block changed, unchecked."""
    return config.model_copy(update={block: getattr(config, block).model_copy(update=fields)})


def misfits(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, wait: Wait | None = None, lengths: Lengths | None = None
) -> list[str]:
    """A line for each pool that exceeds its GPU or its machine: the need, the limit, and single changes that fit.

    An engine's need is that for sequences of these `lengths`, by default those of a plan (`compute.lengths_of`).
    One more where the longest `wait` for an engine's answer outlasts `rollout.timeout_s`.
    """
    lengths = compute.lengths_of(config, None, None) if lengths is None else lengths
    pools: list[tuple[str, MemoryOf, Budget, Changes]] = [
        ("training", memory.peak_training_memory, training_budget, partial(training_changes, lengths=lengths)),
        ("rollout", partial(engine_memory.rollout_memory, lengths=lengths), rollout_budget, rollout_changes),
    ]
    if config.takes_turns:
        awake = "training, while engines are awake"
        pools.insert(1, (awake, memory.resident_memory, resident_budget, partial(resident_changes, lengths=lengths)))
    lines = []
    for block, memory_of, budget, changes in pools:
        need, have = memory_of(config, shape), budget(config, gpu)
        if need.total > have:
            ways = _ways(changes(config, shape, gpu), memory_of, budget, shape, gpu)
            lines.append(_misfit(block, need, have, gpu, config, ways))
    if (line := host_misfit(config, shape, gpu)) is not None:
        lines.append(line)
    if wait is not None and wait.seconds > config.rollout.timeout_s:
        lines.append(
            f"rollout.timeout_s: expected more than the estimated {wait.seconds:.0f} s of {wait.what}, got "
            f"{config.rollout.timeout_s:g}"
        )
    return lines


def host_misfit(config: ScaledRun, shape: ModelShape, gpu: Gpu) -> str | None:
    """The same line for the CPU memory of a machine; None where it fits, or where cluster.host_gib is null."""
    if config.cluster.host_gib is None:
        return None
    need = host_memory.peak_host_memory(config, shape)
    if need.total <= host_budget(config, gpu):
        return None
    ways = _ways(host_changes(config, shape, gpu), host_memory.peak_host_memory, host_budget, shape, gpu)
    return (
        f"cluster.host_gib: expected at least {need.total / GIB:.1f} GiB for {need.where}, of which "
        f"{_largest(need)}, got {config.cluster.host_gib:g}; {_way_out(ways, 'take larger machines')}"
    )


def host_budget(config: ScaledRun, gpu: Gpu) -> float:
    """Bytes of a machine's CPU memory, of any size where the config states none."""
    return math.inf if config.cluster.host_gib is None else config.cluster.host_gib * GIB


def host_changes(config: ScaledRun, shape: ModelShape, gpu: Gpu) -> Iterator[tuple[str, ScaledRun]]:
    """Configs that differ in one field, whose update fits a GPU, for less CPU memory of the machine that has most."""
    for change, one in _host_changes(config, shape):
        if memory.peak_training_memory(one, shape).total <= training_budget(one, gpu):
            yield change, one


def _host_changes(config: ScaledRun, shape: ModelShape) -> Iterator[tuple[str, ScaledRun]]:
    if config.schedule.steps_off > 1:
        for value in range(config.schedule.steps_off - 1, 0, -1):
            yield from _changed(config, shape, "schedule", steps_off=value)
    if config.checkpoint.asynchronous:
        yield from _changed(config, shape, "checkpoint", asynchronous=False)
    if not config.training.distributed_optimizer:
        yield from _changed(config, shape, "training", distributed_optimizer=True)
    if "optimizer" in (config.training.offload or ()):
        rest = tuple(part for part in config.training.offload or () if part != "optimizer") or None
        yield from _changed(config, shape, "training", offload=rest)


def _misfit(block: str, need: Memory, have: float, gpu: Gpu, config: ScaledRun, ways: list[str]) -> str:
    place = "" if block == "training" and (config.takes_turns or config.cluster.placement == "separate") else (
        f" at rollout.gpu_memory_utilization {config.rollout.gpu_memory_utilization:g}"
        f" ({config.cluster.placement})"
    )  # fmt: skip
    return (
        f"{block}: expected at most {have / GIB:.1f} GiB of {gpu.name}'s {gpu.memory_gib:g}{place}, got "
        f"{need.total / GIB:.1f}, of which {_largest(need)}; {_way_out(ways, 'take a larger GPU')}"
    )


def _largest(need: Memory) -> str:
    largest = max(need.parts, key=lambda part: need.parts[part])
    return f"{need.parts[largest] / GIB:.1f} are {largest}"


def _way_out(ways: list[str], last: str) -> str:
    if ways:
        return f"fits with {', or '.join(ways)}"
    return f"no single change fits: {last}, or change several; `firstorder plan CONFIG --search` lists layouts that fit"


def _ways(
    changes: Iterable[tuple[str, ScaledRun]], memory_of: MemoryOf, budget: Budget, shape: ModelShape, gpu: Gpu
) -> list[str]:
    """The first value of each field that meets the need, in the order of the changes."""
    found: dict[str, str] = {}
    for change, config in changes:
        field = change.split(" ")[0]
        if len(found) == MAX_WAYS:
            break
        # The budget is the changed config's, too: a smaller share for vLLM changes the limit, not the need.
        if field not in found and (need := memory_of(config, shape).total) <= budget(config, gpu):
            found[field] = f"{change} ({need / GIB:.1f} GiB)"
    return list(found.values())


def training_changes(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, lengths: Lengths
) -> Iterator[tuple[str, ScaledRun]]:
    """Configs that differ in one field and leave a rank more room or need less of it, the cheapest change first."""
    training = config.training
    # Engines that sleep during an update leave it the GPU whatever their share is.
    if config.cluster.placement == "colocated" and not config.takes_turns:
        yield from _smaller_shares(config, shape, gpu, lengths)
    order = ("none", "selective", "full")
    for value in order[order.index(training.recompute) + 1 :]:
        yield from _changed(config, shape, "training", recompute=value)
    budget, least = training.max_tokens_per_micro_batch, config.rollout.max_model_len
    if budget is None:
        for value in divisors(training.micro_batch_size)[-2::-1]:  # without the size itself, the largest first
            yield from _changed(config, shape, "training", micro_batch_size=value)
    elif budget > least:
        # No smaller value is valid: the longest response must fit a micro-batch (`ScaledRun._batch_divides`).
        yield from _changed(config, shape, "training", max_tokens_per_micro_batch=least)
    for field in ("expert_parallel", "tensor_parallel", "context_parallel", "pipeline_parallel"):
        for factor in (2, 4, 8, 16):
            yield from _changed(config, shape, "training", **{field: getattr(training, field) * factor})
    for factor in (2, 4, 8):
        yield from _changed(config, shape, "training", num_ranks=training.num_ranks * factor)


def resident_changes(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, lengths: Lengths
) -> Iterator[tuple[str, ScaledRun]]:
    """Configs that differ in one field and keep less on a GPU, or leave more of it, while engines are awake."""
    yield from _smaller_shares(config, shape, gpu, lengths)
    for offload in (("gradients",), ("optimizer",), ("gradients", "optimizer")):
        # Strict supersets: a change must not bring back what the config offloads already.
        if set(offload) > set(config.training.offload or ()):
            yield from _changed(config, shape, "training", offload=offload)
    yield from training_changes(config, shape, gpu, lengths)


def _smaller_shares(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, lengths: Lengths
) -> Iterator[tuple[str, ScaledRun]]:
    """Smaller shares of a GPU for vLLM, as long as the engine fits into them."""
    rollout = config.rollout
    for percent in range(95, 0, -5):
        if percent / 100 < rollout.gpu_memory_utilization:
            changed = with_fields(config, "rollout", gpu_memory_utilization=percent / 100)
            if engine_memory.rollout_memory(changed, shape, lengths).total <= rollout_budget(changed, gpu):
                yield f"rollout.gpu_memory_utilization {percent / 100:g}", changed


def rollout_changes(config: ScaledRun, shape: ModelShape, gpu: Gpu) -> Iterator[tuple[str, ScaledRun]]:
    """Configs that differ in one field of `rollout` and take less memory per GPU."""
    rollout = config.rollout
    # Each value in turn: `_ways` names the first, and so the largest, that fits.
    for value in range(rollout.max_num_seqs - 1, 0, -1):
        yield f"rollout.max_num_seqs {value}", with_fields(config, "rollout", max_num_seqs=value)
    for factor in (2, 4, 8):
        # As many GPUs as before, for fewer engines.
        size, num = rollout.tensor_parallel * factor, rollout.num_engines // factor
        yield from _changed(config, shape, "rollout", tensor_parallel=size, num_engines=num)


def _changed(config: ScaledRun, shape: ModelShape, block: str, **fields: Any) -> Iterator[tuple[str, ScaledRun]]:
    """The config with these fields of a block changed, if it is valid, divides and has its GPUs."""
    raw = config.model_dump()
    raw[block] |= fields
    try:
        changed = ScaledRun.model_validate(raw)
        check_divides(changed, shape)
        check_places(changed)
    except (pydantic.ValidationError, ConfigError):
        return
    shown = (_shown(value) for value in fields.values())
    yield " and ".join(f"{block}.{field} {value}" for field, value in zip(fields, shown, strict=True)), changed


def _shown(value: Any) -> Any:
    """A field's value as YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else value
