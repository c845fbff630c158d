"""The sizes and conventions of the decoder in sandbox/model/decoder.py, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch

from lab.hf import ModelShape, family_of
from theory.routing.gates import GATES, Gate, select


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and conventions of a decoder. Layers in `dense_layers` have a plain MLP; the others have experts.

    qk_norm: RMSNorm of queries and keys per `head` (Qwen3), over the whole `projection` (OLMoE), or `none` (Mixtral).
    shared_expert_size: hidden width of an expert that every token uses, 0 for none; with `shared_expert_gate` its
    output is multiplied by sigmoid(x . g) (Qwen2-MoE). init_std: in units of 1 / sqrt(fan-in), see `DecoderWeights`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    experts_per_token: int = 1
    expert_size: int = 0
    dense_size: int = 0
    dense_layers: tuple[int, ...] = ()
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    gate: Gate = GATES["qwen3"]
    qk_norm: Literal["head", "projection", "none"] = "head"
    tied_head: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_positions: int = 4096
    init_std: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim: expected an even number (rotations act on pairs), got {self.head_dim}")
        if self.qk_norm not in ("head", "projection", "none"):
            raise ValueError(f"qk_norm: expected head, projection or none, got {self.qk_norm}")
        for number in self.dense_layers:
            if not 0 <= number < self.num_layers:
                raise ValueError(f"dense_layers: expected indices in [0, {self.num_layers}), got {number}")
        if self.dense_layers != tuple(sorted(set(self.dense_layers))):
            raise ValueError(f"dense_layers: expected ascending and distinct indices, got {self.dense_layers}")
        if self.dense_layers and self.dense_size < 1:
            raise ValueError(f"dense_size: expected at least 1 with {len(self.dense_layers)} dense layers, got 0")
        if self.moe_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        number = len(self.moe_layers)
        if self.num_experts < 1 or self.expert_size < 1:
            raise ValueError(
                f"num_experts, expert_size: expected at least 1 of each with {number} MoE layers, "
                f"got {self.num_experts}, {self.expert_size}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token: expected 1 to {self.num_experts} (experts), got {self.experts_per_token}"
            )
        if self.shared_expert_size < 0 or (self.shared_expert_gate and self.shared_expert_size == 0):
            raise ValueError(
                f"shared_expert_size: expected {'at least 1 with' if self.shared_expert_gate else '0 or more without'} "
                f"a shared_expert_gate, got {self.shared_expert_size}"
            )
        select(torch.zeros(1, self.num_experts), self.experts_per_token, self.gate)  # raises if groups do not fit

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers that have a router, ascending; a routing record uses these numbers."""
        return tuple(n for n in range(self.num_layers) if n not in self.dense_layers)

    def shape(self) -> ModelShape:
        """This model as a Hugging Face config states it, under the public architecture that computes exactly this."""
        return _shape_of(self)


# No Hugging Face config states the scale of the first weights.
_SHARED = tuple(field.name for field in fields(ModelConfig) if field.name != "init_std")


# `family_of` tries one architecture after the other, a millisecond, and every hand-over asks.
@lru_cache
def _shape_of(config: ModelConfig) -> ModelShape:
    has_bias = config.gate.score == "sigmoid" and bool(config.moe_layers)
    shape = ModelShape("", **{name: getattr(config, name) for name in _SHARED}, has_selection_bias=has_bias)
    return replace(shape, family=family_of(shape))


def config_of(shape: ModelShape) -> ModelConfig:
    """The decoder of a shape without latent attention. Raises ValueError for sizes that do not fit together."""
    return ModelConfig(**{name: getattr(shape, name) for name in _SHARED})
