"""Routing records whose ids stay in the object store: the driver holds references, ranks fetch the rows that they need.

Engines and ranks return their records beside their answers, in objects of their own (`storing.pack_apart`). The
driver's side of such a record is a `StoredRecord`, which selects, concatenates and splices without touching an id. Two
records are compared by the actors that made the second one, each on its own rows and layers, and only counts come back.

Extra letters: S stretches of rows that lie together in one stored tensor, Q stretches that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from scaled.cluster.sources import RankGroup, Source, columns
from scaled.cluster.stretches import Stretches, by_source
from theory.routing.counts import RouteCounts
from theory.routing.packed_rows import offsets_of, place, ranges
from theory.routing.record import MISSING, RoutingRecord

BLOCK_BYTES = 2**22
"""Most bytes of ids at once, in the driver as it writes a record and in actors as they compare; a response with more is
a block of its own."""


@dataclass(frozen=True, eq=False)
class RouteSource(Source):
    """Stored ids (rows, L, K); `missing` has the numbers of the rows that lack some layer."""

    missing: Int[Tensor, " _"]


class StoredRecord(RoutingRecord):
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
        # Keep only the sources with rows here, and renumber them: an unused reference would keep its object in memory.
        used = stretches.source_S.unique()
        number_of = torch.zeros(len(sources), dtype=torch.int64)
        number_of[used] = torch.arange(len(used))
        # Not by the dataclass's own __init__, which would check the ids; their makers have checked them.
        own = {
            "sources": tuple(sources[i] for i in used.tolist()),
            "stretches": replace(stretches, source_S=number_of[stretches.source_S]),
            "offsets": offsets,
            "layer_numbers": layer_numbers,
            "num_experts": num_experts,
            "slots": slots,
        }
        self.__dict__.update(own)

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

    def select(self, indices: Sequence[int]) -> StoredRecord:
        """The record of these responses, in this order."""
        which = self._which(list(indices))
        return self._begun(which, self.offsets.diff()[which])

    def beginnings(self, num_rows_B: Sequence[int]) -> StoredRecord:
        """The record of the first so many rows of each response."""
        return self._begun(torch.arange(len(self)), torch.tensor(num_rows_B, dtype=torch.int64))

    def _begun(self, which_Q: Int[Tensor, " Q"], num_Q: Int[Tensor, " Q"]) -> StoredRecord:
        zeros_Q = torch.zeros_like(num_Q)
        places = torch.arange(len(which_Q)), zeros_Q
        stretches = self.stretches.taken(len(self), which_Q, (zeros_Q, num_Q), places)
        return self._of(self.sources, stretches, num_Q.tolist())

    def compared(self, other: RoutingRecord, count: Callable[[Tensor, Tensor], RouteCounts]) -> RouteCounts:
        """`count` of both records' ids, made by the actors that made this record, each on its own rows and layers."""
        group = self._group
        # Without a group this process is an actor itself, so it fetches the ids and compares them here.
        if group is None or not isinstance(other, StoredRecord):
            return super().compared(other, count)
        parts: list[RouteCounts] = []
        rows: list[Tensor] = []
        for home, found in enumerate(group.ask(compare_own, self, other, count)):
            # The actor went through its sources in the order of `_own`, as this process does.
            rows += [self._rows(own) for _, own in _own(self, home)]
            parts += found
        # A row has a count per set of layers; `placed` adds them.
        return RouteCounts.concat(parts).placed(torch.cat(rows), int(self.offsets[-1]))

    def blocks(self) -> Iterator[Int[Tensor, "rows L K"]]:
        """All ids in the order of rows, some responses at a time, sent by the actors that made them."""
        group, num_B = self._group, self.offsets.diff()
        if group is None:
            yield self.experts
            return
        for indices in in_blocks(num_B, self.nbytes // max(1, int(self.offsets[-1]))):
            some = self.select(indices.tolist())
            out_RLK = some._missing(int(some.offsets[-1]), some.layer_numbers)
            for home, found in enumerate(group.ask(send_own, some)):
                for (source, own), ids_RLK in zip(_own(some, home), found, strict=True):
                    out_RLK[some._rows(own)[:, None], columns(some.layer_numbers, source.layer_numbers)] = ids_RLK
            yield out_RLK

    @property
    def _group(self) -> RankGroup | None:
        return self.sources[0].owner.group if self.sources else None

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        num_B = self.offsets.diff()
        return torch.arange(len(self)), torch.zeros_like(num_B), num_B

    def _rows(self, stretches: Stretches) -> Int[Tensor, " R"]:
        """The numbers of the packed rows of this record that these stretches of it hold."""
        return ranges(self.offsets[stretches.response_S] + stretches.first_S, stretches.num_S)

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

    def _of(self, sources: tuple[RouteSource, ...], stretches: Stretches, num_rows_B: Sequence[int]) -> StoredRecord:
        return StoredRecord(
            sources, stretches, offsets_of(num_rows_B), self.layer_numbers, self.num_experts, self.slots
        )

    def _followed_by(self, others: Sequence[RoutingRecord]) -> RoutingRecord:
        shift, placed = 0, []
        for record in (self, *others):
            placed.append((record, range(shift, shift + len(record)), 0))
            shift += len(record)
        return self._assembled(placed, [n for record in (self, *others) for n in record.num_rows_B])

    def _spliced(self, stretches_B: Sequence[Sequence[tuple[RoutingRecord, int, int]]]) -> RoutingRecord:
        asked: dict[int, list[tuple[int, int, int, int]]] = {}
        records: dict[int, StoredRecord] = {}
        lengths: dict[int, list[int]] = {}
        num_rows_B = []
        for b, stretches in enumerate(stretches_B):
            at = 0
            for record, i, start in stretches:
                # Keyed by identity: turns of many responses lie in the same few records, and each is taken from once.
                assert isinstance(record, StoredRecord), "all turns are of the same engines"
                if id(record) not in records:
                    records[id(record)], lengths[id(record)] = record, record.num_rows_B
                asked.setdefault(id(record), []).append((i, start, b, at))
                at += lengths[id(record)][i] - start
            num_rows_B.append(at)
        sources: list[RouteSource] = []
        parts = []
        for key, record in records.items():
            which, start, response, at = torch.tensor(asked[key]).unbind(1)
            rows = start, record.offsets.diff()[which]
            taken = record.stretches.taken(len(record), which, rows, (response, at))
            parts.append(replace(taken, source_S=taken.source_S + len(sources)))
            sources += record.sources
        return self._of(tuple(sources), Stretches.concat(parts), num_rows_B)

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
        for layer in self.layer_numbers:
            num_R = torch.stack([n for n, layers in zip(times, sets, strict=True) if layer in layers]).sum(0)
            if bool((num_R != 1).any()):
                row = int((num_R != 1).nonzero()[0])
                got = "none" if int(num_R[row]) == 0 else "more than one"
                raise ValueError(f"expected one route of {place(row, self.offsets)}, layer {layer}, got {got}")


def _own(record: StoredRecord, home: int) -> list[tuple[RouteSource, Stretches]]:
    """The sources that this actor made, each with its stretches."""
    parts = zip(record.sources, by_source(record.stretches, len(record.sources)), strict=True)
    return [(source, own) for source, own in parts if source.owner.home == home]


def compare_own(
    record: StoredRecord, other: StoredRecord, count: Callable[[Tensor, Tensor], RouteCounts], home: int
) -> list[RouteCounts]:
    """`count` of the other record's ids and this actor's own, for each of its sources; some responses at a time."""
    found = []
    for source, own in _own(record, home):
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


def send_own(record: StoredRecord, home: int) -> list[Tensor]:
    """The ids of the record's rows in each source of this actor's."""
    return [source.tensor()[ranges(own.start_S, own.num_S)] for source, own in _own(record, home)]


def in_blocks(num_rows: Int[Tensor, " N"], row_bytes: int) -> Iterator[Int[Tensor, " _"]]:
    """The numbers 0..N - 1 in consecutive blocks whose rows have at most BLOCK_BYTES, or of one number."""
    first = 0
    total = num_rows.cumsum(0) * row_bytes
    while first < len(num_rows):
        before = int(total[first - 1]) if first else 0
        stop = max(first + 1, int(torch.searchsorted(total, before + BLOCK_BYTES, right=True)))
        yield torch.arange(first, stop)
        first = stop


__all__ = ["BLOCK_BYTES", "RouteSource", "StoredRecord"]
