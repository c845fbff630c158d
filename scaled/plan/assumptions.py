"""The assumptions behind a plan's numbers, in sentences."""

from __future__ import annotations

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import compute, engine_memory, feasibility, host_memory, in_progress, memory, passes
from scaled.plan.compute import StepCompute
from scaled.plan.hardware import Gpu
from scaled.plan.memory import GIB
from scaled.plan.waits import longest_wait
from scaled.units import unit_of


def sentences(config: ScaledRun, shape: ModelShape, gpu: Gpu, step: StepCompute) -> list[str]:
    """The assumptions behind the plan of a config and the time of its step, one sentence each."""
    mean, longest = step.mean_tokens, config.rollout.max_model_len
    wait = longest_wait(config, shape, gpu, mean, step.longest_tokens)
    lines = [
        "A rank's memory is for sequences of rollout.max_model_len tokens in every place; activations count fused "
        "attention"
        f"{' and tokens spread evenly over experts' if shape.moe_layers else ''}.",
        f"{memory.CONTEXT / GIB:g} GiB per process for CUDA context, NCCL buffers and workspaces.",
        f"Time and FLOPs are for sequences of {mean} tokens on average, {mean / longest:.0%} of rollout.max_model_len "
        "(R3, arXiv 2510.11370, Table 8, measured 30 %); --mean-tokens sets it.",
        _padding(config, step),
        f"Training reaches {passes.TRAINING_EFFICIENCY:.0%} of {_training_rate(config, gpu)}, "
        f"communication included; decoding {compute.DECODE_BANDWIDTH_EFFICIENCY:.0%} of {gpu.hbm_gb_s:g} GB/s or "
        f"{compute.DECODE_FLOPS_EFFICIENCY:.0%} of the peak rate, whichever is slower, and "
        f"{compute.STEP_OVERHEAD * 1e3:g} ms per step; a push "
        f"{compute.push_rate(config, shape, mean):g} GB/s into each machine, from ranks to engines over the object "
        f"store{_quantising(config, shape)} (measured on one machine, on CPUs only).",
        f"{gpu.name}: {gpu.source}.",
        f"rollout.timeout_s, {config.rollout.timeout_s:g} s, limits each wait for an engine, at most for {wait.what}: "
        f"{wait.seconds:,.0f} s, if it decodes rollout.max_num_seqs together.",
    ]
    if config.takes_turns:
        lines.append(
            f"Colocated engines sleep while ranks train, and keep {memory.CONTEXT / GIB:g} GiB; while they are awake, "
            "ranks keep all but the working memory of an update and what training.offload names."
        )
    elif config.cluster.placement == "colocated":
        lines.append("Colocated ranks and engines stay resident together: vLLM keeps its gpu_memory_utilization.")
    lines += [_cache_room(config, shape, gpu, (mean, step.longest_tokens)), _object_store(config, shape, mean)]
    training, node = config.training, config.cluster.gpus_per_node
    filled, needed = memory.num_microbatches(config), memory.num_full_microbatches(config)
    if filled > needed:
        lines.append(
            f"Interleaved 1F1B takes micro-batches in multiples of pipeline_parallel {training.pipeline_parallel}: an "
            f"update's {needed} are filled up to {filled} by empty ones, which cost what the others do."
        )
    lines += [f"{line}, so training is slower than this." for line in unit_of(config, node).spans]
    if config.algorithm.dynamic_sampling.enabled:
        rounds = config.algorithm.dynamic_sampling.max_rounds
        lines.append(f"Dynamic sampling draws up to {rounds} times; tokens, FLOPs and time count one draw.")
    if config.algorithm.oversampling is not None:
        lines.append(_oversampling(config, mean, step.longest_tokens))
    return lines


def _training_rate(config: ScaledRun, gpu: Gpu) -> str:
    """The peak rate of the training passes, in words."""
    rate = passes.peak_tflops(config.training, gpu)
    return f"{rate:g} TFLOP/s ({'dense bf16' if rate == gpu.bf16_tflops else 'half of dense bf16, in fp32'})"


def _cache_room(config: ScaledRun, shape: ModelShape, gpu: Gpu, lengths: engine_memory.Lengths) -> str:
    """The sequences that an engine's cache has room for, beside those that it may decode together."""
    budget, full = feasibility.rollout_budget(config, gpu), config.rollout.max_model_len
    most = config.rollout.max_num_batched_tokens
    together, at_once = (engine_memory.places_that_fit(config, shape, budget, own, most) for own in (lengths, None))
    return (
        f"An engine's cache has room for {together:,} sequences in progress 98% of the time, and always for "
        f"{at_once:,} of {full:,} tokens; rollout.max_num_seqs is {config.rollout.max_num_seqs:,}. Where the cache is "
        "full, vLLM preempts some sequences and recomputes them later, which the time does not count."
    )


def _object_store(config: ScaledRun, shape: ModelShape, mean: int) -> str:
    """The bytes in the object store at a push and after the updates, and whether they slow the push down."""
    pushed, updated = host_memory.stored_bytes, host_memory.most_stored_bytes
    sizes = [sum(at(config, shape, n).values()) / GIB for at in (pushed, updated) for n in (mean, None)]
    line = (
        f"At a push the fullest object store holds {', '.join(pushed(config, shape))}: {sizes[0]:,.3g} GiB at the mean "
        f"length, {sizes[1]:,.3g} at full length; after the updates it held {sizes[2]:,.3g}, at full length "
        f"{sizes[3]:,.3g}. The driver has none of it."
    )
    if config.cluster.address is None:
        room = config.cluster.object_store_gib
        line += (
            f" Ray, started by the run or its Slurm script, has {room:g} GiB, which /dev/shm must hold (by default "
            "half of a machine's memory, in a container 64 MB); what exceeds them spills to disk"
        )
        is_slow = compute.push_rate(config, shape, mean) < compute.PUSH_GB_S
        line += ", which slows the push: a larger cluster.object_store_gib avoids that." if is_slow else "."
    return line


def _oversampling(config: ScaledRun, mean_tokens: int, longest_tokens: int) -> str:
    """The responses in progress, and how long a rollout of them lasts."""
    batch, over = config.algorithm.batch, config.algorithm.oversampling
    assert over is not None
    load = in_progress.rollout_load(config, mean_tokens, longest_tokens)
    each = -(-load.responses // config.rollout.num_engines)
    together = min(each, config.rollout.max_num_seqs)
    trained = batch.num_prompts * batch.num_responses
    line = (
        f"Over-sampling has {batch.num_prompts + over.extra_prompts} prompts in progress for {batch.num_prompts}: "
        f"{load.responses:,} responses, {each:,} per engine, of which {together:,} decode together; "
        f"a rollout has at least {load.least_steps:,} decoding steps"
    )
    if over.unfinished == "drop":
        return f"{line}, and {1 - trained / load.sampled:.0%} of its tokens are dropped."
    return f"{line}; reading kept responses again, and groups that max_staleness gives up, are not counted."


def _quantising(config: ScaledRun, shape: ModelShape) -> str:
    seconds = compute.quantise_seconds(config, shape)
    if seconds == 0:
        return ""
    return f", after {seconds:,.0f} s in which ranks quantise at {compute.QUANTISE_GB_S:g} GB/s each, at the same time"


def _padding(config: ScaledRun, step: StepCompute) -> str:
    """The widths that training pads to, and how much padding there is."""
    budget = config.training.max_tokens_per_micro_batch
    much = (
        f"{step.score_tokens / step.tokens:.2f} positions per token in the old pass, "
        f"{step.update_tokens / step.tokens:.2f} in updates; --longest-tokens sets it."
    )
    if budget is None:
        return f"Training pads every response to the longest of its batch, {step.longest_tokens} tokens: {much}"
    return (
        f"Lengths are spread exponentially up to the longest, {step.longest_tokens} tokens; training sorts them into "
        f"micro-batches of at most {budget} positions: {much}"
    )
