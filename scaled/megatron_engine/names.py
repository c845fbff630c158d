"""The name rules, stated once for both directions: which Hugging Face tensors make up a Megatron parameter.

Where there are several (queries, keys and values; gate and up) each is seen as `blocks` of adjacent rows, and block i
of the parameter is the blocks i of its parts, one after the other: a tensor-parallel shard is then a run of blocks.
Imports nothing of Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scaled.model_shape import ModelShape


@dataclass(frozen=True)
class Rule:
    """One parameter's Hugging Face tensors: names, whole shapes, and the axis that tensor parallelism splits (or None).

    `blocks` interleaves several parts in that many runs of rows (key-value groups); None: one a shard. `is_expert`
    splits by expert-tensor instead of tensor parallelism. `is_copy`: another stage's parameter has the original.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None = None
    blocks: int | None = None
    is_expert: bool = False
    is_copy: bool = False


def rule(shape: ModelShape, name: str, layer: int | None = None, expert: int | None = None) -> Rule:
    """The rule of a Megatron parameter by its name within the layer (`self_attention.linear_qkv.weight`).

    Outside a layer `layer` is None; of an expert's parameter `name` is the part after its number, `expert` that number
    among all experts. Raises ValueError for a name that has no rule.
    """
    if layer is None:
        return _outer_rule(shape, name)
    if expert is not None:
        size, prefix = shape.expert_size, f"model.layers.{layer}.mlp.experts.{expert}"
        return _mlp_rule(shape, name, prefix, size, is_expert=True)
    prefix = f"model.layers.{layer}"
    if name.startswith("self_attention."):
        return _attention_rule(shape, name.removeprefix("self_attention."), f"{prefix}.self_attn")
    if name.startswith("mlp.shared_experts."):
        size = shape.num_shared_experts * shape.expert_size
        return _mlp_rule(shape, name.removeprefix("mlp.shared_experts."), f"{prefix}.mlp.shared_experts", size)
    D, E = shape.hidden_size, shape.num_experts
    plain = {
        "input_layernorm.weight": Rule((f"{prefix}.input_layernorm.weight",), ((D,),)),
        "pre_mlp_layernorm.weight": Rule((f"{prefix}.post_attention_layernorm.weight",), ((D,),)),
        "mlp.router.weight": Rule((f"{prefix}.mlp.gate.weight",), ((E, D),)),
        "mlp.router.expert_bias": Rule((f"{prefix}.mlp.gate.e_score_correction_bias",), ((E,),)),
    }
    return (
        plain[name] if name in plain else _mlp_rule(shape, name.removeprefix("mlp."), f"{prefix}.mlp", shape.dense_size)
    )


def _outer_rule(shape: ModelShape, name: str) -> Rule:
    V, D = shape.vocab_size, shape.hidden_size
    embedding = Rule(("model.embed_tokens.weight",), ((V, D),), axis=0)
    head = Rule(("lm_head.weight",), ((V, D),), axis=0)
    tied = Rule(embedding.names, embedding.shapes, axis=0, is_copy=True)
    rules = {
        "embedding.word_embeddings.weight": embedding,
        "output_layer.weight": tied if shape.tied_head else head,
        "decoder.final_layernorm.weight": Rule(("model.norm.weight",), ((D,),)),
    }
    return _known(rules, name)


def _mlp_rule(shape: ModelShape, name: str, prefix: str, size: int, is_expert: bool = False) -> Rule:
    D = shape.hidden_size
    up = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    rules = {
        "linear_fc1.weight": Rule(up, ((size, D), (size, D)), axis=0, is_expert=is_expert),
        "linear_fc2.weight": Rule((f"{prefix}.down_proj.weight",), ((D, size),), axis=1, is_expert=is_expert),
    }
    return _known(rules, name)


def _attention_rule(shape: ModelShape, name: str, prefix: str) -> Rule:
    if shape.latent_attention is not None:
        return _latent_rule(shape, name, prefix)
    D, d, H, h = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
    is_whole = shape.qk_norm == "projection"
    qkv = tuple(f"{prefix}.{part}_proj.weight" for part in "qkv")
    rules = {
        "linear_qkv.weight": Rule(qkv, ((H * d, D), (h * d, D), (h * d, D)), axis=0, blocks=h),
        "linear_proj.weight": Rule((f"{prefix}.o_proj.weight",), ((D, H * d),), axis=1),
        "q_layernorm.weight": Rule(
            (f"{prefix}.q_norm.weight",), ((H * d if is_whole else d,),), 0 if is_whole else None
        ),
        "k_layernorm.weight": Rule(
            (f"{prefix}.k_norm.weight",), ((h * d if is_whole else d,),), 0 if is_whole else None
        ),
    }
    return _known(rules, name)


def _latent_rule(shape: ModelShape, name: str, prefix: str) -> Rule:
    a, D, H = shape.latent_attention, shape.hidden_size, shape.num_heads
    assert a is not None
    query_size, rank = H * (a.no_position_dim + a.position_dim), a.query_rank or 0
    expanded = H * (a.no_position_dim + a.value_dim)
    table: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "linear_q_proj": ("q_proj", (query_size, D), 0),
        "linear_q_down_proj": ("q_a_proj", (rank, D), 0),
        "linear_q_up_proj": ("q_b_proj", (query_size, rank), 0),
        "q_layernorm": ("q_a_layernorm", (rank,), None),
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (a.key_value_rank + a.position_dim, D), 0),
        "linear_kv_up_proj": ("kv_b_proj", (expanded, a.key_value_rank), 0),
        "kv_layernorm": ("kv_a_layernorm", (a.key_value_rank,), None),
        "linear_proj": ("o_proj", (D, H * a.value_dim), 1),
    }
    theirs, size, axis = _known(table, name.removesuffix(".weight"))
    return Rule((f"{prefix}.{theirs}.weight",), (size,), axis)


def _known(rules: dict[str, Any], name: str) -> Any:
    if name not in rules:
        raise ValueError(f"expected one of the parameters {', '.join(rules)}, got {name}")
    return rules[name]


__all__ = ["Rule", "rule"]
