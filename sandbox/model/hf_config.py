"""Hugging Face's config.json and our ModelConfig, in both directions; what the decoder cannot do is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Literal

from sandbox.model.config import ModelConfig
from theory.routing.gates import GATES, Gate

Family = Literal["qwen3_moe", "olmoe", "mixtral", "qwen3", "dots1", "firstorder_moe"]

HF_CLASSES: dict[Family, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "firstorder_moe": "FirstOrderMoEForCausalLM",
}

# Fields that must be absent, null or this value: anything else would change what the model computes.
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    "clip_qkv": None,
    "rope_scaling": None,
    "quantization_config": None,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
}
# What transformers assumes where a file is silent.
DEFAULT_EPS = {"qwen3_moe": 1e-6, "qwen3": 1e-6, "olmoe": 1e-5, "mixtral": 1e-5, "dots1": 1e-6, "firstorder_moe": 1e-6}
DEFAULT_THETA = {"mixtral": 1e6}
QK_NORM: dict[Family, Literal["head", "projection", "none"]] = {
    "qwen3_moe": "head",
    "qwen3": "head",
    "olmoe": "projection",
    "mixtral": "none",
    "dots1": "head",
}
# Fields that only configs with latent attention have (DeepSeek-V2 and V3, Moonlight, Kimi).
LATENT = ("kv_lora_rank", "q_lora_rank")
OWN_FIELDS = ("shared_expert_size", "shared_expert_gate")


def family(config: ModelConfig) -> Family:
    """The public architecture that computes exactly what `config` says, or our own where there is none."""
    gate = config.gate
    plain_gate = (gate.score, gate.scaling, gate.num_groups) == ("softmax", 1.0, 1)
    if not config.moe_layers:
        return "qwen3" if config.qk_norm == "head" else "firstorder_moe"
    if _is_dots1(config):
        return "dots1"
    if not plain_gate or config.shared_expert_size > 0:
        return "firstorder_moe"
    if config.qk_norm == "head":
        # A softmax over the chosen ones is the renormalised softmax over all, but for rounding.
        return "qwen3_moe"
    if config.dense_layers or gate.order == "after":
        return "firstorder_moe"
    if config.qk_norm == "none":
        return "mixtral" if gate.renormalise else "firstorder_moe"
    return "olmoe" if config.head_dim * config.num_heads == config.hidden_size else "firstorder_moe"


def _is_dots1(config: ModelConfig) -> bool:
    """dots.llm1 is DeepSeek-V3's experts under Qwen3's attention: sigmoid gate, shared experts, dense layers first."""
    shared, gate = config.shared_expert_size, config.gate
    return (
        (gate.score, gate.group_score, config.qk_norm) == ("sigmoid", "top2_sum", "head")
        and not config.shared_expert_gate and shared > 0 and shared % config.expert_size == 0
        and config.dense_layers == tuple(range(len(config.dense_layers)))
        and config.num_experts >= 2 * gate.num_groups
    )  # fmt: skip


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for this model."""
    kind = family(config)
    fields: dict[str, Any] = {
        "architectures": [HF_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "qwen3":
        return fields | {"intermediate_size": config.dense_size}
    fields |= {"num_experts_per_tok": config.experts_per_token, "norm_topk_prob": _sums_to_one(config.gate)}
    if kind == "mixtral":
        return fields | {"num_local_experts": config.num_experts, "intermediate_size": config.expert_size}
    if kind == "dots1":
        return fields | {
            "n_routed_experts": config.num_experts,
            "n_shared_experts": config.shared_expert_size // config.expert_size,
            "moe_intermediate_size": config.expert_size,
            "intermediate_size": config.dense_size,
            "first_k_dense_replace": len(config.dense_layers),
            "n_group": config.gate.num_groups,
            "topk_group": config.gate.num_top_groups,
            "norm_topk_prob": config.gate.renormalise,
            "routed_scaling_factor": config.gate.scaling,
            "sliding_window": None,
        }
    fields["num_experts"] = config.num_experts
    if kind == "olmoe":
        return fields | {"intermediate_size": config.expert_size}
    fields |= {
        "moe_intermediate_size": config.expert_size,
        "intermediate_size": config.dense_size,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
    }
    if kind == "firstorder_moe":
        fields |= {name: getattr(config, name) for name in ("qk_norm", *OWN_FIELDS)}
    if kind == "firstorder_moe" or config.gate.order == "after":
        fields["firstorder_gate"] = asdict(config.gate)
    return fields


def _sums_to_one(gate: Gate) -> bool:
    return gate.renormalise or gate.order == "after"


def config_from_hf(fields: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The ModelConfig of a config.json. ValueError names `where`, the field, what came and what was expected."""
    try:
        return _parse(fields)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where}: {reason}") from None


def _parse(fields: dict[str, Any]) -> ModelConfig:
    kind = _kind(fields)
    theta = _check_plain(fields, kind)
    num_layers, num_heads, hidden_size = (
        int(fields[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    # transformers' Qwen3 assumes heads of 128 where the file is silent, the others D / H.
    default_head_dim = 128 if kind == "qwen3" else hidden_size // num_heads
    config = ModelConfig(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(fields["num_key_value_heads"] or num_heads),
        head_dim=int(fields.get("head_dim") or default_head_dim),
        dense_size=0 if kind in ("olmoe", "mixtral") else int(fields["intermediate_size"]),
        dense_layers=_dense_layers(fields, kind, num_layers),
        qk_norm=fields["qk_norm"] if kind == "firstorder_moe" else QK_NORM[kind],
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(fields.get("rms_norm_eps", DEFAULT_EPS[kind])),
        rope_theta=theta,
        max_positions=int(fields.get("max_position_embeddings", 4096)),
        **({} if kind == "qwen3" else _experts(fields, kind)),
    )
    if kind == "olmoe" and config.head_dim * num_heads != hidden_size:
        raise ValueError(f"head_dim: expected {hidden_size // num_heads} (hidden_size / heads), got {config.head_dim}")
    return config


def _kind(fields: dict[str, Any]) -> Family:
    names = fields.get("architectures") or []
    for name in LATENT:
        if fields.get(name) is not None:
            opens, came = ", ".join(HF_CLASSES.values()), ", ".join(names) or "no named class"
            raise ValueError(
                f"{name}: expected none (this decoder has the grouped-query attention of {opens}), "
                f"got {_json(fields[name])}, the latent attention of {came}"
            )
    by_class: dict[str, Family] = {name: kind for kind, name in HF_CLASSES.items()}
    if len(names) != 1 or names[0] not in by_class:
        raise ValueError(f"architectures: expected one of {', '.join(by_class)}, got {names}")
    return by_class[names[0]]


def _check_plain(fields: dict[str, Any], kind: Family) -> float:
    for name, plain in PLAIN.items():
        value = fields.get(name)
        if value is not None and value != plain and not (name == "rope_scaling" and _is_default_rope(value)):
            raise ValueError(f"{name}: this decoder has only {_json(plain)}, got {_json(value)}")
    # Qwen files carry a window that their use_sliding_window switches off; elsewhere a window is a window.
    if kind in ("mixtral", "olmoe") and fields.get("sliding_window") is not None:
        raise ValueError(f"sliding_window: this decoder has only null, got {fields['sliding_window']}")
    layer_types = fields.get("layer_types") or []
    if kind == "dots1" and not layer_types and fields.get("sliding_window", 4096) is not None:
        first, last = int(fields.get("max_window_layers", 62)), int(fields["num_hidden_layers"])
        layer_types = ["sliding_attention"] * (last > first)
    odd = set(layer_types) - {"full_attention"}
    if odd:
        raise ValueError(f"layer_types: this decoder has only full_attention, got {', '.join(sorted(odd))}")
    rope = fields.get("rope_parameters") or {}
    if not _is_default_rope(rope):
        raise ValueError(f"rope_parameters: this decoder has only the default rotation, got {_json(rope)}")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor: this decoder has only 1.0, got {fields['partial_rotary_factor']}")
    return float(rope.get("rope_theta", fields.get("rope_theta") or DEFAULT_THETA.get(kind, 1e4)))


def _is_default_rope(rope: Any) -> bool:
    known = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    return isinstance(rope, dict) and all(name == "rope_theta" or known.get(name) == v for name, v in rope.items())


def _dense_layers(fields: dict[str, Any], kind: Family, num_layers: int) -> tuple[int, ...]:
    if kind == "qwen3":
        return tuple(range(num_layers))
    if kind in ("olmoe", "mixtral"):
        return ()
    if kind == "dots1":
        return tuple(range(int(fields.get("first_k_dense_replace") or 0)))
    only = set(fields.get("mlp_only_layers") or ())
    step = int(fields.get("decoder_sparse_step", 1))
    has_experts = int(fields.get("num_experts", fields.get("num_local_experts", 0))) > 0
    return tuple(n for n in range(num_layers) if n in only or not has_experts or (n + 1) % step != 0)


def _experts(fields: dict[str, Any], kind: Family) -> dict[str, Any]:
    if kind == "dots1":
        return _dots1_experts(fields)
    count = fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    size = fields["moe_intermediate_size"] if kind in ("qwen3_moe", "firstorder_moe") else fields["intermediate_size"]
    sums_to_one = kind == "mixtral" or bool(fields.get("norm_topk_prob", False))
    own = {name: fields[name] for name in OWN_FIELDS} if kind == "firstorder_moe" else {}
    gate = GATES["qwen3" if sums_to_one else "olmoe"]
    if "firstorder_gate" in fields:
        gate = Gate(**fields["firstorder_gate"])
    return {
        "num_experts": int(count),
        "experts_per_token": int(fields["num_experts_per_tok"]),
        "expert_size": int(size),
        "gate": gate,
        **own,
    }


def _dots1_experts(fields: dict[str, Any]) -> dict[str, Any]:
    num_groups, num_top_groups = (int(fields.get(name) or 1) for name in ("n_group", "topk_group"))
    scaling, renormalise = float(fields.get("routed_scaling_factor", 1.0)), bool(fields.get("norm_topk_prob", False))
    size = int(fields["moe_intermediate_size"])
    return {
        "num_experts": int(fields["n_routed_experts"]),
        "experts_per_token": int(fields["num_experts_per_tok"]),
        "expert_size": size,
        "shared_expert_size": size * _num_shared(fields["n_shared_experts"]),
        "gate": Gate("sigmoid", "before", renormalise, scaling, num_groups, num_top_groups, "top2_sum"),
    }


def _num_shared(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"n_shared_experts: expected at least 1 in Dots1ForCausalLM, got {_json(value)}")
    return value


def _json(value: Any) -> str:
    """A field's value as it stands in the file, on one line."""
    return json.dumps(value)
