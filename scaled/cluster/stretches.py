"""Stretches of a record's rows that lie together in one stored tensor, a column of integers per field.

Letters: S stretches, Q requests for rows of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from theory.routing.packed_rows import offsets_of, selected_rows


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
    return [stretches.at(where) for where in order.split(counts)]
