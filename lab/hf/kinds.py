"""The kinds of config.json's fields: a string is no number, and "false" is not false."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from lab.hf.families import Family

MOST_LAYERS = 1_000
MOST_EXPERTS = 2**15
MOST_SIZE = 2**20
MOST_POSITIONS = 2**31
"""Bounds above any model of today: a value beyond them is a mistake, and no memory holds such a model."""

_BOUNDS = {
    "num_hidden_layers": MOST_LAYERS,
    "first_k_dense_replace": MOST_LAYERS,
    "num_nextn_predict_layers": MOST_LAYERS,
    "num_experts": MOST_EXPERTS,
    "num_local_experts": MOST_EXPERTS,
    "n_routed_experts": MOST_EXPERTS,
    "num_experts_per_tok": MOST_EXPERTS,
    "n_shared_experts": MOST_EXPERTS,
    "n_group": MOST_EXPERTS,
    "topk_group": MOST_EXPERTS,
    "vocab_size": 2**28,
    "max_position_embeddings": MOST_POSITIONS,
    "max_window_layers": MOST_POSITIONS,
    "sliding_window": MOST_POSITIONS,
} | dict.fromkeys(
    (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        "moe_intermediate_size", "shared_expert_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    ),
    MOST_SIZE,
)  # fmt: skip
# At least 1, because the reader takes 0 for an absent field. A 0 in another field is judged where it is used.
_GROUPS = ("n_group", "topk_group")
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "shared_expert_gate")
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor")
_LISTS = {"architectures": str, "mlp_only_layers": int, "layer_types": str}


def check_kinds(fields: dict[str, Any]) -> None:
    """ValueError names the field, the expected kind and the value; an absent or null field has its default.

    A shape is never the `int(...)` or `bool(...)` of an unchecked value: 2.7 layers are not 2.
    """
    for name, most in _BOUNDS.items():
        _check(
            fields, name, f"an integer of {name in _GROUPS:d} to {most:,}", partial(is_between, name in _GROUPS, most)
        )
    for name in _FLAGS:
        _check(fields, name, "true or false", lambda v: isinstance(v, bool))
    for name in _NUMBERS:
        _check(fields, name, "a positive number", is_positive)
    for name, kind in _LISTS.items():
        words = "integers" if kind is int else "texts"
        _check(fields, name, f"a list of {words}", partial(_is_list, kind))
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, dict) and "rope_theta" in rope and not is_positive(rope["rope_theta"]):
            raise wrong(f"{name}.rope_theta", "a positive number", rope["rope_theta"])


def check_dense(fields: dict[str, Any], family: Family) -> None:
    """ValueError where a dense layer is not one of the model's, or the step between MoE layers is no integer."""
    if family.dense != "listed":
        return
    step = fields.get("decoder_sparse_step")
    if step is not None and not _is_integer(step):
        raise wrong("decoder_sparse_step", "an integer", step)
    listed, number = fields.get("mlp_only_layers") or (), fields["num_hidden_layers"]
    if len(set(listed)) < len(listed) or any(not 0 <= n < number for n in listed):
        raise wrong("mlp_only_layers", f"distinct layers in [0, {number})", listed)


def _check(fields: dict[str, Any], name: str, wanted: str, fits: Any) -> None:
    value = fields.get(name)
    if value is not None and not fits(value):
        raise wrong(name, wanted, value)


def wrong(name: str, wanted: str, value: Any) -> ValueError:
    """The one line for a value that is not what was wanted; a long one is cut."""
    text = json.dumps(value)
    return ValueError(f"{name}: expected {wanted}, got {text if len(text) <= 60 else text[:57] + '...'}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # bool is an int in Python


def is_between(least: int, most: int, value: Any) -> bool:
    """An integer from `least` to `most`, which true is not."""
    return _is_integer(value) and least <= value <= most


def is_positive(value: Any) -> bool:
    """A finite number above 0, which true is not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The bound comes before isfinite, which raises OverflowError for an integer too large for a float.
    return is_number and 0 < value <= 1e300 and math.isfinite(value)


def _is_list(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
