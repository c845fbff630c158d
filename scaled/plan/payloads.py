r"""The bytes that a global step moves and keeps besides weights and activations: routing records, router features and
mu's likeliest tokens.

All functions are pure functions of a `ModelShape` and return bytes, or FLOPs where they say so. MB is 1e6 bytes, GiB
2**30. Readings that reproduce the papers: R3 (arXiv 2510.11370) writes GB for GiB and K for 1e3 in its Table 9, and GB
for GiB in App. G.2; Pr2 (arXiv 2606.00395) writes MB for 1e6 bytes and K for 1024 in its Table 3.
Letters: L MoE layers, K slots, E experts, D model width, F expert width, S tokens, T_c cached positions.
"""

from __future__ import annotations

import functools
from math import prod

from lab.hf import ModelShape
from scaled.vllm_engine.quantize import BLOCK, is_quantised
from theory.routing.record import index_dtype
from theory.top_tokens import id_dtype

INT32_BYTES = 4
"""Bytes of an expert's id as Pr2 (App. E.2) stores it."""

SCORE_BYTES = 4
"""Bytes of an expert's log-score in old's pass, fp32."""


def id_bytes(shape: ModelShape) -> int:
    """Bytes of one expert id in our records: the narrowest signed type that holds every id and -1."""
    return index_dtype(shape.num_experts).itemsize


def routing_bytes(shape: ModelShape, num_tokens: int, element_bytes: int | None = None) -> int:
    """Bytes of the expert ids of `num_tokens` tokens: element_bytes x L x K for each; by default those of our records.

    R3 Table 9 has 2 x 48 x 8 per token, and App. G.2 num_tokens = B G N; Pr2 App. E.2 has 4 L k.
    """
    each = id_bytes(shape) if element_bytes is None else element_bytes
    return each * len(shape.moe_layers) * shape.experts_per_token * num_tokens


def router_logit_bytes(shape: ModelShape, num_rows: int) -> int:
    """Bytes of the router's logits on `num_rows` rows in every MoE layer, fp32: 4 L E num_rows."""
    return 4 * len(shape.moe_layers) * shape.num_experts * num_rows


def feature_bytes(shape: ModelShape, num_positions: int, num_responses: int = 1, hidden_bytes: int = 2) -> int:
    """Bytes of the feature cache: num_responses x T_c x L (hidden_bytes D + 4 E), logits in fp32.

    Pr2 (App. E.2) has hidden_bytes = 2, and the bytes of one response in Table 3.
    """
    of_position = len(shape.moe_layers) * (hidden_bytes * shape.hidden_size + 4 * shape.num_experts)
    return num_responses * num_positions * of_position


def top_token_bytes(shape: ModelShape, num_top: int, num_tokens: int) -> int:
    """Bytes of mu's `num_top` likeliest tokens (all of a smaller vocabulary) at each of `num_tokens` response tokens.

    An id in the narrowest signed type that holds the vocabulary, and its log-probability in fp32.
    """
    return num_tokens * min(num_top, shape.vocab_size) * (id_dtype(shape.vocab_size).itemsize + 4)


def backlog_bytes(shape: ModelShape, num_responses: int, max_tokens: int, num_rows: int, num_top: int) -> int:
    """Bytes of `num_responses` kept responses in a checkpoint, each of `max_tokens` tokens and `num_rows` routing rows.

    A token has its id and its version in int64 and log mu in fp32, 20 bytes, and mu's likeliest tokens where recorded.
    """
    top = top_token_bytes(shape, num_top, max_tokens) if num_top > 0 else 0
    return num_responses * (20 * max_tokens + routing_bytes(shape, num_rows) + top)


def predictor_parameters(shape: ModelShape) -> int:
    """Weights of all W_p: L D E (Pr2 App. E.2)."""
    return len(shape.moe_layers) * shape.hidden_size * shape.num_experts


def expert_flops_per_token(shape: ModelShape) -> int:
    """FLOPs of one token's experts, forward: 6 L (K + shared) D F (Pr2 App. E.2)."""
    experts = shape.experts_per_token * shape.num_expert_parameters + shape.num_shared_parameters
    return 2 * len(shape.moe_layers) * experts


def kv_bytes_per_token(shape: ModelShape, element_bytes: int = 2, tensor_parallel: int = 1) -> int:
    """Bytes of one token's keys and values on one GPU, over all layers.

    element_bytes x layers x 2 x (kv heads on the GPU) x head_dim (R3 Table 9: 2 x 48 x (512 + 512)); a head is repeated
    where there are fewer heads than GPUs. With latent attention: element_bytes x layers x (latent + rotary width), on
    every GPU of the engine.
    """
    latent = shape.latent_attention
    if latent is not None:
        return element_bytes * shape.num_layers * (latent.key_value_rank + latent.position_dim)
    heads = max(1, shape.num_kv_heads // tensor_parallel)
    return element_bytes * shape.num_layers * 2 * heads * shape.head_dim


# Cached: a search asks for it at every layout that fits, and it counts layer by layer.
@functools.cache
def weight_bytes(shape: ModelShape, weights: str, compute_bytes: int) -> int:
    """Bytes of all weights in the inference engine's format.

    Embedding, head, norms and routers take `compute_bytes` per element. So do the other matrices under `same`. Under
    `fp8_block` these take 1 byte, and 4 for the scale of each 128 x 128 block; under `int8` 1 byte, and 4 for each row.
    """
    matrices = quantised_parameters(shape)
    rest = shape.num_parameters - matrices
    if weights == "same":
        return compute_bytes * shape.num_parameters
    # int8 as if every row had D weights: other widths move the sum of Qwen3-30B by 0.1 %.
    num_scales = matrices / BLOCK**2 if weights == "fp8_block" else matrices / shape.hidden_size
    return round(compute_bytes * rest + matrices + 4 * num_scales)


def quantised_parameters(shape: ModelShape) -> int:
    """The number of weights that a quantised engine holds in 1 byte: attention projections, experts and dense MLPs."""
    experts = shape.num_experts * shape.num_expert_parameters
    return sum(
        quantised_dense_parameters(shape, number) + (0 if number in shape.dense_layers else experts)
        for number in range(shape.num_layers)
    )


def quantised_dense_parameters(shape: ModelShape, number: int) -> int:
    """Those of one layer outside its experts; MLA's compressions and all norms are not among them."""
    is_dense = number in shape.dense_layers
    parts = [shape.attention(number), shape.mlp(number) if is_dense else shape.shared_expert(number)]
    return sum(prod(size) for part in parts for name, size in part.values() if is_quantised(name))
