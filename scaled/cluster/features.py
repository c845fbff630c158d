"""Router features whose hidden states stay in the object store: the driver has their logits, a tenth of the bytes.

A rank fetches the rows and layers that it learns from (`StoredFeatures.at`). Products with the predictor are made where
hidden states are: by the actors that made them if the driver needs the logits, else by the rank that reads them.

Extra letters: F feature rows; G sets of layers, one for each model chunk of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scaled.cluster.sources import Source, columns
from theory.routing.features import RouterFeatures, layer_products

LEAST_ROWS = 8
"""Rows of a product at least, zeros included: fewer than 4 rows take another kernel, whose bits differ. (Where E is no
multiple of 4, bits differ with every number of rows.)"""


@dataclass(frozen=True, eq=False)
class StoredHidden:
    """Hidden states in stored tensors: row f at layer set g is row `row_GF` of source `source_GF`."""

    sources: tuple[Source, ...]
    layer_sets: tuple[tuple[int, ...], ...]
    source_GF: Int[Tensor, "G F"]
    row_GF: Int[Tensor, "G F"]
    width: int
    dtype: torch.dtype

    def at(self, where_F: Int[Tensor, " F2"], layer_numbers: Sequence[int]) -> StoredHidden:
        """These rows, at the layer sets that have some of these layers; a source that is not needed is dropped."""
        sets = [g for g, numbers in enumerate(self.layer_sets) if set(numbers) & set(layer_numbers)]
        source_GF, row_GF = self.source_GF[sets][:, where_F], self.row_GF[sets][:, where_F]
        used, source_GF = source_GF.unique(return_inverse=True)
        sources = tuple(self.sources[i] for i in used.tolist())
        layer_sets = tuple(self.layer_sets[g] for g in sets)
        return replace(self, sources=sources, layer_sets=layer_sets, source_GF=source_GF, row_GF=row_GF)

    def read(self, layer_numbers: Sequence[int]) -> Float[Tensor, "F L D"]:
        """All rows at these layers, fetched into this process."""
        out_FLD = torch.empty(self.source_GF.shape[1], len(layer_numbers), self.width, dtype=self.dtype)
        for source, where_F, row_F in self.parts():
            shared = [n for n in source.layer_numbers if n in layer_numbers]
            rows_FLD = source.tensor()[row_F[:, None], columns(source.layer_numbers, shared)]
            out_FLD[where_F[:, None], columns(layer_numbers, shared)] = rows_FLD
        return out_FLD

    def parts(self, home: int | None = None) -> list[tuple[Source, Tensor, Tensor]]:
        """Each source (made by actor `home`, if one is given), the rows that it has, and their numbers in it."""
        found = []
        for source_F, row_F in zip(self.source_GF, self.row_GF, strict=True):
            for number in source_F.unique().tolist():
                where_F = (source_F == number).nonzero()[:, 0]
                found.append((self.sources[number], where_F, row_F[where_F]))
        return [part for part in found if home is None or part[0].owner.home == home]

    @staticmethod
    def joined(parts: Sequence[tuple[StoredHidden, Int[Tensor, " _"]]], num_rows: int) -> StoredHidden:
        """`num_rows` rows from parts whose rows go to these places; every place of a layer has a part."""
        layer_sets = tuple(dict.fromkeys(numbers for part, _ in parts for numbers in part.layer_sets))
        source_GF, row_GF = (torch.zeros(len(layer_sets), num_rows, dtype=torch.int64) for _ in range(2))
        sources: list[Source] = []
        for part, where_F in parts:
            for own, numbers in enumerate(part.layer_sets):
                g = layer_sets.index(numbers)
                source_GF[g, where_F] = part.source_GF[own] + len(sources)
                row_GF[g, where_F] = part.row_GF[own]
            sources += part.sources
        return replace(parts[0][0], sources=tuple(sources), layer_sets=layer_sets, source_GF=source_GF, row_GF=row_GF)


class StoredFeatures(RouterFeatures):
    """Router features with stored hidden states. `hidden` fetches all of them into this process, every time.

    `shift` is a predictor and a sign whose product with the hidden states is to be added to the logits `raw`; `logits`
    adds it, every time.
    """

    def __init__(
        self,
        rows: Int[Tensor, " F"],
        offsets: Int[Tensor, " B_plus_1"],
        stored: StoredHidden,
        raw: Float[Tensor, "F L E"],
        layer_numbers: tuple[int, ...],
        shift: tuple[Mapping[int, Tensor], float] | None = None,
    ):
        own = {"rows": rows, "offsets": offsets, "layer_numbers": layer_numbers}
        self.__dict__.update(own, stored=stored, raw=raw, shift=shift)

    stored: StoredHidden
    raw: Float[Tensor, "F L E"]
    shift: tuple[Mapping[int, Tensor], float] | None

    @property
    def hidden(self) -> Float[Tensor, "F L D"]:  # type: ignore[override]
        """All hidden states, fetched into this process."""
        return self.stored.read(self.layer_numbers)

    @property
    def logits(self) -> Float[Tensor, "F L E"]:  # type: ignore[override]
        """The logits, shifted."""
        if self.shift is None:
            return self.raw
        predictor, sign = self.shift
        wide = torch.promote_types(self.raw.dtype, torch.float32)
        return self.raw.to(wide) + sign * self._products(predictor, wide)

    @property
    def has_hidden(self) -> bool:
        """Always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of hidden states and logits."""
        return self.raw.nbytes + self.hidden_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states at `layer_numbers`, none of which are in this process."""
        return len(self.rows) * len(self.layer_numbers) * self.stored.width * self.stored.dtype.itemsize

    def at(
        self,
        where: Int[Tensor, " F2"],
        offsets: Int[Tensor, " B2_plus_1"],
        layer_numbers: tuple[int, ...] | None = None,
    ) -> StoredFeatures:
        """As in one process; nothing is fetched."""
        numbers = self.layer_numbers if layer_numbers is None else layer_numbers
        raw = self.raw.index_select(0, where)
        if numbers != self.layer_numbers:
            raw = raw[:, columns(self.layer_numbers, numbers)]
        return StoredFeatures(self.rows[where], offsets, self.stored.at(where, numbers), raw, numbers, self.shift)

    def _products(self, predictor: Mapping[int, Tensor], wide: torch.dtype) -> Float[Tensor, "F L E"]:
        group = self.stored.sources[0].owner.group if self.stored.sources else None
        if group is None:
            return products(self.hidden, predictor, self.layer_numbers, wide)
        out_FLE = torch.zeros(self.raw.shape, dtype=wide)
        for home, found in enumerate(group.ask(multiply_own, self.stored, predictor, wide)):
            for (source, where_F, _), own_FLE in zip(self.stored.parts(home), found, strict=True):
                out_FLE[where_F[:, None], columns(self.layer_numbers, source.layer_numbers)] = own_FLE
        return out_FLE

    def _shifted(self, predictor: Mapping[int, Tensor], sign: float) -> StoredFeatures:
        self._check_layers(predictor)
        assert self.shift is None, "nobody shifts twice"
        return StoredFeatures(self.rows, self.offsets, self.stored, self.raw, self.layer_numbers, (predictor, sign))

    def _followed_by(self, others: Sequence[RouterFeatures], offsets: Tensor) -> StoredFeatures:
        places, first, parts = [], 0, (self, *others)
        for part in parts:
            assert isinstance(part, StoredFeatures) and part.shift is None, "all are as their makers sent them"
            places.append((part.stored, torch.arange(first, first + len(part.rows))))
            first += len(part.rows)
        rows, raw = torch.cat([part.rows for part in parts]), torch.cat([part.logits for part in parts])
        return StoredFeatures(rows, offsets, StoredHidden.joined(places, first), raw, self.layer_numbers)

    def _assembled(
        self, places: Sequence[tuple[RouterFeatures, tuple[Tensor, Tensor]]], whole: RouterFeatures
    ) -> StoredFeatures:
        stored = []
        for part, (where_F1, _) in places:
            assert isinstance(part, StoredFeatures), "all parts have travelled"
            stored.append((part.stored, where_F1[:, 0]))
        joined = StoredHidden.joined(stored, len(whole.rows))
        return StoredFeatures(whole.rows, whole.offsets, joined, whole.logits, whole.layer_numbers)


def products(
    hidden_FLD: Float[Tensor, "F L D"], predictor: Mapping[int, Tensor], layers: Sequence[int], wide: torch.dtype
) -> Float[Tensor, "F L E"]:
    """h W_p of every row and layer, with the bits that a row has among many."""
    W_LDE = torch.stack([predictor[n].to(wide) for n in layers])
    F, (_, L, D) = len(hidden_FLD), hidden_FLD.shape
    if F < LEAST_ROWS:
        hidden_FLD = torch.cat([hidden_FLD, hidden_FLD.new_zeros(LEAST_ROWS - F, L, D)])
    return layer_products(hidden_FLD.to(wide), W_LDE)[:F]


def multiply_own(
    stored: StoredHidden, predictor: Mapping[int, Tensor], wide: torch.dtype, home: int
) -> list[Float[Tensor, "F L E"]]:
    """The products of the hidden states in each source of this actor's."""
    return [
        products(source.tensor()[row_F], predictor, source.layer_numbers, wide)
        for source, _, row_F in stored.parts(home)
    ]


__all__ = ["StoredFeatures", "StoredHidden"]
