"""The likeliest tokens of mu at every sampled position: the recorded part of its distribution.

`TokenRows` has numbers for every position: the ids of these tokens, their log mu, or their log old.

Letters: A all response-part tokens of the B responses, packed; K tokens of each position; T positions of the padded
batch. Source of the use: score centering (arXiv 2609.20807).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from theory.routing.packed_rows import check_offsets, offsets_of, ranges, selected_rows


@dataclass(frozen=True, eq=False)
class TokenRows:
    """K numbers per position; response b has rows offsets[b]:offsets[b + 1].

    `fill` stands where a position has none: past a response's end, and where it was not sampled.
    """

    values: Shaped[Tensor, "_A _K"]
    offsets: Int[Tensor, " _B_plus_1"]
    fill: float = 0.0

    def __post_init__(self) -> None:
        check_offsets(self.offsets, len(self.values))

    @staticmethod
    def packed(x_BTK: Shaped[Tensor, "B T K"], lengths_B: Int[Tensor, " B"]) -> TokenRows:
        """The first `lengths_B[b]` positions of each response."""
        return TokenRows(x_BTK[torch.arange(x_BTK.shape[1]) < lengths_B[:, None]], offsets_of(lengths_B.tolist()))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def width(self) -> int:
        """K, the numbers per position."""
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers."""
        return int(self.offsets[-1]) * self.width * self.dtype.itemsize

    def rows(self, b: int) -> Shaped[Tensor, "_T _K"]:
        """The rows of response b."""
        return self.values[int(self.offsets[b]) : int(self.offsets[b + 1])]

    def select(self, indices: Sequence[int]) -> TokenRows:
        """The rows of these responses, in this order."""
        which, offsets = selected_rows(self.offsets, indices)
        return replace(self, values=self.values[which], offsets=offsets)

    def beginnings(self, num_rows_B: Sequence[int]) -> TokenRows:
        """The first so many rows of each response."""
        where = ranges(self.offsets[:-1], torch.tensor(num_rows_B))
        return replace(self, values=self.values[where], offsets=offsets_of(num_rows_B))

    @staticmethod
    def concat(parts: Sequence[TokenRows]) -> TokenRows:
        """The parts one after the other, of one width."""
        # By a method of the first: rows that are in other processes are joined there.
        return parts[0] if len(parts) == 1 else parts[0]._followed_by(parts[1:])

    def _followed_by(self, others: Sequence[TokenRows]) -> TokenRows:
        parts = [self, *others]
        lengths = torch.cat([part.offsets.diff() for part in parts]).tolist()
        return replace(self, values=torch.cat([part.values for part in parts]), offsets=offsets_of(lengths))

    @staticmethod
    def placed(parts_B: Sequence[Sequence[tuple[TokenRows, int, int]]], num_rows_B: Sequence[int]) -> TokenRows:
        """Response b has, for each (rows, i, at), those of response i from row `at` on, and the filling elsewhere."""
        return parts_B[0][0][0]._placed(parts_B, num_rows_B)

    def _placed(self, parts_B: Sequence[Sequence[tuple[TokenRows, int, int]]], num_rows_B: Sequence[int]) -> TokenRows:
        offsets = offsets_of(num_rows_B)
        out_AK = self.values.new_full((int(offsets[-1]), self.width), self.fill)
        for first, parts in zip(offsets[:-1].tolist(), parts_B, strict=True):
            for rows, i, at in parts:
                found = rows.rows(i)
                out_AK[first + at : first + at + len(found)] = found
        return replace(self, values=out_AK, offsets=offsets)

    def padded(self, num_positions: int | None = None) -> Shaped[Tensor, "B T K"]:
        """Right-padded with the filling, by default to the longest response."""
        length_B, values_AK = self.offsets.diff(), self.values
        T = int(length_B.max()) if num_positions is None else num_positions
        out_BTK = values_AK.new_full((len(length_B), T, values_AK.shape[1]), self.fill)
        out_BTK[torch.arange(T) < length_B[:, None]] = values_AK
        return out_BTK

    def blocks(self) -> Iterator[Shaped[Tensor, "_ _K"]]:
        """All rows in order, a part at a time where they are not in this process."""
        yield self.values


@dataclass(frozen=True, eq=False)
class TopTokens:
    """Ids in [0, vocab_size), each once in its row, and log mu in nats; -inf where mu samples no such token, or nothing
    (an observation). K = vocab_size is all of mu.
    """

    id_rows: TokenRows
    logp_rows: TokenRows
    vocab_size: int

    def __post_init__(self) -> None:
        ids, logp = self.id_rows, self.logp_rows
        if ids.width != logp.width or not torch.equal(ids.offsets, logp.offsets):
            raise ValueError(
                f"top tokens: expected rows of ids and of log-probabilities alike, got {int(ids.offsets[-1])} of "
                f"{ids.width} and {int(logp.offsets[-1])} of {logp.width}"
            )

    @staticmethod
    def packed(
        ids: Int[Tensor, "_A _K"], logp: Float[Tensor, "_A _K"], offsets: Int[Tensor, " _B_plus_1"], vocab_size: int
    ) -> TopTokens:
        """These ids and log-probabilities; response b has rows offsets[b]:offsets[b + 1]."""
        # Scorers gather by ids on observations and padding, too, so that these must be tokens: -inf marks them instead.
        return TopTokens(TokenRows(ids, offsets), TokenRows(logp, offsets, fill=-torch.inf), vocab_size)

    @staticmethod
    def of(logp_AV: Float[Tensor, "A V"], num: int, offsets: Int[Tensor, " B_plus_1"]) -> TopTokens:
        """The `num` likeliest tokens of every distribution (all of a smaller vocabulary); ids in the narrowest type."""
        V = logp_AV.shape[1]
        logp, ids = logp_AV.topk(min(num, V), dim=1)
        return TopTokens.packed(ids.to(id_dtype(V)), logp, offsets, V)

    @property
    def ids(self) -> Int[Tensor, "_A _K"]:
        """All ids, in this process."""
        return self.id_rows.values

    @property
    def logp(self) -> Float[Tensor, "_A _K"]:
        """All log-probabilities, in this process."""
        return self.logp_rows.values

    @property
    def offsets(self) -> Int[Tensor, " _B_plus_1"]:
        """The first row of each response, and the number of rows."""
        return self.id_rows.offsets

    @property
    def num_top(self) -> int:
        """K, the tokens of each position."""
        return self.id_rows.width

    @property
    def is_complete(self) -> bool:
        """Whether every row holds the whole vocabulary."""
        return self.num_top == self.vocab_size

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and log-probabilities."""
        return self.id_rows.nbytes + self.logp_rows.nbytes

    def rows(self, b: int) -> tuple[Int[Tensor, "_T _K"], Float[Tensor, "_T _K"]]:
        """Ids and log-probabilities of response b."""
        return self.id_rows.rows(b), self.logp_rows.rows(b)

    def select(self, indices: Sequence[int]) -> TopTokens:
        """The rows of these responses, in this order."""
        return TopTokens(self.id_rows.select(indices), self.logp_rows.select(indices), self.vocab_size)

    def beginnings(self, num_rows_B: Sequence[int]) -> TopTokens:
        """The first so many rows of each response."""
        return TopTokens(self.id_rows.beginnings(num_rows_B), self.logp_rows.beginnings(num_rows_B), self.vocab_size)

    @staticmethod
    def concat(parts: Sequence[TopTokens]) -> TopTokens:
        """The parts one after the other; ValueError for parts of other widths."""
        sizes = sorted({(part.num_top, part.vocab_size) for part in parts})
        if len(sizes) > 1:
            raise ValueError(f"top tokens: expected one (tokens, vocabulary) in all parts, got {sizes}")
        ids, logp = ([getattr(part, name) for part in parts] for name in ("id_rows", "logp_rows"))
        return TopTokens(TokenRows.concat(ids), TokenRows.concat(logp), parts[0].vocab_size)

    @staticmethod
    def placed(parts_B: Sequence[Sequence[tuple[TopTokens, int, int]]], num_rows_B: Sequence[int]) -> TopTokens:
        """Response b has, for each (top, i, at), those of response i from its row `at` on, and nothing elsewhere."""
        ids, logp = (
            [[(getattr(top, name), i, at) for top, i, at in parts] for parts in parts_B]
            for name in ("id_rows", "logp_rows")
        )
        vocab_size = parts_B[0][0][0].vocab_size
        return TopTokens(TokenRows.placed(ids, num_rows_B), TokenRows.placed(logp, num_rows_B), vocab_size)

    def padded(self) -> tuple[Int[Tensor, "B T K"], Float[Tensor, "B T K"]]:
        """Right-padded to the longest response: ids 0 and log-probabilities -inf there."""
        return self.id_rows.padded().long(), self.logp_rows.padded()


def id_dtype(vocab_size: int) -> torch.dtype:
    """The narrowest signed integer type that holds every token."""
    # + 1, as ids end at vocab_size - 1.
    return torch.int16 if vocab_size <= torch.iinfo(torch.int16).max + 1 else torch.int32
