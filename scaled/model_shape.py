"""What a model is, read from its Hugging Face config.json: the one source of sizes for Megatron, vLLM and `plan`.

Families: Qwen3-MoE, OLMoE, and DeepSeek-V2/V3 (Moonlight), which have latent attention (MLA).
Letters beyond theory/contracts.py: F hidden width of one expert.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from theory.routing.gates import Gate

SHAPES = Path(__file__).parent / "shapes"

Family = Literal["qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"]
FAMILIES: tuple[Family, ...] = ("qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")

# Fields that must be absent, null or this value: anything else changes what the model computes.
PLAIN: dict[str, Any] = {
    "attention_bias": False,
    "clip_qkv": None,
    "rope_scaling": None,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "quantization_config": None,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True)
class LatentAttention:
    """MLA's ranks and head widths (DeepSeek-V2); `query_rank` None projects queries directly."""

    query_rank: int | None
    key_value_rank: int
    no_position_dim: int
    position_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes and conventions of a decoder. `dense_layers` have a plain MLP of `dense_size`, the others experts."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    dense_size: int
    dense_layers: tuple[int, ...]
    num_shared_experts: int
    gate: Gate
    has_selection_bias: bool
    qk_norm: Literal["head", "projection", "none"]
    latent_attention: LatentAttention | None
    tied_head: bool
    norm_eps: float
    rope_theta: float
    max_positions: int

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers that have a router, ascending: the layer numbers of a routing record."""
        return tuple(n for n in range(self.num_layers) if n not in self.dense_layers)

    @property
    def num_attention_parameters(self) -> int:
        """Weights of one layer's attention, its norms of queries and keys included."""
        D, H, h, d = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        if self.latent_attention is None:
            norms = {"head": 2 * d, "projection": (H + h) * d, "none": 0}[self.qk_norm]
            return D * (H + 2 * h) * d + H * d * D + norms
        a = self.latent_attention
        query_dim = H * (a.no_position_dim + a.position_dim)
        query = D * query_dim if a.query_rank is None else a.query_rank * (D + query_dim + 1)
        compressed = D * (a.key_value_rank + a.position_dim) + a.key_value_rank
        expanded = a.key_value_rank * H * (a.no_position_dim + a.value_dim)
        return query + compressed + expanded + H * a.value_dim * D

    @property
    def num_expert_parameters(self) -> int:
        """Weights of one expert (gate, up and down projections)."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def num_router_parameters(self) -> int:
        """Weights of one router; the selection bias is a buffer and not counted."""
        return self.hidden_size * self.num_experts

    def num_layer_parameters(self, number: int, num_experts: int | None = None) -> int:
        """Weights of decoder layer `number`, with `num_experts` of its experts (all by default)."""
        both_norms = 2 * self.hidden_size
        if number in self.dense_layers:
            return self.num_attention_parameters + both_norms + 3 * self.hidden_size * self.dense_size
        routed = self.num_experts if num_experts is None else num_experts
        experts = (routed + self.num_shared_experts) * self.num_expert_parameters
        return self.num_attention_parameters + both_norms + self.num_router_parameters + experts

    @property
    def num_embedding_parameters(self) -> int:
        """Weights of the embedding and, where it is not tied to it, of the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)

    @property
    def num_parameters(self) -> int:
        """All weights."""
        layers = sum(self.num_layer_parameters(n) for n in range(self.num_layers))
        return layers + self.num_embedding_parameters + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token passes through, embedding and head included."""
        layers = sum(self.num_layer_parameters(n, self.experts_per_token) for n in range(self.num_layers))
        return layers + self.num_embedding_parameters + self.hidden_size


def load_shape(path: str | Path, name: str | None = None) -> ModelShape:
    """The shape of the Hugging Face folder `path`; where there is none, of `shapes/<name>.json`.

    Raises ValueError, naming file and field, for what is missing or not supported, and where folder and name disagree.
    """
    file = Path(path) / "config.json"
    named = None if name is None else _named(name)
    if not file.is_file():
        if named is None:
            raise ValueError(f"model.path: expected a Hugging Face folder with config.json, got {path}")
        return named
    shape = parse_shape(_read(file), str(file))
    if named is not None and named != shape:
        raise ValueError(f"model.shape: expected the shape of {file}, got {name}, which differs from it")
    return shape


def _named(name: str) -> ModelShape:
    file = SHAPES / f"{name}.json"
    if not file.is_file():
        known = sorted(p.stem for p in SHAPES.glob("*.json"))
        raise ValueError(f"model.shape: expected one of {', '.join(known)}, got {name}")
    return parse_shape(_read(file), str(file.name))


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable JSON file ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(fields).__name__}")
    return fields


def parse_shape(fields: dict[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a config.json states; ValueError names `where`, the field, what came and what was expected."""
    try:
        return _parse(fields)
    except KeyError as error:
        raise ValueError(f"{where}: field {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _parse(fields: dict[str, Any]) -> ModelShape:
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {family}")
    rope = fields.get("rope_parameters") or {}
    for name, plain in PLAIN.items():
        value = fields.get(name)
        if name == "rope_scaling" and value == rope:
            continue  # transformers 5 repeats the parameters under the old name
        if value is not None and value != plain:
            raise ValueError(f"{name}: expected {plain}, got {value}")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters.rope_type: expected default, got {rope['rope_type']}")
    is_deepseek = family.startswith("deepseek")
    heads, hidden, layers = (int(fields[name]) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    latent = _latent(fields) if is_deepseek else None
    return ModelShape(
        family=family,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads) if latent is None else latent.value_dim,
        num_experts=_num_experts(fields, is_deepseek),
        experts_per_token=int(fields["num_experts_per_tok"]),
        expert_size=int(fields["intermediate_size" if family == "olmoe" else "moe_intermediate_size"]),
        dense_size=0 if family == "olmoe" else int(fields["intermediate_size"]),
        dense_layers=_dense_layers(fields, family, layers),
        num_shared_experts=int(fields.get("n_shared_experts") or 0) if is_deepseek else 0,
        gate=_gate(fields, family),
        has_selection_bias=fields.get("topk_method") == "noaux_tc" or family == "deepseek_v3",
        qk_norm={"qwen3_moe": "head", "olmoe": "projection"}.get(family, "none"),  # type: ignore[arg-type]
        latent_attention=latent,
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-5 if family == "olmoe" else 1e-6)),
        rope_theta=float(rope.get("rope_theta", fields.get("rope_theta") or 1e4)),
        max_positions=int(fields.get("max_position_embeddings", 4096)),
    )


def _num_experts(fields: dict[str, Any], is_deepseek: bool) -> int:
    if is_deepseek:
        return int(fields["n_routed_experts"])
    # transformers 5 saves Qwen3-MoE under its own name for it.
    return int(fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"])


def _latent(fields: dict[str, Any]) -> LatentAttention:
    query_rank = fields.get("q_lora_rank")
    return LatentAttention(
        query_rank=None if query_rank is None else int(query_rank),
        key_value_rank=int(fields["kv_lora_rank"]),
        no_position_dim=int(fields["qk_nope_head_dim"]),
        position_dim=int(fields["qk_rope_head_dim"]),
        value_dim=int(fields["v_head_dim"]),
    )


def _dense_layers(fields: dict[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    if family == "olmoe":
        return ()
    if family == "qwen3_moe":
        return tuple(sorted(fields.get("mlp_only_layers") or ()))
    return tuple(range(min(layers, int(fields.get("first_k_dense_replace", 0)))))


def _gate(fields: dict[str, Any], family: Family) -> Gate:
    renormalise = bool(fields.get("norm_topk_prob", family == "deepseek_v3"))
    if not family.startswith("deepseek"):
        return Gate("softmax", "before", renormalise=renormalise)
    groups, top_groups = int(fields.get("n_group") or 1), int(fields.get("topk_group") or 1)
    is_sigmoid = fields.get("scoring_func", "sigmoid" if family == "deepseek_v3" else "softmax") == "sigmoid"
    return Gate(
        "sigmoid" if is_sigmoid else "softmax",
        "before",
        renormalise=renormalise,
        scaling=float(fields.get("routed_scaling_factor", 1.0)),
        num_groups=groups,
        num_top_groups=top_groups,
        group_score="top2_sum" if is_sigmoid else "max",
    )
