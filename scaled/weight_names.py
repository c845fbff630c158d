"""Every weight of a model by its Hugging Face name, with its shape, from the ModelShape alone.

Checkpoints and pushes are compared with this table before a model or an engine is touched.

Letters beyond theory/contracts.py: F hidden width of one expert.
"""

from __future__ import annotations

from scaled.model_shape import ModelShape

Shape = tuple[int, ...]


def weight_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Every weight's name, experts one by one, and its shape; a tied head has no entry."""
    V, D = shape.vocab_size, shape.hidden_size
    names: dict[str, Shape] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not shape.tied_head:
        names["lm_head.weight"] = (V, D)
    for number in range(shape.num_layers):
        prefix = f"model.layers.{number}."
        names[prefix + "input_layernorm.weight"] = (D,)
        names[prefix + "post_attention_layernorm.weight"] = (D,)
        names |= _attention(shape, prefix + "self_attn.")
        if number in shape.dense_layers:
            names |= _mlp(D, shape.dense_size, prefix + "mlp.")
        else:
            names |= _experts(shape, prefix + "mlp.")
    return names


def _attention(shape: ModelShape, prefix: str) -> dict[str, Shape]:
    D, H, h, d = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    latent = shape.latent_attention
    if latent is None:
        names: dict[str, Shape] = {
            "q_proj.weight": (H * d, D),
            "k_proj.weight": (h * d, D),
            "v_proj.weight": (h * d, D),
        }
        names["o_proj.weight"] = (D, H * d)
        if shape.qk_norm != "none":
            per_head = shape.qk_norm == "head"
            names["q_norm.weight"] = (d if per_head else H * d,)
            names["k_norm.weight"] = (d if per_head else h * d,)
        return {prefix + name: size for name, size in names.items()}
    query_dim = H * (latent.no_position_dim + latent.position_dim)
    names: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (latent.key_value_rank + latent.position_dim, D),
        "kv_a_layernorm.weight": (latent.key_value_rank,),
        "kv_b_proj.weight": (H * (latent.no_position_dim + latent.value_dim), latent.key_value_rank),
        "o_proj.weight": (D, H * latent.value_dim),
    }
    if latent.query_rank is None:
        names["q_proj.weight"] = (query_dim, D)
    else:
        names["q_a_proj.weight"] = (latent.query_rank, D)
        names["q_a_layernorm.weight"] = (latent.query_rank,)
        names["q_b_proj.weight"] = (query_dim, latent.query_rank)
    return {prefix + name: size for name, size in names.items()}


def _mlp(D: int, F: int, prefix: str) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (F, D),
        prefix + "up_proj.weight": (F, D),
        prefix + "down_proj.weight": (D, F),
    }


def _experts(shape: ModelShape, prefix: str) -> dict[str, Shape]:
    names: dict[str, Shape] = {prefix + "gate.weight": (shape.num_experts, shape.hidden_size)}
    if shape.has_selection_bias:
        names[prefix + "gate.e_score_correction_bias"] = (shape.num_experts,)
    for e in range(shape.num_experts):
        names |= _mlp(shape.hidden_size, shape.expert_size, f"{prefix}experts.{e}.")
    if shape.num_shared_experts > 0:
        names |= _mlp(shape.hidden_size, shape.num_shared_experts * shape.expert_size, prefix + "shared_experts.")
    return names
