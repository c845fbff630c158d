"""mu's likeliest tokens and log old of them, where the numbers stay in the object store: the driver holds references.

Engines and ranks return these rows in objects apart from their routes (`storing.pack_apart`): the last pipeline stage
alone reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from scaled.cluster.sources import Source
from scaled.cluster.stretches import InStretches, Stretches, by_source
from theory.routing.packed_rows import offsets_of, ranges
from theory.top_tokens import TokenRows


class StoredTokenRows(InStretches, TokenRows):
    """Numbers at every position that are stored elsewhere; each access to `values` fetches all into this process.

    columns: K and the type of the numbers. stretches: the place of every row that has one; others have the filling.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        stretches: Stretches,
        offsets: Int[Tensor, " B_plus_1"],
        columns: tuple[int, torch.dtype],
        fill: float,
    ):
        self._keep(sources, stretches, offsets=offsets, columns=columns, fill=fill)

    columns: tuple[int, torch.dtype]

    @property
    def values(self) -> Shaped[Tensor, "_A _K"]:  # type: ignore[override]
        """All numbers, fetched into this process."""
        out_AK = self._filled()
        for source, own in zip(self.sources, by_source(self.stretches, len(self.sources)), strict=True):
            out_AK[self._rows(own)] = source.tensor()[ranges(own.start_S, own.num_S)]
        return out_AK

    @property
    def width(self) -> int:
        """K, the numbers per position."""
        return self.columns[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        return self.columns[1]

    def rows(self, b: int) -> Shaped[Tensor, "_T _K"]:
        """The rows of response b, fetched."""
        return self.select([b]).values

    def blocks(self) -> Iterator[Shaped[Tensor, "_ _K"]]:
        """All rows in order, some responses at a time, sent by the actors that made them."""
        if self._group is None:
            yield self.values
            return
        for some, sent in self._blocks(self._group, self.width * self.dtype.itemsize):
            out_AK = some._filled()
            for _, rows_A, found_AK in sent:
                out_AK[rows_A] = found_AK
            yield out_AK

    def _filled(self) -> Tensor:
        return torch.full((int(self.offsets[-1]), self.width), self.fill, dtype=self.dtype)

    def _of(self, sources: Sequence[Any], stretches: Stretches, num_rows_B: Sequence[int]) -> StoredTokenRows:
        return StoredTokenRows(sources, stretches, offsets_of(num_rows_B), self.columns, self.fill)

    def _followed_by(self, others: Sequence[TokenRows]) -> StoredTokenRows:
        return self._joined(others)

    def _placed(
        self, parts_B: Sequence[Sequence[tuple[TokenRows, int, int]]], num_rows_B: Sequence[int]
    ) -> StoredTokenRows:
        return self._put([[(rows, i, 0, at) for rows, i, at in parts] for parts in parts_B], num_rows_B)


__all__ = ["StoredTokenRows"]
