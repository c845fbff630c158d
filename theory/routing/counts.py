"""The differences of two routings of the same rows, in whole numbers: parts of a record are counted apart and added.

Letters beyond theory/contracts.py: R rows, d in {0..K} differing choices of one row at one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RouteCounts:
    """Differences of two records: `num_d` (row, layer) pairs with d = 0..K, and per row sum_l d over its layers.

    `num_missing_R` layers of a row are missing in either record and stand in neither sum. Whole numbers, so that sums
    over layers and rows have the same bits in every order.
    """

    num_d: Int[Tensor, " K_plus_1"]
    sum_R: Int[Tensor, " R"]
    num_missing_R: Int[Tensor, " R"]

    def placed(self, rows: Int[Tensor, " R"], num_rows: int) -> RouteCounts:
        """These rows as the rows `rows` of `num_rows`; the others have nothing counted."""
        # Added, not assigned: a row may be here once for each set of layers (scaled/cluster/routes.py).
        zeros = self.sum_R.new_zeros(num_rows)
        # num_d knows no rows, so that rows with nothing counted leave it as it is.
        return RouteCounts(
            self.num_d, zeros.index_add(0, rows, self.sum_R), zeros.index_add(0, rows, self.num_missing_R)
        )

    @staticmethod
    def concat(parts: list[RouteCounts]) -> RouteCounts:
        """The rows of all parts, one part after the other."""
        return RouteCounts(
            torch.stack([part.num_d for part in parts]).sum(0),
            torch.cat([part.sum_R for part in parts]),
            torch.cat([part.num_missing_R for part in parts]),
        )
