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
GREEDY, LIMITED = {"topk_method": "greedy"}, {"topk_method": "group_limited_greedy"}


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
        ("olmoe", {"rope_scaling": {"type": "yarn"}}, "scaled", "rope_scaling: expected the default rotation, got"),
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
        ("mixtral", {"rope_scaling": {"rope_theta": "1e6"}}, "sandbox", "rope_scaling.rope_theta: expected a positive"),
        ("mixtral", {"rope_scaling": {"rope_theta": None}}, "scaled", "rope_scaling.rope_theta: .*number, got null"),
        ("deepseek_v2", {"n_group": 3}, "scaled", "topk_group: expected 3 .*, got 1"),
        ("deepseek_v2", GREEDY | {"n_group": 3, "topk_group": 2}, "scaled", "topk_group: expected 3 .*, got 2"),
        ("deepseek_v2", {"norm_topk_prob": True}, "scaled", "norm_topk_prob: expected false .*, got true"),
        ("deepseek_v2", GREEDY | {"norm_topk_prob": True}, "scaled", "norm_topk_prob: expected false .*, got true"),
        ("deepseek_v2", LIMITED | {"norm_topk_prob": True}, "scaled", "norm_topk_prob: expected false .*, got true"),
        ("olmoe", {"vocab_size": None}, "sandbox", "field 'vocab_size' is missing"),
        ("olmoe", {"hidden_size": None}, "scaled", "field 'hidden_size' is missing"),
        ("deepseek_v3", {"kv_lora_rank": None}, "scaled", "field 'kv_lora_rank' is missing"),
        ("firstorder_moe", OURS | {"qk_norm": ["head"]}, "sandbox", r"qk_norm: expected head, .*got \["),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(family: str, changes: dict[str, Any], world: Any, line: str) -> None:
    """One line: the file, the field, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^here: {line}") as error:
        parse_shape(sizes(family, **changes), "here", world)
    assert "\n" not in str(error.value)


ROPES = {
    "only in rope_scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
    "rope_scaling and beside it": {"rope_theta": 2e4, "rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
    "beside a rope_scaling without": {"rope_theta": 2e4, "rope_scaling": {"rope_type": "default"}},
    "rope_scaling and rope_parameters": {"rope_scaling": {"rope_theta": 1e6}, "rope_parameters": {"rope_theta": 5e5}},
    "rope_parameters beside a rope_scaling without": {
        "rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5e5},
    },
    "rope_parameters beside an empty rope_scaling": {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5}},
    "rope_parameters beside null": {"rope_theta": 2e4, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
    "nowhere": {},
}  # fmt: skip


@pytest.mark.parametrize("ropes", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_base_of_the_rotation_is_transformers_own(family: str, ropes: dict[str, Any]) -> None:
    """Wherever a file states the base, once or in several places, it is the one that transformers takes."""
    transformers = pytest.importorskip("transformers")
    fields = json.dumps(sizes(family, **ropes))
    theirs = transformers.AutoConfig.for_model(**json.loads(fields)).rope_parameters["rope_theta"]
    assert parse_shape(json.loads(fields)).rope_theta == theirs


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "dots1"])
def test_what_a_deepseek_file_leaves_out_is_its_class_s(family: str) -> None:
    """A field of the gate, the shared experts, the dense layers or the queries that is absent is transformers' own."""
    transformers = pytest.importorskip("transformers")
    silent = (
        "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace", "q_lora_rank",
        "norm_topk_prob",
    )  # fmt: skip
    fields = sizes(family, n_routed_experts=32, num_hidden_layers=5)
    fields = {name: value for name, value in fields.items() if name not in silent}
    if family == "dots1":
        fields["n_shared_experts"] = 1  # its class has no number of its own
    theirs = transformers.AutoConfig.for_model(**fields)
    shape = parse_shape(fields)
    gate = shape.gate
    assert (gate.num_groups, gate.num_top_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    assert (gate.scaling, gate.renormalise) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)
    assert shape.shared_expert_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert len(shape.dense_layers) == theirs.first_k_dense_replace
    if shape.latent_attention is not None:
        assert shape.latent_attention.query_rank == theirs.q_lora_rank


def test_groups_of_deepseek_v2_are_those_of_its_method() -> None:
    """`greedy` with all groups and `group_limited_greedy` with some are read as they stand."""
    every = parse_shape(sizes("deepseek_v2", n_group=3, topk_group=3, **GREEDY))
    some = parse_shape(sizes("deepseek_v2", n_group=3, topk_group=2, **LIMITED))
    assert [(s.gate.num_groups, s.gate.num_top_groups) for s in (every, some)] == [(3, 3), (3, 2)]


NULLS = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "routed_scaling_factor", "rope_theta")


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_null_field_has_its_default(family: str, name: str) -> None:
    """null is as good as absent in a field that has a default."""
    fields = OURS if FAMILIES[family].is_own else sizes(family)
    absent = {key: value for key, value in fields.items() if key != name}
    assert parse_shape(absent | {name: None}) == parse_shape(absent)


def refusal(fields: dict[str, Any], world: Any) -> str:
    try:
        parse_shape(fields, "here", world)
    except ValueError as error:
        return str(error)
    return ""
