"""Routing records whose ids stay in the object store: the driver holds references, ranks fetch the rows that they need.

Engines and ranks return their records beside their answers, in objects of their own (`storing.pack_apart`). The
driver's side of such a record is a `StoredRecord`, which selects, concatenates and splices without touching an id. Two
records are compared by the actors that made the second one, each on its own rows and layers, and only counts come back.

Extra letters: S stretches of rows that lie together in one stored tensor, Q stretches that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from scaled.cluster.sources import Source, columns
from scaled.cluster.stretches import InStretches, Stretches, by_source, in_blocks, sources_by_home
from theory.routing.counts import RouteCounts
from theory.routing.packed_rows import offsets_of, place, ranges
from theory.routing.record import MISSING, RoutingRecord


@dataclass(frozen=True, eq=False)
class RouteSource(Source):
    """Stored ids (rows, L, K); `missing` has the numbers of the rows that lack some layer."""

    missing: Int[Tensor, " _"]


class StoredRecord(InStretches, RoutingRecord):
    """A routing record whose ids are stored elsewhere; each access to `experts` fetches all of them into this process.

    slots: K and the dtype of the ids. stretches: the place of every row in `sources`.
    """

    def __init__(
        self,
        sources: tuple[RouteSource, ...],
        stretches: Stretches,
        offsets: Int[Tensor, " B_plus_1"],
        layer_numbers: tuple[int, ...],
        num_experts: int,
        slots: tuple[int, torch.dtype],
    ):
        self._keep(
            sources,
            stretches,
            offsets=offsets,
            layer_numbers=layer_numbers,
            num_experts=num_experts,
            slots=slots,
        )

    sources: tuple[RouteSource, ...]
    stretches: Stretches
    slots: tuple[int, torch.dtype]

    @property
    def experts(self) -> Int[Tensor, "R L K"]:  # type: ignore[override]
        """All ids, fetched into this process."""
        return self._ids(*self._all(), self.layer_numbers)

    @property
    def num_slots(self) -> int:
        """K, the experts per row and layer."""
        return self.slots[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the ids, none of which are in this process."""
        return int(self.offsets[-1]) * len(self.layer_numbers) * self.slots[0] * self.slots[1].itemsize

    @property
    def num_missing_rows(self) -> int:
        """The number of rows that are missing at one layer or more."""
        found = []
        for source, own in zip(self.sources, by_source(self.stretches, len(self.sources)), strict=True):
            if len(source.missing):
                found.append(self._rows(own)[torch.isin(ranges(own.start_S, own.num_S), source.missing)])
        # With pipeline stages a row has a source per stage: `unique` counts it once.
        return len(torch.cat(found).unique()) if found else 0

    def rows(self, b: int) -> Int[Tensor, "rows L K"]:
        """The rows of response b, fetched."""
        return self.select([b]).experts

    def compared(self, other: RoutingRecord, count: Callable[[Tensor, Tensor], RouteCounts]) -> RouteCounts:
        """`count` of both records' ids, made by the actors that made this record, each on its own rows and layers."""
        group = self._group
        # Without a group this process is an actor itself, so it fetches the ids and compares them here.
        if group is None or not isinstance(other, StoredRecord):
            return super().compared(other, count)
        parts: list[RouteCounts] = []
        rows: list[Tensor] = []
        made = sources_by_home(self)
        for home, found in enumerate(group.ask(compare_own, self, other, count)):
            # The actor went through its sources in the order of `sources_by_home`, as this process does.
            rows += [self._rows(own) for _, own in made.get(home, [])]
            parts += found
        # A row has a count per set of layers; `placed` adds them.
        return RouteCounts.concat(parts).placed(torch.cat(rows), int(self.offsets[-1]))

    def blocks(self) -> Iterator[Int[Tensor, "rows L K"]]:
        """All ids in the order of rows, some responses at a time, sent by the actors that made them."""
        group = self._group
        if group is None:
            yield self.experts
            return
        for some, sent in self._blocks(group, self.nbytes // max(1, int(self.offsets[-1]))):
            out_RLK = some._missing(int(some.offsets[-1]), some.layer_numbers)
            for source, rows_R, ids_RLK in sent:
                out_RLK[rows_R[:, None], columns(some.layer_numbers, source.layer_numbers)] = ids_RLK
            yield out_RLK

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        num_B = self.offsets.diff()
        return torch.arange(len(self)), torch.zeros_like(num_B), num_B

    def _missing(self, num_rows: int, layers: Sequence[int]) -> Tensor:
        return torch.full((num_rows, len(layers), self.slots[0]), MISSING, dtype=self.slots[1])

    def _ids(self, which_Q: Tensor, from_Q: Tensor, to_Q: Tensor, layers: Sequence[int]) -> Int[Tensor, "R L K"]:
        """The ids of rows [from, to) of these responses, one after the other, at these layers."""
        offsets = offsets_of((to_Q - from_Q).tolist())
        places = torch.arange(len(which_Q)), torch.zeros_like(which_Q)
        taken = self.stretches.taken(len(self), which_Q, (from_Q, to_Q), places)
        out_RLK = self._missing(int(offsets[-1]), layers)
        # Only the sources that are needed: a micro-batch has its rows from few of many ranks.
        for number in taken.source_S.unique().tolist():
            source, own = self.sources[number], taken.at(taken.source_S == number)
            shared = [n for n in source.layer_numbers if n in layers]
            if shared:  # under pipeline parallelism a source may have none of these layers
                rows_R, place_R = (
                    ranges(own.start_S, own.num_S),
                    ranges(offsets[own.response_S] + own.first_S, own.num_S),
                )
                ids_RLK = source.tensor()[rows_R[:, None], columns(source.layer_numbers, shared)]
                out_RLK[place_R[:, None], columns(layers, shared)] = ids_RLK
        return out_RLK

    def _of(self, sources: Sequence[Any], stretches: Stretches, num_rows_B: Sequence[int]) -> StoredRecord:
        return StoredRecord(
            tuple(sources), stretches, offsets_of(num_rows_B), self.layer_numbers, self.num_experts, self.slots
        )

    def _followed_by(self, others: Sequence[RoutingRecord]) -> RoutingRecord:
        return self._joined(others)

    def _spliced(self, stretches_B: Sequence[Sequence[tuple[RoutingRecord, int, int]]]) -> RoutingRecord:
        lengths: dict[int, list[int]] = {}
        parts_B, num_rows_B = [], []
        for stretches in stretches_B:
            at, parts = 0, []
            for record, i, start in stretches:
                if id(record) not in lengths:
                    lengths[id(record)] = record.num_rows_B
                parts.append((record, i, start, at))
                at += lengths[id(record)][i] - start
            parts_B.append(parts)
            num_rows_B.append(at)
        return self._put(parts_B, num_rows_B)

    def _assembled(
        self, parts: Sequence[tuple[RoutingRecord, Sequence[int], int]], num_rows_B: Sequence[int]
    ) -> RoutingRecord:
        sources: list[RouteSource] = []
        moved = []
        for record, indices, start in parts:
            assert isinstance(record, StoredRecord), "all parts have travelled"
            old, place_b = record.stretches, torch.tensor(list(indices), dtype=torch.int64)
            moved.append(
                replace(
                    old,
                    source_S=old.source_S + len(sources),
                    response_S=place_b[old.response_S],
                    first_S=old.first_S + start,
                )
            )
            sources += record.sources
        layers = tuple(sorted({n for record, *_ in parts for n in record.layer_numbers}))
        whole = StoredRecord(
            tuple(sources), Stretches.concat(moved), offsets_of(num_rows_B), layers, self.num_experts, self.slots
        )
        whole._check_covered()
        return whole

    def _check_covered(self) -> None:
        """ValueError unless every row of every layer has one source."""
        # Count per set of layers, not per layer: the ranks of a stage have the same layers, so there are few sets.
        sets = list(dict.fromkeys(source.layer_numbers for source in self.sources))
        set_of = torch.tensor([sets.index(source.layer_numbers) for source in self.sources], dtype=torch.int64)
        set_S, num_rows = set_of[self.stretches.source_S], int(self.offsets[-1])
        times = []
        for number in range(len(sets)):
            rows_R = self._rows(self.stretches.at(set_S == number))
            times.append(torch.bincount(rows_R, minlength=num_rows))
        first: dict[tuple[int, ...], int] = {}
        for layer in self.layer_numbers:
            # Layers with the same holders have the same rows, which are counted once.
            first.setdefault(tuple(number for number, layers in enumerate(sets) if layer in layers), layer)
        for holders, layer in first.items():
            num_R = torch.stack([times[number] for number in holders]).sum(0)
            if bool((num_R != 1).any()):
                row = int((num_R != 1).nonzero()[0])
                got = "none" if int(num_R[row]) == 0 else "more than one"
                raise ValueError(f"expected one route of {place(row, self.offsets)}, layer {layer}, got {got}")


def compare_own(
    record: StoredRecord, other: StoredRecord, count: Callable[[Tensor, Tensor], RouteCounts], home: int
) -> list[RouteCounts]:
    """`count` of the other record's ids and this actor's own, for each of its sources; some responses at a time."""
    found = []
    for source, own in sources_by_home(record).get(home, []):
        ids_RLK = source.tensor()
        row_bytes = max(1, ids_RLK[:1].nbytes)
        parts = []
        for chosen in in_blocks(own.num_S, row_bytes):
            some = own.at(chosen)
            mine_RLK = ids_RLK[ranges(some.start_S, some.num_S)]
            theirs_RLK = other._ids(some.response_S, some.first_S, some.first_S + some.num_S, source.layer_numbers)
            parts.append(count(theirs_RLK, mine_RLK))
        found.append(RouteCounts.concat(parts))
    return found


__all__ = ["RouteSource", "StoredRecord"]
