"""The Hugging Face names and shapes of every weight of a model, from its ModelShape alone.

A push is compared with this table before the engine is touched: vLLM takes a name that is missing for uninitialised
memory, with a warning at most.

Letters beyond theory/contracts.py: F hidden width of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

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


def check_weights(given: Mapping[str, Tensor], repeated: list[str], expected: Mapping[str, Shape]) -> None:
    """Raises ValueError that names the missing, unexpected, repeated and misshapen weights of a push."""
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "repeated": repeated,
        "misshapen": [
            f"{name} (expected {expected[name]}, got {tuple(tensor.shape)} {str(tensor.dtype)[6:]})"
            for name, tensor in given.items()
            if name in expected and (tuple(tensor.shape) != expected[name] or not tensor.is_floating_point())
        ],
    }
    found = "; ".join(_listed(kind, names) for kind, names in problems.items() if names)
    if found:
        raise ValueError(f"load_weights: weights do not fit the model: {found}")


def _listed(kind: str, names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{kind} {', '.join(names[:limit])}{more}"
