"""Rows of responses that lie in stored tensors, as stretches of rows that lie together: a column of integers per field.

Letters: S stretches, Q requests for rows of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from scaled.cluster.sources import RankGroup
from theory.routing.packed_rows import checked, offsets_of, ranges, selected_rows

BLOCK_BYTES = 2**22
"""Most bytes of rows at once, in the driver as it writes them and in actors as they compare; a response with more is a
block of its own."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """Rows [first, first + num) of a response are rows [start, start + num) of a source; sorted by response."""

    source_S: Int[Tensor, " S"]
    response_S: Int[Tensor, " S"]
    first_S: Int[Tensor, " S"]
    start_S: Int[Tensor, " S"]
    num_S: Int[Tensor, " S"]

    def at(self, where: Tensor) -> Stretches:
        """The stretches that `where` chooses, by number or by mask."""
        columns = (self.source_S, self.response_S, self.first_S, self.start_S, self.num_S)
        return Stretches(*(column[where] for column in columns))

    @staticmethod
    def concat(parts: Sequence[Stretches]) -> Stretches:
        """All of them, sorted by response, and within a response by part."""
        names = ("source_S", "response_S", "first_S", "start_S", "num_S")
        whole = Stretches(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
        return whole.at(whole.response_S.argsort(stable=True))

    def taken(
        self,
        num_responses: int,
        indices_Q: Int[Tensor, " Q"],
        rows_Q: tuple[Int[Tensor, " Q"], Int[Tensor, " Q"]],
        places_Q: tuple[Int[Tensor, " Q"], Int[Tensor, " Q"]],
    ) -> Stretches:
        """For each request the rows [from, to) of a response, moved to another response from a first row on.

        rows_Q: from and to, of response indices_Q. places_Q: the new response and its first row. num_responses: of the
        record that these stretches belong to.
        """
        # Stretches are sorted by response, so `selected_rows` finds a response's stretches as it finds its rows.
        counts_B = torch.bincount(self.response_S, minlength=num_responses)
        where, offsets = selected_rows(offsets_of(counts_B.tolist()), indices_Q.tolist())
        q_S, old = torch.arange(len(indices_Q)).repeat_interleave(offsets.diff()), self.at(where)
        # The overlap of each stretch with the requested rows; an empty one has num <= 0 and is dropped.
        low_S = old.first_S.maximum(rows_Q[0][q_S])
        num_S = (old.first_S + old.num_S).minimum(rows_Q[1][q_S]) - low_S
        response_S, first_S = places_Q[0][q_S], low_S - rows_Q[0][q_S] + places_Q[1][q_S]
        new = Stretches(old.source_S, response_S, first_S, old.start_S + low_S - old.first_S, num_S).at(num_S > 0)
        return new.at(new.response_S.argsort(stable=True))


def by_source(stretches: Stretches, num_sources: int) -> list[Stretches]:
    """The stretches of each source, in their order."""
    order = stretches.source_S.argsort(stable=True)
    counts = torch.bincount(stretches.source_S, minlength=num_sources).tolist()
    # All columns are sorted once and then cut: there may be thousands of sources.
    columns = (column.split(counts) for column in vars(stretches.at(order)).values())
    return [Stretches(*own) for own in zip(*columns, strict=True)]


class InStretches:
    """Packed rows of responses of which this process has only the places: it selects and joins them, and reads none.

    stretches: the place of every row in `sources`; rows without a place have what the subclass fills in.
    """

    sources: tuple[Any, ...]
    stretches: Stretches
    offsets: Int[Tensor, " B_plus_1"]

    def _of(self, sources: Sequence[Any], stretches: Stretches, num_rows_B: Sequence[int]) -> Any:
        """Rows like these in other places."""
        raise NotImplementedError

    def _keep(self, sources: Sequence[Any], stretches: Stretches, **own: Any) -> None:
        """Sets the fields, with the sources that have rows here: an unused reference would keep its object alive."""
        used = stretches.source_S.unique()
        number_of = torch.zeros(len(sources), dtype=torch.int64)
        number_of[used] = torch.arange(len(used))
        own["sources"] = tuple(sources[i] for i in used.tolist())
        own["stretches"] = replace(stretches, source_S=number_of[stretches.source_S])
        # Not by a dataclass's own __init__, which would check the rows; their makers have checked them.
        self.__dict__.update(own)

    def select(self, indices: Sequence[int]) -> Any:
        """The rows of these responses, in this order."""
        which = checked(self.offsets, indices)
        return self._begun(which, self.offsets.diff()[which])

    def beginnings(self, num_rows_B: Sequence[int]) -> Any:
        """The first so many rows of each response."""
        num_B = torch.tensor(num_rows_B, dtype=torch.int64)
        return self._begun(torch.arange(len(num_B)), num_B)

    def _begun(self, which_Q: Int[Tensor, " Q"], num_Q: Int[Tensor, " Q"]) -> Any:
        zeros_Q = torch.zeros_like(num_Q)
        places = torch.arange(len(which_Q)), zeros_Q
        stretches = self.stretches.taken(len(self.offsets) - 1, which_Q, (zeros_Q, num_Q), places)
        return self._of(self.sources, stretches, num_Q.tolist())

    def _joined(self, others: Sequence[Any]) -> Any:
        """These rows, then those of the others."""
        first, moved, lengths = 0, [], []
        sources: list[Any] = []
        for own in (self, *others):
            assert isinstance(own, type(self)), "all parts have travelled"
            old = own.stretches
            moved.append(replace(old, source_S=old.source_S + len(sources), response_S=old.response_S + first))
            sources += own.sources
            lengths.append(own.offsets.diff())
            first += len(lengths[-1])
        return self._of(sources, Stretches.concat(moved), torch.cat(lengths).tolist())

    def _put(self, parts_B: Sequence[Sequence[tuple[Any, int, int, int]]], num_rows_B: Sequence[int]) -> Any:
        """Response b has, for each (rows, i, start, at), those of response i from `start` on, from its row `at` on."""
        # Keyed by identity: parts of many responses lie in the same few rows, and each is taken from once.
        asked: dict[int, list[tuple[int, int, int, int]]] = {}
        every: dict[int, InStretches] = {}
        for b, parts in enumerate(parts_B):
            for rows, i, start, at in parts:
                assert isinstance(rows, type(self)), "all parts are of the same actors"
                every[id(rows)] = rows
                asked.setdefault(id(rows), []).append((i, start, b, at))
        sources: list[Any] = []
        taken = []
        for key, rows in every.items():
            which, start, response, at = torch.tensor(asked[key]).unbind(1)
            window = start, rows.offsets.diff()[which]
            new = rows.stretches.taken(len(rows.offsets) - 1, which, window, (response, at))
            taken.append(replace(new, source_S=new.source_S + len(sources)))
            sources += rows.sources
        return self._of(sources, Stretches.concat(taken), num_rows_B)

    def _rows(self, stretches: Stretches) -> Int[Tensor, " R"]:
        """The numbers of the packed rows that these stretches hold."""
        return ranges(self.offsets[stretches.response_S] + stretches.first_S, stretches.num_S)

    @property
    def _group(self) -> RankGroup | None:
        return self.sources[0].owner.group if self.sources else None

    def _blocks(self, group: RankGroup, row_bytes: int) -> Iterator[tuple[Any, list[tuple[Any, Tensor, Tensor]]]]:
        """Some responses at a time, with (source, numbers of rows, rows) as the actors that made them send them."""
        for indices in in_blocks(self.offsets.diff(), row_bytes):
            some, sent = self.select(indices.tolist()), []
            made = sources_by_home(some)
            for home, found in enumerate(group.ask(send_own, some)):
                for (source, own), rows in zip(made.get(home, []), found, strict=True):
                    sent.append((source, some._rows(own), rows))
            yield some, sent


def sources_by_home(rows: InStretches) -> dict[int, list[tuple[Any, Stretches]]]:
    """The sources that each actor made, with their stretches."""
    made: dict[int, list[tuple[Any, Stretches]]] = {}
    for source, own in zip(rows.sources, by_source(rows.stretches, len(rows.sources)), strict=True):
        made.setdefault(source.owner.home, []).append((source, own))
    return made


def send_own(rows: InStretches, home: int) -> list[Tensor]:
    """The rows in each source of this actor's."""
    return [source.tensor()[ranges(own.start_S, own.num_S)] for source, own in sources_by_home(rows).get(home, [])]


def in_blocks(num_rows: Int[Tensor, " N"], row_bytes: int) -> Iterator[Int[Tensor, " _"]]:
    """The numbers 0..N - 1 in consecutive blocks whose rows have at most BLOCK_BYTES, or of one number."""
    first = 0
    total = num_rows.cumsum(0) * row_bytes
    while first < len(num_rows):
        before = int(total[first - 1]) if first else 0
        stop = max(first + 1, int(torch.searchsorted(total, before + BLOCK_BYTES, right=True)))
        yield torch.arange(first, stop)
        first = stop
