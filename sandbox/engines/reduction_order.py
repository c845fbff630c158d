"""Defect: large products summed in an order that depends on the batch, as split-K and stream-K kernels do.

No noise is added: float32 addition is not associative, so the same terms in other groups round to other bits (He and
Thinking Machines Lab 2025, cited by R3 (arXiv 2510.11370) sec. 2.1 under "violation of batch invariance").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Generator, Tensor

from sandbox.engines.defect import BREAKS_ALL_NUMERICS, BREAKS_NONE, Defect, Link, dial
from sandbox.engines.formats import round_bf16
from sandbox.kernels.numerics import EXACT, LARGE_PRODUCTS, Numerics, Part, Site

# The smallest number of columns in a part: below it, a part is no longer a matrix product.
MIN_COLUMNS = 8


class _Split(Numerics):
    def __init__(self, units: int, tile_rows: int, partials: Literal["fp32", "bf16"]):
        self.units, self.tile_rows, self.partials = units, tile_rows, partials

    def product(self, part: Part, width: int, num_rows: int, site: Site) -> Float[Tensor, "*rows O"]:
        if site not in LARGE_PRODUCTS:
            return part(0, width)
        num_parts = min(num_splits(num_rows, self.units, self.tile_rows), width // MIN_COLUMNS)
        if num_parts <= 1:
            return part(0, width)
        # A multiple of MIN_COLUMNS, rounded up: the last part may be smaller.
        size = -(-width // (num_parts * MIN_COLUMNS)) * MIN_COLUMNS
        total = self._kept(part(0, size))
        for start in range(size, width, size):
            total = self._kept(total + self._kept(part(start, min(start + size, width))))
        return total

    def _kept(self, x: Tensor) -> Tensor:
        return round_bf16(x) if self.partials == "bf16" else x


def num_splits(num_rows: int, units: int, tile_rows: int) -> int:
    """The number of parts into which the inner axis of a product of `num_rows` rows is split, in [1, units].

    A machine works on `units` tiles of `tile_rows` rows at the same time. If the last wave of tiles does not fill it,
    their inner axis is split so that it does: units // (tiles mod units). A single row is split most.
    """
    left_over = -(-num_rows // tile_rows) % units
    return units // left_over if left_over else 1


class ReductionOrder(Defect):
    """The sums of the large products, split into `num_splits` parts by the number of rows in the batch.

    Breaks batch invariance, and also prefill == decode and trainer == engine, as decoding, prefill and training run on
    different numbers of rows. `units` = 1 never splits: the exact order.
    """

    place: ClassVar[float] = 5
    kind: Literal["reduction_order"] = "reduction_order"
    units: int = Field(default=8, ge=1, description="tiles worked on at the same time; 1: one fixed order of summation")
    tile_rows: int = Field(default=16, ge=1, description="rows of the batch in one tile")
    partials: Literal["fp32", "bf16"] = Field(
        default="fp32", description="format in which the parts' sums are kept and added up"
    )

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "2 units, partial sums in fp32": cls(units=2),
            "8 units, partial sums in fp32": cls(units=8),
            "8 units, partial sums in bf16": cls(units=8, partials="bf16"),
        }

    @property
    def setting(self) -> str:
        return f"{dial(self.units)} units, {self.partials} partial sums"

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_NONE if self.units == 1 else BREAKS_ALL_NUMERICS

    def numerics(self, generator: Generator) -> Numerics:
        return self.order()

    def order(self) -> Numerics:
        """The numerics of this order of summation; it draws no random numbers, and gradients flow through it."""
        return EXACT if self.units == 1 else _Split(self.units, self.tile_rows, self.partials)
