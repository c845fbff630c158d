"""A shape's rotation as Megatron-core's settings, which latent attention has in its layers and others in the model."""

from __future__ import annotations

from typing import Any, Literal

from megatron.core.transformer.transformer_config import TransformerConfig

from lab.hf import ModelShape
from scaled.config import TrainingBlock


def kind(shape: ModelShape) -> Literal["rope", "yarn"]:
    """The model's `position_embedding_type`. Latent attention has the rotations in its layers, and reads none here."""
    return "rope" if shape.yarn is None or shape.latent_attention is not None else "yarn"


def latent_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of an MLATransformerConfig."""
    base: dict[str, Any] = {"rope_type": "rope", "rotary_base": shape.rope_theta}
    yarn = shape.yarn
    if yarn is None:
        return base
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def with_grouped(config: TransformerConfig, shape: ModelShape) -> TransformerConfig:
    """The configuration with what GPTModel and its attention read of it, which are no fields of the class."""
    yarn = shape.yarn
    if yarn is not None:
        values = {
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
            "correction_range_round_to_int": yarn.truncate,
        }
        for name, value in values.items():
            setattr(config, f"yarn_{name}", value)
    return config


def check(shape: ModelShape, training: TrainingBlock) -> None:
    """ValueError where context-parallel ranks cannot cut the table that Megatron-core makes when it builds a layer."""
    runs = 2 * training.context_parallel
    if shape.yarn is not None and training.context_parallel > 1 and shape.yarn.original_positions % runs:
        raise ValueError(
            f"original_max_position_embeddings: expected a multiple of {runs} (2 x training.context_parallel), got "
            f"{shape.yarn.original_positions}"
        )


__all__ = ["check", "kind", "latent_fields", "with_grouped"]
