"""The one reader of config.json, for both worlds: from its fields to a ModelShape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.hf.families import Family, World
from lab.hf.kinds import check_dense, check_kinds
from lab.hf.refusals import known_family, refuse
from lab.hf.shape import LatentAttention, ModelShape
from lab.hf.yarn import Yarn, read_yarn, stated_rope
from theory.routing.gates import Gate

OWN_GATE = "firstorder_gate"
"""The field that states a gate in full, where the class's own fields cannot."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a Hugging Face folder. FileNotFoundError or ValueError names it in one line."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected a Hugging Face folder with config.json and safetensors"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_shape(fields: dict[str, Any], where: str = "config.json", world: World | None = None) -> ModelShape:
    """The shape that a config.json states, of an architecture that `world` opens (None: any of the table).

    Raises ValueError that names `where`, the field, the expected value and the one found.
    """
    try:
        check_kinds(fields)
        family = known_family(fields, world)
        refuse(fields, family, world)
        return _shape(dict(family.absent) | fields, family, read_yarn(fields, family, world))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where}: {reason}") from None


def _shape(fields: dict[str, Any], family: Family, yarn: Yarn | None) -> ModelShape:
    check_dense(fields, family)
    num_layers, num_heads, hidden_size = (
        _at_least_1(fields, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    latent = _latent(fields) if family.is_latent else None
    # MLA has no key-value heads of its own, so its files may omit the field.
    num_kv_heads = fields.get("num_key_value_heads") if latent else fields["num_key_value_heads"]
    # As in transformers 5: one of the two, and the field beside the others only where that one has no base.
    _, rope = stated_rope(fields)
    shape = ModelShape(
        family=family.model_type,
        vocab_size=int(_stated(fields, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(num_kv_heads or num_heads),
        # MLA's values have a width of their own; null or 0 in the file means the family's default.
        head_dim=latent.value_dim
        if latent
        else int(fields.get("head_dim") or family.head_dim or hidden_size // num_heads),
        qk_norm=family.qk_norm or _qk_norm(fields),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(_stated(fields, "rms_norm_eps", family.norm_eps)),
        rope_theta=float(rope.get("rope_theta", fields.get("rope_theta") or family.rope_theta)),
        max_positions=int(_stated(fields, "max_position_embeddings", 4096)),
        dense_size=0 if family.dense == "none" else int(_stated(fields, "intermediate_size")),
        dense_layers=_dense_layers(fields, family, num_layers),
        latent_attention=latent,
        yarn=yarn,
        **({} if family.dense == "all" else _experts(fields, family)),
    )
    # transformers gives OLMoE's norm of queries hidden_size weights, whatever head_dim is.
    if shape.qk_norm == "projection" and not family.is_own and shape.head_dim * num_heads != hidden_size:
        raise ValueError(f"head_dim: expected {hidden_size // num_heads} (hidden_size / heads), got {shape.head_dim}")
    return shape


def _stated(fields: dict[str, Any], name: str, default: Any = None) -> Any:
    """The field, or `default` where it is absent or null; KeyError, with its name, where there is no default."""
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise KeyError(name)
    return value


def _at_least_1(fields: dict[str, Any], name: str) -> int:
    value = int(_stated(fields, name))
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def _qk_norm(fields: dict[str, Any]) -> Any:
    value = fields["qk_norm"]
    if value not in ("head", "projection", "none"):
        raise ValueError(f"qk_norm: expected head, projection or none, got {json.dumps(value)}")
    return value


def _latent(fields: dict[str, Any]) -> LatentAttention:
    query_rank = fields.get("q_lora_rank")
    return LatentAttention(
        query_rank=None if query_rank is None else int(query_rank),
        key_value_rank=int(_stated(fields, "kv_lora_rank")),
        no_position_dim=int(_stated(fields, "qk_nope_head_dim")),
        position_dim=int(_stated(fields, "qk_rope_head_dim")),
        value_dim=int(_stated(fields, "v_head_dim")),
    )


def _dense_layers(fields: dict[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family.dense == "none":
        return ()
    # Without experts transformers makes every layer of Qwen3-MoE dense, whatever the other fields say.
    if family.dense == "all" or (family.dense == "listed" and _num_experts(fields, family) == 0):
        return tuple(range(num_layers))
    if family.dense == "first":
        return tuple(range(min(num_layers, int(fields.get("first_k_dense_replace") or 0))))
    step = 1 if fields.get("decoder_sparse_step") is None else _at_least_1(fields, "decoder_sparse_step")
    only = set(fields.get("mlp_only_layers") or ())
    # As in transformers: of every `step` layers the last one has experts.
    return tuple(n for n in range(num_layers) if n in only or (n + 1) % step != 0)


def _num_experts(fields: dict[str, Any], family: Family) -> int:
    # transformers 5 saves Qwen3-MoE with Mixtral's name for this field.
    other = fields.get("num_local_experts") if family.gate == "qwen" else None
    return int(_stated(fields, family.num_experts) if other is None else other)


def _experts(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    gate = _grouped_gate(fields, family) if family.gate == "deepseek" else _plain_gate(fields, family)
    size, shared = int(_stated(fields, family.expert_size)), {}
    if family.gate == "deepseek":
        shared = {"shared_expert_size": size * _num_shared(fields, family)}
    elif family.is_own:
        shared = {name: _stated(fields, name) for name in ("shared_expert_size", "shared_expert_gate")}
    # Sigmoid gates choose with a bias; a DeepSeek file may state one for any score, by its topk_method.
    is_biased = family.score == "sigmoid" or (family.is_own and gate.score == "sigmoid")
    return {
        "num_experts": _num_experts(fields, family),
        "experts_per_token": int(_stated(fields, "num_experts_per_tok")),
        "expert_size": size,
        **shared,
        "gate": gate,
        "has_selection_bias": is_biased or (family.states_score and fields.get("topk_method") == "noaux_tc"),
    }


def _num_shared(fields: dict[str, Any], family: Family) -> int:
    value, least = fields.get("n_shared_experts"), family.min_shared_experts
    if (value is not None or least) and (not isinstance(value, int) or value < least):
        raise ValueError(f"n_shared_experts: expected at least {least} in {family.hf_class}, got {json.dumps(value)}")
    return value or 0


def _plain_gate(fields: dict[str, Any], family: Family) -> Gate:
    if OWN_GATE in fields:
        return Gate(**fields[OWN_GATE])
    return Gate("softmax", "before", renormalise=_renormalises(fields, family))


def _grouped_gate(fields: dict[str, Any], family: Family) -> Gate:
    # The classes without `states_score` ignore the field, whatever it says.
    stated = fields.get("scoring_func") if family.states_score else None
    score = family.score if stated is None else stated
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func: expected softmax or sigmoid, got {json.dumps(score)}")
    groups, top_groups = (int(fields.get(name) or 1) for name in ("n_group", "topk_group"))
    if score == "sigmoid" and _num_experts(fields, family) // groups < 2:
        raise ValueError(
            f"{family.num_experts}: expected at least 2 in each of {groups} groups (the best 2 are summed)"
        )
    # A group counts by its best expert in DeepSeek-V2, by the sum of its best two in V3 and dots1.
    return Gate(
        score,
        "before",
        renormalise=_renormalises(fields, family),
        scaling=float(_stated(fields, "routed_scaling_factor", dict(family.absent).get("routed_scaling_factor", 1.0))),
        num_groups=groups,
        num_top_groups=top_groups,
        group_score="top2_sum" if score == "sigmoid" else "max",
    )


def _renormalises(fields: dict[str, Any], family: Family) -> bool:
    return family.norm_topk_prob == "always" or bool(fields.get("norm_topk_prob", family.norm_topk_prob))
