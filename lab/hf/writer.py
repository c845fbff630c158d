"""A ModelShape as config.json, under the public architecture that computes exactly it, or under our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lab.hf.families import FAMILIES, OWN, Family
from lab.hf.reader import OWN_GATE, parse_shape
from lab.hf.shape import ModelShape

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def family_of(shape: ModelShape) -> str:
    """The first architecture whose config.json states this model exactly, whatever `shape.family` says."""
    wanted = _without_what_is_unused(shape)
    for row in FAMILIES.values():
        # `config_fields` writes grouped-query attention alone.
        if not row.is_latent and _states(row, wanted):
            return row.model_type
    return OWN


def _states(family: Family, shape: ModelShape) -> bool:
    # A round trip is the proof: what the file states, read back, must be this model.
    named = replace(shape, family=family.model_type)
    try:
        return parse_shape(config_fields(named)) == named
    except ValueError:
        return False


def _without_what_is_unused(shape: ModelShape) -> ModelShape:
    # A size that no weight has must not decide whether the round trip of `_states` is exact.
    plain = shape if shape.dense_layers else replace(shape, dense_size=0)
    if shape.moe_layers:
        return plain
    unset = {name: getattr(ModelShape, name) for name in _OF_EXPERTS}
    return replace(plain, **unset)


_OF_EXPERTS = (
    "num_experts", "experts_per_token", "expert_size", "shared_expert_size", "shared_expert_gate", "gate",
    "has_selection_bias",
)  # fmt: skip


def in_full(fields: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """A config.json's fields, with those of the selection bias that vLLM needs and transformers 5 omits.

    Without them vLLM computes a softmax without the bias.
    """
    if not shape.has_selection_bias:
        return dict(fields)
    return fields | {"topk_method": "noaux_tc", "scoring_func": shape.gate.score}


def with_special_ids(fields: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's fields, with the start, end and padding tokens of the one that the model was opened from.

    A token that it leaves out is left out here, too: it is the default of the class, which is the same.
    """
    others = {name: value for name, value in fields.items() if name not in SPECIAL_IDS}
    return others | {name: source[name] for name in SPECIAL_IDS if name in source}


def config_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json for this model under `shape.family`, an architecture with grouped-query attention."""
    family = FAMILIES[shape.family]
    fields: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # Under both names: transformers 5 reads the second, earlier versions the first.
        "rope_theta": shape.rope_theta,
        **_rotation(shape),
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_head,
        "attention_bias": False,
        # An absent field would have the class's default: OLMoE's end token is 50279.
        **dict.fromkeys(SPECIAL_IDS),
    }
    return fields | _mlp_fields(shape, family)


def _rotation(shape: ModelShape) -> dict[str, Any]:
    if shape.yarn is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}}
    rope = shape.yarn.fields(shape.rope_theta)
    return {"rope_parameters": rope, "rope_scaling": rope}


def _mlp_fields(shape: ModelShape, family: Family) -> dict[str, Any]:
    dense = {} if family.dense == "none" else {"intermediate_size": shape.dense_size}
    if family.dense == "all":
        return dense
    fields: dict[str, Any] = {
        "num_experts_per_tok": shape.experts_per_token,
        # A softmax over the chosen experts equals the renormalised softmax over all, but for rounding.
        "norm_topk_prob": shape.gate.renormalise or shape.gate.order == "after",
        family.num_experts: shape.num_experts,
    }
    if family.gate == "deepseek":
        fields["n_shared_experts"] = shape.shared_expert_size // max(1, shape.expert_size)
    fields |= {family.expert_size: shape.expert_size, **dense}
    if family.dense == "first":
        fields["first_k_dense_replace"] = len(shape.dense_layers)
    elif family.dense == "listed":
        fields |= {"mlp_only_layers": list(shape.dense_layers), "decoder_sparse_step": 1}
    if family.gate == "deepseek":
        fields |= {"n_group": shape.gate.num_groups, "topk_group": shape.gate.num_top_groups}
        fields["routed_scaling_factor"] = shape.gate.scaling
    if family.window == "layers":
        fields["sliding_window"] = None  # absent, it would be transformers' default of 4096
    return fields | _own_fields(shape, family)


def _own_fields(shape: ModelShape, family: Family) -> dict[str, Any]:
    gate = shape.gate
    if family.is_own:
        names = ("qk_norm", "shared_expert_size", "shared_expert_gate")
        return {name: getattr(shape, name) for name in names} | {OWN_GATE: asdict(gate)}
    is_plain_after = gate.order == "after" and (gate.scaling, gate.num_groups) == (1.0, 1)
    # Our reader takes the gate exactly; transformers ignores the field and computes the renormalised softmax.
    return {OWN_GATE: asdict(gate)} if family.softmax_after and is_plain_after else {}
