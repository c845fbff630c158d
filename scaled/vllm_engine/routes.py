"""Converts the routes that vLLM returns into theory's RoutingRecord.

Each function gives the rows of one response: (rows, L, K), -1 where a row is unknown. `record` packs them; trailing
rows and layers are theory's to settle (`pack_record`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from lab.hf import ModelShape
from theory.routing.payloads import pack_record
from theory.routing.record import MISSING, RoutingRecord


def joined(rows: np.ndarray) -> Integer[Tensor, "rows L K"]:
    """`CompletionOutput.routed_experts` over prompt and response together (vLLM from 0.22), in its own integer type.

    Raises ValueError for other shapes and types.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(f"routed_experts: expected integer ids (rows, layers, slots), got {rows.dtype} {rows.shape}")
    # No copy and no wider type: the routes of all of an engine's responses are in memory here.
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def unknown(num_rows: int, num_layers: int, num_slots: int) -> Int[Tensor, "rows L K"]:
    """Rows of a response whose routes the engine lost (vLLM returns None after a preemption, or on an abort)."""
    return torch.full((num_rows, num_layers, num_slots), MISSING, dtype=torch.int8)


def record(rows_per_response: Sequence[Tensor], num_tokens: Sequence[int], shape: ModelShape) -> RoutingRecord:
    """The record of all responses, of the model's MoE layers; columns over all decoder layers are cut to them.

    Raises ValueError where a response of S tokens has neither S - 1 nor S rows, and theory's errors for the ids.
    """
    return pack_record(
        rows_per_response,
        num_tokens,
        shape.moe_layers,
        shape.num_experts,
        num_decoder_layers=shape.num_layers,
    )
