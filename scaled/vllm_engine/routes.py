"""Converts vLLM's routes, in every schema that it has had, into theory's RoutingRecord.

One function a schema, each to rows of one response: (rows, L, K), -1 where a row is unknown. `record` packs them.
Schemas differ in where the prompt's rows stand, in a trailing row, in a prefix left out, in layers and in encoding;
trailing rows and layers are theory's to settle (`RoutingRecord.pack`).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lab.hf import ModelShape
from theory.routing.record import MISSING, RoutingRecord


def joined(rows: np.ndarray, where: str = "routed_experts") -> Int[Tensor, "rows L K"]:
    """`CompletionOutput.routed_experts` over prompt and response together (vLLM from 0.22, uint8 or uint16)."""
    return _ids(rows, where)


def split(prompt: np.ndarray, generated: np.ndarray | None) -> Int[Tensor, "rows L K"]:
    """`RequestOutput.prompt_routed_experts` and `CompletionOutput.routed_experts` (vLLM 0.21, int16).

    A response of one token may come with no generated rows at all. ValueError where the two parts differ in layers or
    slots.
    """
    prompt_rows = _ids(prompt, "prompt_routed_experts")
    if generated is None:
        return prompt_rows
    generated_rows = _ids(generated, "routed_experts")
    if prompt_rows.shape[1:] != generated_rows.shape[1:]:
        raise ValueError(
            f"routed_experts: expected (layers, slots) {tuple(prompt_rows.shape[1:])} as in prompt_routed_experts, "
            f"got {tuple(generated_rows.shape[1:])}"
        )
    return torch.cat([prompt_rows, generated_rows])


def without_prefix(rows: np.ndarray, start: int) -> Int[Tensor, "rows L K"]:
    """Rows from row `start` on, as `routed_experts_prompt_start` returns them: the rows before are missing (-1)."""
    known = _ids(rows, "routed_experts")
    if start < 0:
        raise ValueError(f"routed_experts_prompt_start: expected at least 0, got {start}")
    return torch.cat([known.new_full((start, *known.shape[1:]), MISSING), known])


def encoded(text: str) -> Int[Tensor, "rows L K"]:
    """A base64-encoded .npy array, as vLLM's HTTP server returns it; pickled arrays are refused."""
    try:
        rows = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise ValueError(f"routed_experts: expected a base64-encoded .npy array, got {text[:16]!r} ({error})") from None
    return _ids(rows, "routed_experts")


def unknown(num_rows: int, num_layers: int, num_slots: int) -> Int[Tensor, "rows L K"]:
    """Rows of a response whose routes the engine lost (vLLM returns None after a preemption, or on an abort)."""
    return torch.full((num_rows, num_layers, num_slots), MISSING, dtype=torch.int64)


def record(rows_per_response: Sequence[Tensor], num_tokens: Sequence[int], shape: ModelShape) -> RoutingRecord:
    """The record of all responses, of the model's MoE layers; columns over all decoder layers are cut to them.

    Raises ValueError where a response of S tokens has neither S - 1 nor S rows, and theory's errors for the ids.
    """
    return RoutingRecord.pack(
        rows_per_response,
        num_tokens,
        shape.moe_layers,
        shape.num_experts,
        num_decoder_layers=shape.num_layers,
    )


def _ids(rows: np.ndarray, where: str) -> Int[Tensor, "rows L K"]:
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(f"{where}: expected integer ids (rows, layers, slots), got {rows.dtype} {rows.shape}")
    # torch knows few operations on uint16, and -1 has to fit.
    return torch.from_numpy(rows.astype(np.int64))
