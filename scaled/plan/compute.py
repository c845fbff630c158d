r"""Tokens, FLOPs and seconds of one global step, from a roofline whose every assumption is a number below.

The estimate is for a mean and a longest length of a batch's sequences: its only inputs that no config states.
FLOPs are counted in `flops`, the training passes with their padding in `passes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.hf import ModelShape
from scaled.config import ScaledRun, TrainingBlock
from scaled.plan import engine_memory, flops, host_memory, in_progress, memory, parameters, passes, payloads
from scaled.plan.hardware import Gpu

DECODE_FLOPS_EFFICIENCY = 0.3
"""Share of the peak rate in decoding and prefilling."""

DECODE_BANDWIDTH_EFFICIENCY = 0.5
"""Share of the memory bandwidth in decoding."""

STEP_OVERHEAD = 10e-3
"""Seconds of one decoding step that no byte explains: kernel launches and all-reduces of a 48-layer model."""

PUSH_GB_S = 2.8
"""GB/s of a push, from the ranks over the object store into all engines, of one machine and an older path.

The lower of two medians (2.8 and 3.4) of `python -m scaled.cluster.push_bench` on two cores of an AMD EPYC, when a push
copied each byte four times. With three copies it has 1.9 to 2.5 on a Xeon, whose memory allows 2.6 to 3.2, and was not
measured on that EPYC. A run on an H200 had 1.5 (docs/on-gpu.md). From machine to machine nothing was measured.
"""

PUSH_SPILLED_GB_S = 0.14
"""The same where the object store spills to disk, measured where it could not hold all weights. Today's path has 0.16
to 0.22 on the Xeon, for 1 GiB in a store of 0.5 (`push_bench 1 --store 0.5`)."""

QUANTISE_GB_S = 0.34
"""GB/s of training weights that one rank quantises, on one thread of a CPU. On a GPU nothing was measured."""

OFFLOAD_GB_S, RETURN_GB_S = 1.5, 9.0
"""GB/s of optimizer states from a rank's GPU into host memory, and back: one rank alone on one H200 (docs/on-gpu.md).
Megatron-core copies them into new memory every time. Several ranks at once were not measured."""

MEAN_LENGTH_SHARE = 0.3
"""Mean over longest sequence: R3 (arXiv 2510.11370) Table 8 measured 203,989,395 / (10 x 2048) of 32,768 tokens."""


@dataclass(frozen=True)
class StepCompute:
    """Tokens, FLOPs and seconds of one global step.

    `tokens` are those of prompts and responses; `score_tokens` and `update_tokens` the positions that the old pass and
    the updates compute for them, padding included; `num_micro` are the micro-batches of an update on a rank.
    """

    num_responses: int
    mean_tokens: int
    longest_tokens: int
    max_tokens: int
    tokens: int
    score_tokens: int
    update_tokens: int
    num_micro: int
    rollout_flops: float
    score_flops: float
    update_flops: float
    rollout_s: float
    training_s: float
    push_s: float
    turn_s: float
    step_s: float
    gpu_hours: float

    @property
    def total_flops(self) -> float:
        """FLOPs of rollout, score passes and updates."""
        return self.rollout_flops + self.score_flops + self.update_flops


def decode_step_seconds(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, num_seqs: int | float, context: int | float
) -> float:
    """Seconds of one decoding step of `num_seqs` sequences of `context` tokens: the slower of bytes and FLOPs.

    Bytes are the weights of the experts reached and all others, and the sequences' keys and values.
    """
    rollout, tp = config.rollout, config.rollout.tensor_parallel
    whole = engine_memory.engine_weights(config, shape)
    expert_share = len(shape.moe_layers) * shape.num_experts * shape.num_expert_parameters / shape.num_parameters
    # A step reads every dense weight, but of the experts only those that some token of the batch chose.
    touched = flops.experts_touched(shape, num_seqs) / max(1, shape.num_experts)
    weights = whole * (1 - expert_share + expert_share * touched) / tp
    # Not over TP: `sequence_kv_bytes` is of one GPU, and latents or repeated heads are not split.
    kv = num_seqs * context * engine_memory.sequence_kv_bytes(config, shape) / rollout.max_model_len
    num_flops = num_seqs * (flops.matrix_flops(shape) + flops.attention_flops(shape, context)) / tp
    by_bytes = (weights + kv) / (gpu.hbm_gb_s * 1e9 * DECODE_BANDWIDTH_EFFICIENCY)
    # int8 and fp32 count at the bf16 rate, as `Gpu` has rates of bf16 and fp8 alone.
    rate = gpu.tflops(fp8=rollout.precision.weights == "fp8_block") * 1e12 * DECODE_FLOPS_EFFICIENCY
    return max(by_bytes, num_flops / rate) + STEP_OVERHEAD


def rollout_seconds(config: ScaledRun, shape: ModelShape, gpu: Gpu, mean_tokens: int, longest_tokens: int) -> float:
    """Seconds of a rollout: decoding steps x seconds of one.

    An engine decodes its share of the responses, at most `max_num_seqs` together, and a step gives each one token; the
    longest response is decoded token by token, so there are at least as many steps as it has tokens (fewer where
    over-sampling does not wait for it).
    """
    # `sampled` is the work, `responses` the width of the batch: over-sampling decodes more at a time than its share of
    # the trained responses.
    load, rollout = in_progress.rollout_load(config, mean_tokens, longest_tokens), config.rollout
    share = load.sampled / rollout.num_engines
    together = min(load.responses / rollout.num_engines, rollout.max_num_seqs)
    steps = max(load.least_steps, share * mean_tokens / together)
    # The mean batch over all steps.
    active = share * mean_tokens / steps
    return steps * decode_step_seconds(config, shape, gpu, active, load.context)


def rollout_flops(config: ScaledRun, shape: ModelShape, mean_tokens: int, longest_tokens: int) -> float:
    """FLOPs of a rollout's forward passes, prompts included."""
    load = in_progress.rollout_load(config, mean_tokens, longest_tokens)
    # A token attends to itself, too: (S + 1) / 2 on average in a sequence of S.
    token = flops.matrix_flops(shape) + flops.attention_flops(shape, load.context + 0.5)
    return load.sampled * mean_tokens * token


def push_rate(config: ScaledRun, shape: ModelShape, mean_tokens: int) -> float:
    """GB/s at which weights reach the engines after a step of sequences of that mean length.

    The object store must hold them beside all that lies there then (`host_memory.stored_bytes`). A cluster that runs
    already (cluster.address) is assumed to have room.
    """
    stored = sum(host_memory.stored_bytes(config, shape, mean_tokens).values())
    fits = config.cluster.address is not None or stored <= config.cluster.object_store_gib * memory.GIB
    return PUSH_GB_S if fits else PUSH_SPILLED_GB_S


def yielded_parameters(shape: ModelShape, training: TrainingBlock, stage: int = 0) -> int:
    """Weights of matrices that the busiest rank of the stage quantises in a push.

    Replicas share them out (`megatron_engine.weights`): dense ones over CP x DP, experts over EP and the replicas of an
    expert; the first rank of a tensor-parallel group does so for the group.
    """
    dense = experts = 0
    for number in parameters.stage_layers(shape, training, stage):
        dense += payloads.quantised_dense_parameters(shape, number)
        if number not in shape.dense_layers:
            experts += shape.num_experts * shape.num_expert_parameters
    # EP times the replicas of an expert. No TP or ETP: the first rank of such a group works for all of it.
    groups = training.num_ranks // training.pipeline_parallel // training.expert_tensor_parallel
    return -(-dense // training.num_replicas) + -(-experts // groups)


def quantise_seconds(config: ScaledRun, shape: ModelShape) -> float:
    """Seconds until the last rank has quantised the weights that it yields; ranks do so at the same time."""
    if config.rollout.precision.weights == "same":
        return 0.0
    training = config.training
    largest = max(yielded_parameters(shape, training, stage) for stage in range(training.pipeline_parallel))
    return parameters.ELEMENT_BYTES[training.precision] * largest / (QUANTISE_GB_S * 1e9)


def push_seconds(config: ScaledRun, shape: ModelShape, mean_tokens: int) -> float:
    """Seconds until every engine has the weights: quantised in the ranks if asked, then sent."""
    rate = push_rate(config, shape, mean_tokens) * 1e9
    return engine_memory.engine_weights(config, shape) / rate + quantise_seconds(config, shape)


def turn_seconds(config: ScaledRun, shape: ModelShape) -> float:
    """Seconds in which the busiest rank's optimizer states leave its GPU for the engine's turn and come back."""
    # Gradients take no time: they are freed and allocated again, not copied.
    if not config.takes_turns or "optimizer" not in (config.training.offload or ()):
        return 0.0
    largest = parameters.most_optimizer_bytes(shape, config.training)
    return largest / (OFFLOAD_GB_S * 1e9) + largest / (RETURN_GB_S * 1e9)


def lengths_of(config: ScaledRun, mean_tokens: int | None, longest_tokens: int | None) -> tuple[int, int]:
    """Mean and longest length of a batch's sequences: the ones asked for, by default R3's share and the limit.

    Raises ValueError, naming the option, where they are not possible.
    """
    longest = config.rollout.max_model_len
    S = round(MEAN_LENGTH_SHARE * longest) if mean_tokens is None else mean_tokens
    if not 2 <= S <= longest:  # a prompt's token and a response's
        raise ValueError(f"--mean-tokens: expected from 2 to rollout.max_model_len = {longest}, got {S}")
    widest = longest if longest_tokens is None else longest_tokens
    if not S <= widest <= longest:
        raise ValueError(
            f"--longest-tokens: expected from the mean, {S}, to rollout.max_model_len = {longest}, got {widest}"
        )
    return S, widest


def together_seconds(config: ScaledRun, rollout_s: float, training_s: float) -> float:
    """Seconds of rollout and training: the longer one where sampling runs ahead, else both."""
    return rollout_s + training_s if config.schedule.steps_off == 0 else max(rollout_s, training_s)


def step_compute(
    config: ScaledRun,
    shape: ModelShape,
    gpu: Gpu,
    mean_tokens: int | None = None,
    longest_tokens: int | None = None,
) -> StepCompute:
    """Tokens, FLOPs and seconds of one global step whose sequences have `mean_tokens` tokens on average.

    The default is R3's measured share of rollout.max_model_len; `longest_tokens`, the longest of a batch, is by default
    that limit, as among thousands of responses one reaches it. Prompts are drawn once: dynamic sampling multiplies the
    rollout by its draws. Training takes turns with the rollout, unless sampling runs ahead: by one step or by several,
    as these times are equal in every step (`simulation` has unequal ones).
    """
    algorithm = config.algorithm.build()
    num_responses = algorithm.num_prompts * algorithm.num_responses
    S, widest = lengths_of(config, mean_tokens, longest_tokens)
    made = passes.passes(config, shape, S, widest)
    rollout_s = rollout_seconds(config, shape, gpu, S, widest)
    training_s = passes.training_seconds(
        config.training, shape.num_layers, gpu, made.score_flops + made.update_flops, made.num_micro
    )
    push_s, turn_s = push_seconds(config, shape, S), turn_seconds(config, shape)
    step_s = together_seconds(config, rollout_s, training_s) + push_s + turn_s
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    # `tokens` are those trained on; the rollout's FLOPs count dropped responses, too.
    return StepCompute(
        num_responses, S, widest, algorithm.max_tokens, num_responses * S, made.score_positions, made.update_positions,
        made.num_micro, rollout_flops(config, shape, S, widest),
        made.score_flops, made.update_flops,
        rollout_s, training_s, push_s, turn_s, step_s, gpus * step_s / 3600,
    )  # fmt: skip
