"""Router features whose hidden states and logits stay in the object store: the driver knows only where they are.

A rank fetches the rows and layers that it learns from (`StoredFeatures.at`). The process that reads hidden states
multiplies them by the predictor. Two sets of logits are compared by the actors that made the first, each on its own
rows and layers, and only the values of `measure` travel.

Extra letters: F feature rows; G sets of layers, one for each model chunk of a pipeline; X columns of a stored tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scaled.cluster.sources import RankGroup, Source, columns
from theory.routing.features import RouterFeatures, layer_products
from theory.routing.packed_rows import offsets_of

LEAST_ROWS = 8
"""Fewest rows of a product; `products` adds rows of zeros, since torch computes fewer than 4 rows with another kernel,
whose bits differ. (Where E is not a multiple of 4, every number of rows gives other bits.)"""

BLOCK_BYTES = 2**24
"""Most bytes of logits that an actor compares at once; a longer row is compared by itself."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows (F, L, X) in stored tensors: row f at layer set g is row `row_GF` of source `source_GF`."""

    sources: tuple[Source, ...]
    layer_sets: tuple[tuple[int, ...], ...]
    source_GF: Int[Tensor, "G F"]
    row_GF: Int[Tensor, "G F"]
    width: int
    dtype: torch.dtype

    def at(self, where_F: Int[Tensor, " F2"], layer_numbers: Sequence[int]) -> StoredRows:
        """These rows, at the layer sets that have any of these layers, without the sources that are not needed."""
        sets = [g for g, numbers in enumerate(self.layer_sets) if set(numbers) & set(layer_numbers)]
        source_GF, row_GF = self.source_GF[sets][:, where_F], self.row_GF[sets][:, where_F]
        used, source_GF = source_GF.unique(return_inverse=True)
        sources = tuple(self.sources[i] for i in used.tolist())
        layer_sets = tuple(self.layer_sets[g] for g in sets)
        return replace(self, sources=sources, layer_sets=layer_sets, source_GF=source_GF, row_GF=row_GF)

    def read(self, layer_numbers: Sequence[int]) -> Float[Tensor, "F L X"]:
        """All rows at these layers, fetched into this process."""
        # Every row and layer has a source (`RouterFeatures.assembled` checks it), so no place keeps what memory held.
        out_FLX = torch.empty(self.source_GF.shape[1], len(layer_numbers), self.width, dtype=self.dtype)
        for source, where_F, row_F in self.parts():
            shared = [n for n in source.layer_numbers if n in layer_numbers]
            rows_FLX = source.tensor()[row_F[:, None], columns(source.layer_numbers, shared)]
            out_FLX[where_F[:, None], columns(layer_numbers, shared)] = rows_FLX
        return out_FLX

    def parts(self, home: int | None = None) -> list[tuple[Source, Tensor, Tensor]]:
        """Each source, the numbers of its rows here, and their numbers in it; if given, only actor `home`'s sources."""
        found = []
        for source_F, row_F in zip(self.source_GF, self.row_GF, strict=True):
            # Sort once: for millions of rows a comparison with each of thousands of sources would take minutes.
            sizes = torch.bincount(source_F, minlength=len(self.sources)).tolist()
            for source, where_F in zip(self.sources, source_F.argsort(stable=True).split(sizes), strict=True):
                if len(where_F) and home in (None, source.owner.home):
                    found.append((source, where_F, row_F[where_F]))
        return found

    @property
    def group(self) -> RankGroup | None:
        """The actors that made the sources; None without rows, and in a process that received them (`Owner`)."""
        return self.sources[0].owner.group if self.sources else None

    @staticmethod
    def joined(parts: Sequence[tuple[StoredRows, Int[Tensor, " _"]]], num_rows: int) -> StoredRows:
        """`num_rows` rows from parts whose rows go to these places; every place of a layer has a part, and parts with
        some layers in common have the same sets of layers."""
        layer_sets = tuple(dict.fromkeys(numbers for part, _ in parts for numbers in part.layer_sets))
        source_GF, row_GF = (torch.full((len(layer_sets), num_rows), -1) for _ in range(2))
        sources: list[Source] = []
        for part, where_F in parts:
            for own, numbers in enumerate(part.layer_sets):
                g = layer_sets.index(numbers)
                # `sources` grows below, so a part's source numbers move up by the sources of earlier parts.
                source_GF[g, where_F] = part.source_GF[own] + len(sources)
                row_GF[g, where_F] = part.row_GF[own]
            sources += part.sources
        assert bool((source_GF >= 0).all()), "engines and restored responses are cut by the same layers"
        return replace(parts[0][0], sources=tuple(sources), layer_sets=layer_sets, source_GF=source_GF, row_GF=row_GF)


class StoredFeatures(RouterFeatures):
    """Router features in stored tensors; each access to `hidden` or `logits` fetches all of them into this process.

    shift: a predictor W_p and a sign; `logits` are then the stored ones + sign * h W_p, computed at each access.
    """

    def __init__(
        self,
        rows: Int[Tensor, " F"],
        offsets: Int[Tensor, " B_plus_1"],
        stored_hidden: StoredRows | None,
        stored_logits: StoredRows,
        layer_numbers: tuple[int, ...],
        shift: tuple[Mapping[int, Tensor], float] | None = None,
    ):
        # Not by the dataclass's own __init__, which would set `hidden` and `logits`: they are properties here.
        own = {"rows": rows, "offsets": offsets, "layer_numbers": layer_numbers}
        self.__dict__.update(own, stored_hidden=stored_hidden, stored_logits=stored_logits, shift=shift)

    stored_hidden: StoredRows | None
    stored_logits: StoredRows
    shift: tuple[Mapping[int, Tensor], float] | None

    @property
    def hidden(self) -> Float[Tensor, "F L D"] | None:  # type: ignore[override]
        """All hidden states, fetched into this process."""
        return None if self.stored_hidden is None else self.stored_hidden.read(self.layer_numbers)

    @property
    def logits(self) -> Float[Tensor, "F L E"]:  # type: ignore[override]
        """The logits, fetched into this process and shifted."""
        logits = self.stored_logits.read(self.layer_numbers)
        if self.shift is None:
            return logits
        predictor, sign = self.shift
        # In the dtype of `RouterFeatures._shifted`, for the same bits.
        wide, hidden = torch.promote_types(logits.dtype, torch.float32), self.hidden
        assert hidden is not None, "only features with hidden states are shifted"
        return logits.to(wide) + sign * products(hidden, predictor, self.layer_numbers, wide)

    @property
    def has_hidden(self) -> bool:
        """Whether hidden states, the routers' inputs, are stored."""
        return self.stored_hidden is not None

    @property
    def nbytes(self) -> int:
        """Bytes of hidden states and logits at `layer_numbers`, none of which are in this process."""
        stored = [one for one in (self.stored_hidden, self.stored_logits) if one is not None]
        return len(self.rows) * len(self.layer_numbers) * sum(one.width * one.dtype.itemsize for one in stored)

    def at(
        self,
        where: Int[Tensor, " F2"],
        offsets: Int[Tensor, " B2_plus_1"],
        layer_numbers: tuple[int, ...] | None = None,
    ) -> StoredFeatures:
        """The features at these places, and these layers if given, as `RouterFeatures.at`; fetches nothing."""
        numbers = self.layer_numbers if layer_numbers is None else layer_numbers
        hidden = None if self.stored_hidden is None else self.stored_hidden.at(where, numbers)
        logits = self.stored_logits.at(where, numbers)
        return StoredFeatures(self.rows[where], offsets, hidden, logits, numbers, self.shift)

    def without_hidden(self) -> StoredFeatures:
        """The logits alone; shifted logits keep their hidden states, from which each reader computes the shift."""
        hidden = None if self.shift is None else self.stored_hidden
        return StoredFeatures(self.rows, self.offsets, hidden, self.stored_logits, self.layer_numbers, self.shift)

    def _compared(self, other: RouterFeatures, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        group = self.stored_logits.group
        # Shifted logits are a product that only a reader makes, so this process fetches and compares them.
        if group is None or self.shift is not None or not isinstance(other, StoredFeatures):
            return super()._compared(other, measure)
        every, found = self.stored_logits.parts(), group.ask(compare_own, self, other, measure)
        # There is one, as a group means a source. It shows the values' shape and dtype.
        one = next(own_FLX for of_home in found for own_FLX in of_home)
        out_FLX = torch.empty(len(self.rows), len(self.layer_numbers), one.shape[2], dtype=one.dtype)
        for home, of_home in enumerate(found):
            made = [part for part in every if part[0].owner.home == home]
            for (source, where_F, _), own_FLX in zip(made, of_home, strict=True):
                out_FLX[where_F[:, None], columns(self.layer_numbers, source.layer_numbers)] = own_FLX
        return out_FLX

    def _shifted(self, predictor: Mapping[int, Tensor], sign: float) -> StoredFeatures:
        self._check_layers(predictor)
        assert self.shift is None, "features are shifted once only"
        shift = predictor, sign
        return StoredFeatures(
            self.rows, self.offsets, self.stored_hidden, self.stored_logits, self.layer_numbers, shift
        )

    def _followed_by(self, others: Sequence[RouterFeatures], offsets: Tensor) -> StoredFeatures:
        places, first, parts = [], 0, (self, *others)
        for part in parts:
            places.append((part, torch.arange(first, first + len(part.rows))))
            first += len(part.rows)
        return _joined(places, torch.cat([part.rows for part in parts]), offsets, self.layer_numbers)

    def _assembled(
        self,
        places: Sequence[tuple[RouterFeatures, tuple[Tensor, Tensor]]],
        rows: Tensor,
        offsets: Tensor,
        layers: tuple[int, ...],
    ) -> StoredFeatures:
        return _joined([(part, where_F1[:, 0]) for part, (where_F1, _) in places], rows, offsets, layers)


def _joined(
    places: Sequence[tuple[RouterFeatures, Tensor]], rows: Tensor, offsets: Tensor, layers: tuple[int, ...]
) -> StoredFeatures:
    """The features on these rows and layers, from parts whose rows go to these places."""
    hidden, logits = [], []
    for part, where_F in places:
        assert isinstance(part, StoredFeatures) and part.shift is None, "parts are joined as their makers sent them"
        logits.append((part.stored_logits, where_F))
        if part.stored_hidden is not None:
            hidden.append((part.stored_hidden, where_F))
    stored_hidden = StoredRows.joined(hidden, len(rows)) if hidden else None
    return StoredFeatures(rows, offsets, stored_hidden, StoredRows.joined(logits, len(rows)), layers)


def products(
    hidden_FLD: Float[Tensor, "F L D"], predictor: Mapping[int, Tensor], layers: Sequence[int], wide: torch.dtype
) -> Float[Tensor, "F L E"]:
    """h W_p of every row and layer, with the bits that a row has in a product of many rows."""
    W_LDE = torch.stack([predictor[n].to(wide) for n in layers])
    F, (_, L, D) = len(hidden_FLD), hidden_FLD.shape
    if F < LEAST_ROWS:
        hidden_FLD = torch.cat([hidden_FLD, hidden_FLD.new_zeros(LEAST_ROWS - F, L, D)])
    return layer_products(hidden_FLD.to(wide), W_LDE)[:F]


def compare_own(
    features: StoredFeatures, other: StoredFeatures, measure: Callable[[Tensor, Tensor], Tensor], home: int
) -> list[Float[Tensor, "F L X"]]:
    """`measure` of this actor's own logits and the other's on the same rows, for each of its sources; in blocks."""
    found = []
    for source, where_F, row_F in features.stored_logits.parts(home):
        mine_FLE = source.tensor()
        num = max(1, BLOCK_BYTES // max(1, mine_FLE[:1].nbytes))
        blocks = []
        for own_f, there_f in zip(row_F.split(num), where_F.split(num), strict=True):
            theirs = other.at(there_f, offsets_of([len(there_f)]), source.layer_numbers)
            blocks.append(measure(mine_FLE[own_f], theirs.logits))
        found.append(torch.cat(blocks))
    return found


__all__ = ["StoredFeatures", "StoredRows"]
