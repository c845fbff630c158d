"""A model as its config.json states it, and the one table of its weights: Hugging Face name and shape of each.

The table comes in parts (of a layer, of an expert), which each engine maps to names of its own.
Letters beyond theory/contracts.py: F hidden width of an MLP, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Literal, NamedTuple

from lab.hf.families import FAMILIES
from lab.hf.yarn import Yarn
from theory.routing.gates import GATES, Gate

Shape = tuple[int, ...]


class WeightShape(NamedTuple):
    """One tensor of a Hugging Face folder."""

    name: str
    shape: Shape


Parts = dict[str, WeightShape]
"""Weights by their role in the model, in the order of the files."""


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
    """Sizes and conventions of a decoder. `dense_layers` have a plain MLP of `dense_size`, the others experts.

    family: a row of `families.py`, which names the weights.
    shared_expert_size: hidden width of the MLP that every token uses beside its experts, 0 for none; with
    `shared_expert_gate` its output is multiplied by sigmoid(x . g).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: Literal["head", "projection", "none"]
    tied_head: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    dense_size: int = 0
    dense_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 1
    expert_size: int = 0
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    gate: Gate = GATES["qwen3"]
    has_selection_bias: bool = False
    latent_attention: LatentAttention | None = None
    yarn: Yarn | None = None

    def __repr__(self) -> str:
        # Checkpoints name their model by it, and those of before YaRN have no such field.
        stated = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.yarn is None:
            del stated["yarn"]
        return f"ModelShape({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers that have a router, ascending: the layer numbers of a routing record."""
        return tuple(n for n in range(self.num_layers) if n not in self.dense_layers)

    # The table

    def weights(self) -> dict[str, Shape]:
        """Every weight's name, experts one by one, and its shape; a tied head has no entry."""
        table: dict[str, Shape] = {}
        for parts in (self.outer(), *(parts for n in range(self.num_layers) for parts in self._layer(n))):
            table |= dict(parts.values())
        return table

    def _layer(self, number: int) -> list[Parts]:
        parts = [self.norms(number), self.attention(number)]
        if number in self.dense_layers:
            return [*parts, self.mlp(number)]
        experts = (self.expert(number, e) for e in range(self.num_experts))
        return [*parts, self.router(number), *experts, self.shared_expert(number)]

    def outer(self) -> Parts:
        """Weights outside the layers: `embedding`, `norm`, and `head` where it is not tied."""
        V, D = self.vocab_size, self.hidden_size
        parts = {
            "embedding": WeightShape("model.embed_tokens.weight", (V, D)),
            "norm": WeightShape("model.norm.weight", (D,)),
        }
        return parts if self.tied_head else parts | {"head": WeightShape("lm_head.weight", (V, D))}

    def norms(self, layer: int) -> Parts:
        """Norms of a layer: those before `attention` and before `mlp`."""
        prefix, shape = f"model.layers.{layer}.", (self.hidden_size,)
        names = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
        return {part: WeightShape(f"{prefix}{name}.weight", shape) for part, name in names.items()}

    def attention(self, layer: int) -> Parts:
        """Weights of a layer's attention, by the last word of the name: `q_proj`, or MLA's `kv_a_layernorm`."""
        prefix = f"model.layers.{layer}.self_attn."
        shapes = self._grouped_query() if self.latent_attention is None else self._latent(self.latent_attention)
        return {part: WeightShape(f"{prefix}{part}.weight", shape) for part, shape in shapes.items()}

    def _grouped_query(self) -> dict[str, Shape]:
        D, H, h, d = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        shapes: dict[str, Shape] = {"q_proj": (H * d, D), "k_proj": (h * d, D), "v_proj": (h * d, D)}
        shapes["o_proj"] = (D, H * d)
        if self.qk_norm == "none":
            return shapes
        heads = (1, 1) if self.qk_norm == "head" else (H, h)
        return shapes | {"q_norm": (heads[0] * d,), "k_norm": (heads[1] * d,)}

    def _latent(self, a: LatentAttention) -> dict[str, Shape]:
        D, H = self.hidden_size, self.num_heads
        query_dim = H * (a.no_position_dim + a.position_dim)
        shapes: dict[str, Shape] = {
            "kv_a_proj_with_mqa": (a.key_value_rank + a.position_dim, D),
            "kv_a_layernorm": (a.key_value_rank,),
            "kv_b_proj": (H * (a.no_position_dim + a.value_dim), a.key_value_rank),
            "o_proj": (D, H * a.value_dim),
        }
        if a.query_rank is None:
            return shapes | {"q_proj": (query_dim, D)}
        rank = a.query_rank
        return shapes | {"q_a_proj": (rank, D), "q_a_layernorm": (rank,), "q_b_proj": (query_dim, rank)}

    def block(self, layer: int) -> str:
        """The prefix of the names of a MoE layer's router and experts."""
        return f"model.layers.{layer}.{FAMILIES[self.family].block}."

    @property
    def gates(self) -> dict[int, str]:
        """The name of each router's weight, by layer."""
        return {layer: self.router(layer)["router"].name for layer in self.moe_layers}

    def router(self, layer: int) -> Parts:
        """Weights of a MoE layer's `router`, and its `selection_bias` where it has one (a buffer)."""
        prefix, E = self.block(layer) + "gate.", self.num_experts
        parts = {"router": WeightShape(prefix + "weight", (E, self.hidden_size))}
        if self.has_selection_bias:
            parts["selection_bias"] = WeightShape(prefix + "e_score_correction_bias", (E,))
        return parts

    def expert(self, layer: int, number: int) -> Parts:
        """Weights of one expert: `gate`, `up` and `down`."""
        names = FAMILIES[self.family].projections
        return self._mlp(f"{self.block(layer)}experts.{number}.", self.expert_size, names)

    def stacked_experts(self, layer: int) -> dict[str, list[str]]:
        """Names of the weights in each stack of experts that transformers 5 holds in memory: gate and up, then down."""
        experts = [self.expert(layer, e) for e in range(self.num_experts)]
        stacks = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        return {
            f"{self.block(layer)}experts.{stack}": [expert[part].name for expert in experts for part in parts]
            for stack, parts in stacks.items()
        }

    def in_files(self, name: str) -> str:
        """A weight's name in files; in memory, transformers calls every block `mlp`, Mixtral's too."""
        return name.replace(".mlp.", f".{FAMILIES[self.family].block}.")

    def shared_expert(self, layer: int) -> Parts:
        """Weights of the shared expert, `gate`, `up`, `down`, and its own `shared_gate`; empty without one."""
        name = FAMILIES[self.family].shared
        parts = self._mlp(f"{self.block(layer)}{name}.", self.shared_expert_size) if self.shared_expert_size else {}
        if self.shared_expert_gate:
            parts["shared_gate"] = WeightShape(f"{self.block(layer)}{name}_gate.weight", (1, self.hidden_size))
        return parts

    def mlp(self, layer: int) -> Parts:
        """Weights of a dense layer's MLP: `gate`, `up` and `down`."""
        return self._mlp(f"model.layers.{layer}.mlp.", self.dense_size)

    def _mlp(self, prefix: str, F: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Parts:
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        D = self.hidden_size
        return {"gate": WeightShape(gate, (F, D)), "up": WeightShape(up, (F, D)), "down": WeightShape(down, (D, F))}

    # Counts

    @property
    def num_attention_parameters(self) -> int:
        """Number of weights of one layer's attention, its norms of queries and keys included."""
        return _size(self.attention(0))

    @property
    def num_expert_parameters(self) -> int:
        """Number of weights of one expert (gate, up and down projections)."""
        return _size(self.expert(0, 0))

    @property
    def num_shared_parameters(self) -> int:
        """Number of weights of one layer's shared expert; 0 without one."""
        return _size(self.shared_expert(0))

    @property
    def num_router_parameters(self) -> int:
        """Number of weights of one router; the selection bias is a buffer and not counted."""
        return self.hidden_size * self.num_experts

    def num_layer_parameters(self, number: int, num_experts: int | None = None) -> int:
        """Number of weights of decoder layer `number`, with `num_experts` of its experts (all by default)."""
        outside = _size(self.norms(number)) + self.num_attention_parameters
        if number in self.dense_layers:
            return outside + _size(self.mlp(number))
        routed = self.num_experts if num_experts is None else num_experts
        return outside + self.num_router_parameters + routed * self.num_expert_parameters + self.num_shared_parameters

    @property
    def num_parameters(self) -> int:
        """Number of all weights."""
        return sum(self.num_layer_parameters(n) for n in range(self.num_layers)) + _size(self.outer())

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token passes through, embedding and head included."""
        layers = sum(self.num_layer_parameters(n, self.experts_per_token) for n in range(self.num_layers))
        return layers + _size(self.outer())


def _size(parts: Parts) -> int:
    return sum(prod(shape) for _, shape in parts.values())
