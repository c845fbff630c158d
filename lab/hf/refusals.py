"""Refusals of config.json with their reasons, one list for both worlds; every other field is computed as stated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lab.hf.families import BOTH, FAMILIES, Family, World


@dataclass(frozen=True)
class Plain:
    """A field that must be absent, null or `value`; `why` is the reason in the message."""

    field: str
    value: Any
    why: str
    worlds: tuple[World, ...] = BOTH


PLAIN = (
    Plain("attention_bias", False, "attention has no biases"),
    Plain("qkv_bias", False, "attention has no biases"),
    Plain("mlp_bias", False, "MLPs have no biases"),
    Plain("hidden_act", "silu", "MLPs are gated by it"),
    Plain("clip_qkv", None, "queries, keys and values are not clipped"),
    Plain("use_sliding_window", False, "a token sees all before it"),
    Plain("partial_rotary_factor", 1.0, "heads are rotated whole"),
    Plain("attention_dropout", 0.0, "a pass repeats its bits"),
    Plain("router_jitter_noise", 0.0, "a pass repeats its bits"),
    Plain("quantization_config", None, "weights are floating-point numbers"),
    Plain("moe_layer_freq", 1, "every layer after the dense ones has experts"),
    Plain("decoder_sparse_step", 1, "another was never tried with Megatron-core and vLLM", worlds=("scaled",)),
)
# Fields that only configs with latent attention have (DeepSeek-V2 and V3, Moonlight, Kimi).
LATENT = ("kv_lora_rank", "q_lora_rank")


def known_family(fields: dict[str, Any], world: World | None) -> Family:
    """The row of the file's class, or of its model_type where it names no class; ValueError where `world` has none."""
    names, model_type = fields.get("architectures") or [], fields.get("model_type")
    meant = [row for row in FAMILIES.values() if (names == [row.hf_class] if names else model_type in row.model_types)]
    opened = [row for row in FAMILIES.values() if world is None or world in row.worlds]
    found = [row for row in meant if row in opened]
    # Before the class: a file of an unknown class with latent attention is refused for its attention.
    _refuse_latent(fields, found or opened, names)
    if not found:
        expected = ", ".join(row.hf_class for row in opened)
        got = names if names else f"{names} with model_type {json.dumps(model_type)}"
        other = f", which only backend {meant[0].worlds[0]} opens" if meant else ""
        raise ValueError(f"architectures: expected one of {expected}, got {got}{other}")
    if model_type not in (None, *found[0].model_types):
        raise ValueError(
            f"model_type: expected {found[0].model_type}, that of {found[0].hf_class}, got {json.dumps(model_type)}"
        )
    return found[0]


def _refuse_latent(fields: dict[str, Any], rows: list[Family], names: list[str]) -> None:
    if any(row.is_latent for row in rows):
        return
    for name in LATENT:
        if fields.get(name) is not None:
            opens, came = ", ".join(row.hf_class for row in rows), ", ".join(names) or "no named class"
            raise ValueError(
                f"{name}: expected none (the grouped-query attention of {opens}), got {json.dumps(fields[name])}, the "
                f"latent attention of {came}"
            )


def refuse(fields: dict[str, Any], family: Family, world: World | None) -> None:
    """ValueError names the field, its plain value and the reason, where it would change the model's computation."""
    for row in PLAIN:
        value = fields.get(row.field)
        if value is not None and value != row.value and (world is None or world in row.worlds):
            raise _refusal(row.field, row.value, row.why, value)
    _refuse_windows(fields, family)
    if family.is_latent and fields.get("rope_interleave") is False:
        raise _refusal("rope_interleave", True, "neighbours are rotated", False)
    if family.is_greedy:
        _refuse_unused_gate(fields)


def _refuse_windows(fields: dict[str, Any], family: Family) -> None:
    window, why = fields.get("sliding_window"), "a token sees all before it"
    # Qwen files have a window that use_sliding_window switches off; elsewhere a width alone switches it on.
    if family.window == "set" and window is not None:
        raise _refusal("sliding_window", None, why, window)
    layers = fields.get("layer_types") or []
    # Absent fields have Dots1's defaults in transformers: a window of 4096 from layer 62 on.
    if family.window == "layers" and not layers and fields.get("sliding_window", 4096) is not None:
        is_windowed = int(fields["num_hidden_layers"]) > int(fields.get("max_window_layers", 62))
        layers = ["sliding_attention"] * is_windowed
    if odd := sorted(set(layers) - {"full_attention"}):
        raise ValueError(f"layer_types: expected full_attention alone ({why}), got {', '.join(odd)}")


def _refuse_unused_gate(fields: dict[str, Any]) -> None:
    """ValueError for a field of the gate that DeepSeek-V2's class in transformers ignores and other engines use."""
    method = fields.get("topk_method") or "greedy"
    if method == "noaux_tc":  # not a method of that class: the gate is the file's own
        return
    if fields.get("norm_topk_prob"):
        raise _refusal("norm_topk_prob", False, "DeepSeek-V2 never renormalises", True)
    groups, top_groups = (fields.get(name) or 1 for name in ("n_group", "topk_group"))
    if method != "group_limited_greedy" and top_groups < groups:
        raise _refusal("topk_group", groups, f"topk_method {method} chooses from all groups", top_groups)


def _refusal(field: str, plain: Any, why: str, value: Any) -> ValueError:
    return ValueError(f"{field}: expected {json.dumps(plain)} ({why}), got {json.dumps(value)}")
