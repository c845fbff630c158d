"""Memory of one GPU of the inference engine, in bytes."""

from __future__ import annotations

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import payloads
from scaled.plan.memory import CONTEXT, Memory, attention_activations, mlp_activations
from scaled.plan.parameters import ELEMENT_BYTES


def rollout_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """Memory of one GPU of an engine with `max_num_seqs` sequences of `max_model_len` tokens: no sequence is evicted.

    All weights are divided by TP, even the small ones that every GPU holds whole (norms, routers). The workspace is one
    layer's activations of `max_num_batched_tokens` tokens, and fp32 logits and log-probabilities of `max_num_seqs`.
    """
    rollout = config.rollout
    b = ELEMENT_BYTES[rollout.precision.compute]
    layer = max(attention_activations(shape, b) + mlp_activations(shape, n, b) for n in range(shape.num_layers))
    # Whole on every GPU, an upper bound: TP splits heads and widths, but not a layer's inputs.
    workspace = rollout.max_num_batched_tokens * layer + 8 * rollout.max_num_seqs * shape.vocab_size
    kv = sequence_kv_bytes(config, shape)
    parts = {
        "weights": engine_weights(config, shape) // rollout.tensor_parallel,
        # TP is in `kv` already, which counts the heads that one GPU has.
        f"KV of {rollout.max_num_seqs} x {rollout.max_model_len} tokens": rollout.max_num_seqs * kv,
        "workspace": workspace,
        "context and buffers": CONTEXT,
    }
    return Memory("rollout GPU", parts)


def sequences_that_fit(config: ScaledRun, shape: ModelShape, num_bytes: float, num_tokens: int) -> int:
    """The largest `max_num_seqs` of sequences of `num_tokens` tokens that fit into these bytes; below 1 if none does.

    The need is linear in the sequences, so that two values of it give the number.
    """

    def need(num_seqs: int) -> int:
        fields = {"max_num_seqs": num_seqs, "max_model_len": num_tokens}
        one = config.model_copy(update={"rollout": config.rollout.model_copy(update=fields)})
        return rollout_memory(one, shape).total

    return 1 + int((num_bytes - need(1)) // (need(2) - need(1)))


def engine_weights(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of all weights in the format of the engines: those of a push, counted once for all engines."""
    precision = config.rollout.precision
    return payloads.weight_bytes(shape, precision.weights, ELEMENT_BYTES[precision.compute])


def sequence_kv_bytes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of one sequence of `max_model_len` tokens in one GPU's key-value cache."""
    precision = config.rollout.precision
    b = 1 if precision.kv_cache == "fp8" else ELEMENT_BYTES[precision.compute]
    return config.rollout.max_model_len * payloads.kv_bytes_per_token(shape, b, config.rollout.tensor_parallel)


__all__ = ["engine_weights", "rollout_memory", "sequence_kv_bytes", "sequences_that_fit"]
