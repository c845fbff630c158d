"""Numbers that fp16 cannot hold: the error that names the weights that have them, and the evidence that it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.recording import NonFiniteError
from lab.tensor_files import write_evidence

FP16_MAX = 65504
NAMED = 3
"""The most weights that the line of an overflow names."""

KEPT = 2**16
"""The most values of a weight that the evidence keeps: a weight of which all overflow may have 1e9."""


@dataclass(frozen=True, eq=False)
class Overflow:
    """The finite values of a tensor that fp16 has no number for: how many, the largest magnitude, and the first KEPT.

    places: a row of indices for each of `values`, which are those before the cast.
    """

    num: int
    largest: float
    places: Int[Tensor, "n d"]
    values: Float[Tensor, " n"]

    @staticmethod
    def of(x: Tensor) -> Overflow | None:
        """Those of x; None where there are none. An infinity that x has already is no overflow of the cast."""
        cast = x.to(torch.float16)
        if not bool(cast.isinf().any()):
            return None
        where = cast.isinf() & ~x.isinf()
        places, values = where.nonzero(), x[where]
        if not len(values):
            return None
        largest = values.abs().max().item()
        return Overflow(len(values), largest, places[:KEPT].cpu().clone(), values[:KEPT].cpu().clone())


def overflowing(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Overflow]:
    """The overflow of each tensor that has one, by name."""
    return {name: found for name, x in named_tensors if (found := Overflow.of(x)) is not None}


class Fp16Overflow(NonFiniteError, OverflowError):
    """A magnitude that fp16 has no number for; the engine's log-probabilities would not be finite.

    `weights` are those with such values, by name; empty where an activation overflows.
    """

    metric = "rollout_corr/k3_kl"

    def __init__(self, largest: float, weights: Mapping[str, Overflow] | None = None):
        self.largest, self.weights = largest, dict(weights or {})
        super().__init__(f"fp16: expected magnitudes of at most {FP16_MAX}, got {largest:.6g}{self._where()}")

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own pickle calls it with its message, and this one is made of other arguments.
        return Fp16Overflow, (self.largest, self.weights)

    def _where(self) -> str:
        counts = [f"{found.num} value{'s' * (found.num != 1)} of {name}" for name, found in self.weights.items()]
        more = [f"some of {len(counts) - NAMED} more weights"] if len(counts) > NAMED else []
        return f" ({', '.join(counts[:NAMED] + more)})" if counts else ""

    @staticmethod
    def of(weights: Mapping[str, Overflow]) -> Fp16Overflow:
        """The error of these weights, one or more."""
        return Fp16Overflow(max(found.largest for found in weights.values()), weights)


def keep_overflow(folder: Path, number: int, error: Fp16Overflow) -> str:
    """Writes the weights' values of step `number` that overflow, and their places, into the run folder; a clause with
    the file, or nothing.

    `NAME.places` has a row of indices for each of `NAME.values`.
    """
    tensors: dict[str, Tensor] = {}
    for name, found in error.weights.items():
        tensors |= {f"{name}.places": found.places, f"{name}.values": found.values}
    if not tensors:  # an activation: the weights are those of the last checkpoint, or can be computed from it
        return ""
    path = folder / "evidence" / f"overflow-{number:06d}.safetensors"
    return write_evidence(path, tensors, {"step": str(number), "format": "fp16"}, "they")


__all__ = ["Fp16Overflow", "Overflow", "keep_overflow", "overflowing"]
