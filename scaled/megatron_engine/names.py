"""The name rules, stated once for both directions: which Hugging Face tensors make up a Megatron parameter.

Where there are several (queries, keys and values; gate and up) each is seen as `blocks` of adjacent rows, and block i
of the parameter is the blocks i of its parts, one after the other: a tensor-parallel shard is then a run of blocks.
The tensors' own names and shapes are lab/hf's. Imports nothing of Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.hf import ModelShape
from lab.hf.shape import Parts


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


# Megatron's name without `.weight`: the parts of it in lab/hf's table, and the axis that is split.
Named = Mapping[str, tuple[tuple[str, ...], int | None]]
OUTER: Named = {
    "embedding.word_embeddings": (("embedding",), 0),
    "output_layer": (("head",), 0),
    "decoder.final_layernorm": (("norm",), None),
}
NORMS: Named = {"input_layernorm": (("attention",), None), "pre_mlp_layernorm": (("mlp",), None)}
ROUTER: Named = {"router": (("router",), None), "router.expert_bias": (("selection_bias",), None)}
MLP: Named = {"linear_fc1": (("gate", "up"), 0), "linear_fc2": (("down",), 1)}
ATTENTION: Named = {
    "linear_qkv": (("q_proj", "k_proj", "v_proj"), 0),
    "linear_proj": (("o_proj",), 1),
    "q_layernorm": (("q_norm",), None),
    "k_layernorm": (("k_norm",), None),
}
LATENT_ATTENTION: Named = {
    "linear_q_proj": (("q_proj",), 0),
    "linear_q_down_proj": (("q_a_proj",), 0),
    "linear_q_up_proj": (("q_b_proj",), 0),
    "q_layernorm": (("q_a_layernorm",), None),
    "linear_kv_down_proj": (("kv_a_proj_with_mqa",), 0),
    "linear_kv_up_proj": (("kv_b_proj",), 0),
    "kv_layernorm": (("kv_a_layernorm",), None),
    "linear_proj": (("o_proj",), 1),
}


def rule(shape: ModelShape, name: str, layer: int | None = None, expert: int | None = None) -> Rule:
    """The rule of a Megatron parameter by its name within the layer (`self_attention.linear_qkv.weight`).

    Outside a layer `layer` is None; of an expert's parameter `name` is the part after its number, `expert` that number
    among all experts. Raises ValueError for a name that has no rule.
    """
    name = name.removesuffix(".weight")
    if layer is None:
        is_tied_head = name == "output_layer" and shape.tied_head
        return _rule(OUTER, shape.outer(), "embedding.word_embeddings" if is_tied_head else name, is_copy=is_tied_head)
    if expert is not None:
        return _rule(MLP, shape.expert(layer, expert), name, is_expert=True)
    if name.startswith("self_attention."):
        return _attention_rule(shape, layer, name.removeprefix("self_attention."))
    if name.startswith("mlp.shared_experts."):
        return _rule(MLP, shape.shared_expert(layer), name.removeprefix("mlp.shared_experts."))
    if name.startswith("mlp.router"):
        return _rule(ROUTER, shape.router(layer), name.removeprefix("mlp."))
    if name.startswith("mlp."):
        return _rule(MLP, shape.mlp(layer), name.removeprefix("mlp."))
    return _rule(NORMS, shape.norms(layer), name)


def _attention_rule(shape: ModelShape, layer: int, name: str) -> Rule:
    parts = shape.attention(layer)
    if shape.latent_attention is not None:
        return _rule(LATENT_ATTENTION, parts, name)
    if name == "linear_qkv":
        return _rule(ATTENTION, parts, name, blocks=shape.num_kv_heads)
    # A norm over the whole projection is split with its heads.
    is_split_norm = name.endswith("_layernorm") and shape.qk_norm == "projection"
    return _rule(ATTENTION, parts, name, **({"axis": 0} if is_split_norm else {}))


def _rule(named: Named, parts: Parts, name: str, **changes: int | bool) -> Rule:
    known = [one for one, (of, _) in named.items() if parts.keys() >= set(of)]
    if name not in known:
        raise ValueError(f"expected one of the parameters {', '.join(known)}, got {name}")
    of, axis = named[name]
    names, shapes = zip(*(parts[part] for part in of), strict=True)
    return Rule(names, shapes, **{"axis": axis, **changes})


__all__ = ["Rule", "rule"]
