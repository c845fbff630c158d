"""The name rules for both directions: the Hugging Face tensors that make up a Megatron parameter.

Where there are several (queries, keys and values; gate and up), each is cut into `blocks` of adjacent rows, and block i
of the parameter is the blocks i of its parts, one after the other: a tensor-parallel shard is then a run of blocks.
The tensors' own names and shapes are lab/hf's. Imports nothing of Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from lab.hf import ModelShape
from lab.hf.shape import Parts


@dataclass(frozen=True)
class WeightRule:
    """One parameter's Hugging Face tensors: names, whole shapes, and the axis that tensor parallelism splits (or None).

    `blocks` interleaves several parts in that many runs of rows (key-value groups); None: one per shard. `is_expert`
    splits by expert-tensor instead of tensor parallelism. `is_copy`: another stage's parameter is the original.
    `is_router`: a gate or its selection bias.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None = None
    blocks: int | None = None
    is_expert: bool = False
    is_copy: bool = False
    is_router: bool = False

    def parts(self, tensor: Tensor, num_shards: int = 1) -> list[Tensor]:
        """Views of the parameter's tensor, or of one of its shards: the rows of each part, (blocks, rows, ...)."""
        if len(self.names) == 1:
            return [tensor]
        # Without `blocks` each shard stacks its own pieces of the parts: its gate rows, then its up rows.
        total = self.blocks or num_shards
        rows = [size[0] // total for size in self.shapes]
        return list(tensor.unflatten(0, (total // num_shards, sum(rows))).split(rows, dim=1))


# Megatron's name without `.weight`: its parts in lab/hf's table, and the axis that is split.
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


def rule(shape: ModelShape, name: str, layer: int | None = None, expert: int | None = None) -> WeightRule:
    """The rule of a Megatron parameter by its name within the layer (`self_attention.linear_qkv.weight`).

    Outside a layer `layer` is None; of an expert's parameter `name` is the part after its number, `expert` that number
    among all experts. Raises ValueError for a name that has no rule.
    """
    name = name.removesuffix(".weight")
    if layer is None:
        # A last stage without the embedding holds a copy of it, under the head's name.
        is_tied_head = name == "output_layer" and shape.tied_head
        return _rule(OUTER, shape.outer(), "embedding.word_embeddings" if is_tied_head else name, is_copy=is_tied_head)
    if expert is not None:
        return _rule(MLP, shape.expert(layer, expert), name, is_expert=True)
    if name.startswith("self_attention."):
        return _attention_rule(shape, layer, name.removeprefix("self_attention."))
    if name.startswith("mlp.shared_experts."):
        return _rule(MLP, shape.shared_expert(layer), name.removeprefix("mlp.shared_experts."))
    if name.startswith("mlp.router"):
        return _rule(ROUTER, shape.router(layer), name.removeprefix("mlp."), is_router=True)
    if name.startswith("mlp."):
        return _rule(MLP, shape.mlp(layer), name.removeprefix("mlp."))
    return _rule(NORMS, shape.norms(layer), name)


@dataclass(frozen=True)
class Stored:
    """A parameter's place in a checkpoint: its key, and its expert where the key stacks all experts of a layer."""

    key: str
    expert: int | None
    rule: WeightRule


def stored(shape: ModelShape) -> Iterator[Stored]:
    """Every parameter of the model once, as Megatron's sharded checkpoints name it; a tied head has no entry."""
    for name in _known(OUTER, shape.outer()):
        yield Stored(f"{name}.weight", None, rule(shape, name))
    for layer in range(shape.num_layers):
        prefix = f"decoder.layers.{layer}."
        attention = LATENT_ATTENTION if shape.latent_attention is not None else ATTENTION
        inner = _known(NORMS, shape.norms(layer))
        inner += [f"self_attention.{name}" for name in _known(attention, shape.attention(layer))]
        if layer in shape.dense_layers:
            inner += [f"mlp.{name}" for name in _known(MLP, shape.mlp(layer))]
        else:
            inner += [f"mlp.{name}" for name in _known(ROUTER, shape.router(layer))]
            inner += [f"mlp.shared_experts.{name}" for name in _known(MLP, shape.shared_expert(layer))]
        for name in inner:
            key = name if name.endswith("expert_bias") else f"{name}.weight"
            yield Stored(prefix + key, None, rule(shape, name, layer))
        for expert in range(0 if layer in shape.dense_layers else shape.num_experts):
            for name in MLP:
                key = f"{prefix}mlp.experts.experts.{name}.weight"
                yield Stored(key, expert, rule(shape, name, layer, expert))


def _attention_rule(shape: ModelShape, layer: int, name: str) -> WeightRule:
    parts = shape.attention(layer)
    if shape.latent_attention is not None:
        return _rule(LATENT_ATTENTION, parts, name)
    if name == "linear_qkv":
        # Megatron stacks the queries of a key-value group, its key and its value, group by group.
        return _rule(ATTENTION, parts, name, blocks=shape.num_kv_heads)
    # A norm over the whole projection is split with its heads.
    is_split_norm = name.endswith("_layernorm") and shape.qk_norm == "projection"
    return _rule(ATTENTION, parts, name, **({"axis": 0} if is_split_norm else {}))


def _rule(named: Named, parts: Parts, name: str, **changes: int | bool) -> WeightRule:
    known = _known(named, parts)
    if name not in known:
        raise ValueError(f"expected one of the parameters {', '.join(known)}, got {name}")
    of, axis = named[name]
    names, shapes = zip(*(parts[part] for part in of), strict=True)
    return WeightRule(names, shapes, **{"axis": axis, **changes})


def _known(named: Named, parts: Parts) -> list[str]:
    """The parameters of which the model has all parts."""
    return [one for one, (of, _) in named.items() if parts.keys() >= set(of)]


__all__ = ["WeightRule", "Stored", "rule", "stored"]
