"""Memory of one GPU of the inference engine, in bytes."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import in_progress, payloads
from scaled.plan.memory import CONTEXT, Memory, attention_activations, mlp_activations
from scaled.plan.parameters import ELEMENT_BYTES
from scaled.vllm_engine.quantize import sent

Lengths = tuple[int, int]
"""Mean and longest length of a batch's sequences, in tokens."""


def rollout_memory(config: ScaledRun, shape: ModelShape, lengths: Lengths | None = None) -> Memory:
    """Memory of one GPU of an engine with `max_num_seqs` sequences in progress.

    With these lengths the cache holds all of them 98% of the time (`in_progress.cached_tokens`); otherwise vLLM
    preempts some and recomputes them later. By default each has `max_model_len` tokens, and none is ever preempted.
    All weights are divided by TP, even the small ones that every GPU holds whole (norms, routers). The workspace is one
    layer's activations of `max_num_batched_tokens` tokens, and fp32 logits and log-probabilities of `max_num_seqs`.
    """
    rollout = config.rollout
    b = ELEMENT_BYTES[rollout.precision.compute]
    layer = max(attention_activations(shape, b) + mlp_activations(shape, n, b) for n in range(shape.num_layers))
    # Whole on every GPU, an upper bound: TP splits heads and widths, but not a layer's inputs.
    workspace = rollout.max_num_batched_tokens * layer + 8 * rollout.max_num_seqs * shape.vocab_size
    num, full = rollout.max_num_seqs, rollout.max_model_len
    if lengths is None:
        name, tokens = f"KV of {num} x {full} tokens", num * full
    else:
        name, tokens = f"KV of {num} sequences", in_progress.cached_tokens(num, *lengths, full)
    parts = {
        "weights": engine_weights(config, shape) // rollout.tensor_parallel,
        "rotary table": rotary_bytes(config, shape),
        # TP is in it already: the heads that one GPU has.
        name: tokens * sequence_kv_bytes(config, shape) // full,
        "workspace": workspace,
        "context and buffers": CONTEXT,
    }
    return Memory("rollout GPU", parts)


def places_that_fit(config: ScaledRun, shape: ModelShape, num_bytes: float, lengths: Lengths | None, most: int) -> int:
    """The largest `max_num_seqs` up to `most` whose `rollout_memory` fits these bytes; 0 if none does."""

    def is_over(num_seqs: int) -> bool:
        one = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_num_seqs": num_seqs})})
        return rollout_memory(one, shape, lengths).total > num_bytes

    return bisect_left(range(1, most + 1), True, key=is_over)


def engine_weights(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of all weights in the format of the engines: those of a push, counted once for all engines."""
    precision = config.rollout.precision
    return payloads.weight_bytes(shape, precision.weights, ELEMENT_BYTES[precision.compute])


def rotary_bytes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of vLLM's cosines and sines of all positions of the model, which layers share and every GPU has whole."""
    width = shape.head_dim if shape.latent_attention is None else shape.latent_attention.position_dim
    yarn = shape.yarn
    rows = shape.max_positions if yarn is None else math.ceil(yarn.factor * yarn.original_positions)
    return ELEMENT_BYTES[config.rollout.precision.compute] * rows * width


def bucket_bytes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of a bucket of weights: cluster.bucket_mib, at least the largest weight, and at most all weights."""
    precision = config.rollout.precision
    largest, total = _largest_and_all(shape, precision.weights, ELEMENT_BYTES[precision.compute])
    return min(max(config.cluster.bucket_mib * 2**20, largest), total)


# Cached: a plan asks for it on every machine, and it goes through all weights, expert by expert.
@functools.cache
def _largest_and_all(shape: ModelShape, weights: str, compute_bytes: int) -> tuple[int, int]:
    """Bytes of the largest tensor and of all that ranks send: in the engines' format, whatever they train in."""
    sizes = [
        math.prod(one.shape) * (compute_bytes if one.dtype is None else one.dtype.itemsize)
        for one in sent(shape.weights(), weights).values()
    ]
    return max(sizes), sum(sizes)


def sequence_kv_bytes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of one sequence of `max_model_len` tokens in one GPU's key-value cache."""
    precision = config.rollout.precision
    b = 1 if precision.kv_cache == "fp8" else ELEMENT_BYTES[precision.compute]
    return config.rollout.max_model_len * payloads.kv_bytes_per_token(shape, b, config.rollout.tensor_parallel)


__all__ = [
    "Lengths", "bucket_bytes", "engine_weights", "places_that_fit", "rollout_memory", "rotary_bytes",
    "sequence_kv_bytes",
]  # fmt: skip
