"""A bound as data: both sides of an inequality, computed, so that it can be tested, plotted and audited.

`theory.bounds.BOUNDS` lists the functions that make one; each docstring has the statement, the proof, and when the two
sides meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bound:
    """The inequality `lhs <= rhs`, elementwise and up to rounding; both sides have one shape and one unit."""

    name: str
    lhs: Float[Tensor, "*batch"]
    rhs: Float[Tensor, ...]

    def __post_init__(self) -> None:
        if self.lhs.shape != self.rhs.shape:
            expected, got = tuple(self.lhs.shape), tuple(self.rhs.shape)
            raise ValueError(f"{self.name}: expected both sides to be of shape {expected} (lhs), got {got} (rhs)")

    @property
    def ratio(self) -> Float[Tensor, "*batch"]:
        """lhs / rhs, in [0, 1] up to rounding, 1 where the bound is tight; NaN where rhs is 0 (and so is lhs)."""
        return torch.where(self.rhs > 0, self.lhs / self.rhs, torch.nan)

    def holds(self, tolerance: float) -> Bool[Tensor, "*batch"]:
        """Whether lhs <= rhs + tolerance, the tolerance in their unit; False where a side is NaN."""
        return self.lhs <= self.rhs + tolerance
