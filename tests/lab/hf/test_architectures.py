"""The table of weights is transformers' own; both worlds read a file alike and refuse it by the same list."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.hf import ModelShape, config_fields, family_of, parse_shape
from lab.hf.families import BOTH, FAMILIES
from lab.hf.refusals import PLAIN
from theory.routing.gates import GATES

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": 20, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "q_lora_rank": None,
}  # fmt: skip
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
PUBLIC = [name for name, row in FAMILIES.items() if not row.is_own]
SHARED = [name for name, row in FAMILIES.items() if row.worlds == BOTH]
SHAPE = ModelShape(
    family="firstorder_moe", vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm="head", tied_head=False, norm_eps=1e-6, rope_theta=1e4, max_positions=64, num_experts=6,
    experts_per_token=2, expert_size=12,
)  # fmt: skip
OURS = config_fields(SHAPE)


def sizes(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model: the fields that its architecture has."""
    row = FAMILIES[family]
    fields = {name: value for name, value in SIZES.items() if row.is_latent or name not in LATENT}
    experts = {} if row.dense == "all" else {row.num_experts: 6}
    return {"model_type": family, "architectures": [row.hf_class], **fields, **experts, **changes}


def state(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in transformers' own model of this config, experts one by one under the names of its files."""
    transformers = pytest.importorskip("transformers")
    row = FAMILIES[fields["model_type"]]
    gate, up, down = row.projections
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**fields)
        model = getattr(transformers, row.hf_class)(config)
    held: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        name, size = name.replace(".mlp.", f".{row.block}."), tuple(tensor.shape)
        stem, _, stacked = name.partition(".experts.")
        if stacked == "gate_up_proj":
            E, both, D = size
            held |= {f"{stem}.experts.{e}.{part}.weight": (both // 2, D) for e in range(E) for part in (gate, up)}
        elif stacked == "down_proj":
            held |= {f"{stem}.experts.{e}.{down}.weight": size[1:] for e in range(size[0])}
        else:
            held[name] = size
    return held


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "q_lora_rank": 24}], ids=["plain", "tied"])
@pytest.mark.parametrize("family", PUBLIC)
def test_the_table_is_transformers_own(family: str, changes: dict[str, Any]) -> None:
    """Every architecture's names and shapes are its class's state dict, and its count of parameters their sum."""
    fields = sizes(family, **{k: v for k, v in changes.items() if k not in LATENT or FAMILIES[family].is_latent})
    shape, held = parse_shape(fields), state(fields)
    if shape.tied_head:
        held.pop("lm_head.weight")
    assert shape.weights() == held
    buffers = {name for name in held if name.endswith("e_score_correction_bias")}
    assert shape.num_parameters == sum(torch.Size(held[name]).numel() for name in held.keys() - buffers)


@pytest.mark.parametrize("family", PUBLIC)
def test_what_is_written_is_read(family: str) -> None:
    """A shape's config.json states the shape, and the architecture found for it is the one that it came from."""
    shape = parse_shape(sizes(family))
    if FAMILIES[family].is_latent:
        assert family_of(replace(shape, latent_attention=None)) not in ("deepseek_v2", "deepseek_v3")
        return
    assert family_of(replace(shape, family="firstorder_moe")) == family
    assert parse_shape(json.loads(json.dumps(config_fields(shape)))) == shape


def test_what_no_class_states_is_our_own() -> None:
    """A shared expert with a gate, or a scaled softmax, is written and read under our own name, whole."""
    gated = replace(SHAPE, shared_expert_size=10, shared_expert_gate=True, gate=GATES["softmax_after"])
    for shape in (gated, replace(SHAPE, gate=replace(GATES["qwen3"], scaling=2.0))):
        assert family_of(shape) == "firstorder_moe"
        assert parse_shape(json.loads(json.dumps(config_fields(shape)))) == shape


@pytest.mark.parametrize("family", SHARED)
def test_both_worlds_read_a_file_alike(family: str) -> None:
    """A file that both worlds open states the same shape in both, also where it names its type but no class."""
    fields = sizes(family)
    by_type = {name: value for name, value in fields.items() if name != "architectures"}
    assert parse_shape(fields, world="sandbox") == parse_shape(fields, world="scaled") == parse_shape(by_type)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.field)
def test_one_list_is_refused_by_both_worlds(row: Any) -> None:
    """Each field of the list, with another value than its plain one, is the same line in every world of its row."""
    said = {world: refusal(sizes("qwen3_moe", **{row.field: "odd"}), world) for world in row.worlds}
    line = f"here: {row.field}: expected {json.dumps(row.value)} ({row.why}), got " + '"odd"'
    assert set(said.values()) == {line}
    assert refusal(sizes("qwen3_moe", **{row.field: row.value}), row.worlds[0]) == ""


@pytest.mark.parametrize(
    ("family", "changes", "world", "line"),
    [
        ("mixtral", {}, "scaled", "architectures: expected one of .*, got .*Mixtral.*, which only backend sandbox"),
        ("deepseek_v3", {}, "sandbox", "kv_lora_rank: expected none .*Qwen3Moe.*got 16, the latent .*DeepseekV3"),
        ("qwen3_moe", {"model_type": "olmoe"}, "scaled", 'model_type: expected qwen3_moe.*, got "olmoe"'),
        ("qwen3_moe", {"architectures": ["A", "B"]}, "scaled", r"architectures: .*got \['A', 'B'\]$"),
        ("deepseek_v3", {"scoring_func": "sqrt"}, "scaled", "scoring_func: expected softmax or sigmoid, got .sqrt"),
        ("deepseek_v3", {"rope_interleave": False}, "scaled", "rope_interleave: expected true .*got false"),
        ("deepseek_v3", {"n_group": 6}, "scaled", "n_routed_experts: expected at least 2 in each of 6 groups"),
        ("qwen3_moe", {"rope_scaling": {"type": "yarn"}}, "scaled", "rope_scaling: expected the default rotation"),
        ("olmoe", {"sliding_window": 8}, "scaled", "sliding_window: expected null .*got 8"),
        ("qwen3_moe", {"num_attention_heads": 0}, "scaled", "num_attention_heads: expected at least 1, got 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "sandbox", "decoder_sparse_step: expected at least 1, got 0"),
        ("olmoe", {"head_dim": 6}, "scaled", "head_dim: expected 8 .*got 6"),
        ("qwen3_moe", {"num_hidden_layers": 2.7}, "sandbox", "num_hidden_layers: expected an integer .*got 2.7"),
        ("qwen3_moe", {"tie_word_embeddings": "false"}, "scaled", 'tie_word_embeddings: expected true or false, got'),
        ("olmoe", {"norm_topk_prob": 0}, "sandbox", "norm_topk_prob: expected true or false, got 0"),
        ("mixtral", {"num_local_experts": 10**12}, "sandbox", "num_local_experts: expected an .*32,768, got 10{12}"),
        ("dots1", {"topk_group": 0}, "sandbox", "topk_group: expected an integer of 1 to .*got 0"),
        ("qwen3_moe", {"mlp_only_layers": [0, 5]}, "sandbox", r"mlp_only_layers: expected distinct .*got \[0, 5\]"),
        ("firstorder_moe", OURS | {"qk_norm": "heads"}, "sandbox", "qk_norm: expected head, projection .*got .heads"),
        ("firstorder_moe", OURS | {"qk_norm": ["head"]}, "sandbox", r"qk_norm: expected head, .*got \["),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(family: str, changes: dict[str, Any], world: Any, line: str) -> None:
    """One line: the file, the field, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^here: {line}") as error:
        parse_shape(sizes(family, **changes), "here", world)
    assert "\n" not in str(error.value)


def refusal(fields: dict[str, Any], world: Any) -> str:
    try:
        parse_shape(fields, "here", world)
    except ValueError as error:
        return str(error)
    return ""
