r"""FLOPs of one token and one sequence, from the model's shape alone.

Matrix work counts 2 FLOPs per weight and token, attention 2 S H (d_qk + d_v) per token and layer over a causal half.
Letters: S tokens of a sequence, H heads, E experts, K slots.
"""

from __future__ import annotations

import functools

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.plan import payloads


# Cached: `passes` asks for every micro-batch, and a shape counts its weights from the table each time.
@functools.cache
def matrix_flops(shape: ModelShape) -> int:
    """FLOPs of one token's matrix products, forward: 2 x (active weights - embedding - norms), head included."""
    latent, d = shape.latent_attention, shape.head_dim
    if latent is not None:
        attention_norms = latent.key_value_rank + (latent.query_rank or 0)
    else:
        # Under `head` all query heads share one norm of d weights, and all key heads another.
        attention_norms = {"head": 2 * d, "projection": (shape.num_heads + shape.num_kv_heads) * d, "none": 0}[
            shape.qk_norm
        ]
    # Norms count as weights, but multiply elementwise.
    norms = (2 * shape.num_layers + 1) * shape.hidden_size + shape.num_layers * attention_norms
    # An embedding is a look-up; a tied one is the head's matrix as well.
    embedding = 0 if shape.tied_head else shape.vocab_size * shape.hidden_size
    return 2 * (shape.num_active_parameters - embedding - norms)


def attention_flops(shape: ModelShape, context: int | float) -> int | float:
    """FLOPs of one token's attention to `context` earlier ones, forward: 2 context H (d_qk + d_v) per layer."""
    latent = shape.latent_attention
    query = shape.head_dim if latent is None else latent.no_position_dim + latent.position_dim
    return 2 * context * shape.num_heads * (query + shape.head_dim) * shape.num_layers


def forward_flops(shape: ModelShape, S: int) -> float:
    """FLOPs of one forward pass over a sequence of S tokens: token s attends to s, (S + 1) / 2 on average."""
    return S * (matrix_flops(shape) + attention_flops(shape, (S + 1) / 2))


def update_factor(shape: ModelShape, training: TrainingBlock, S: int) -> float:
    """Cost of a forward and backward pass with recomputation, in forward passes: 3 plus the recomputed part.

    That is always the head, whose logits are not kept; under selective the experts too, under full everything (4).
    """
    if training.recompute == "full":
        return 4.0
    # For all S tokens, as `matrix_flops` counts the head: an upper bound, since prompts need no logits.
    again = 2 * shape.vocab_size * shape.hidden_size
    if training.recompute == "selective":
        again += payloads.expert_flops_per_token(shape)
    return 3.0 + S * again / forward_flops(shape, S)


def experts_touched(shape: ModelShape, num_tokens: int | float) -> float:
    """Experts of a layer that `num_tokens` tokens reach when choices are even: E (1 - (1 - K / E)^n); 0 without any."""
    E, K = shape.num_experts, shape.experts_per_token
    return 0.0 if E == 0 else E * (1 - (1 - K / E) ** num_tokens)
