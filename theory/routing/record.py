"""The routing record: which experts the router of each MoE layer chose for each input token, packed over responses.

Row s is the router's choice for input token s, so S tokens have S - 1 rows: the last sampled one was never an input.
A record is checked as it is made: every row-layer holds distinct ids in ascending order, or -1 in every slot (missing).

Letters beyond theory/contracts.py: R rows of all responses together.
Papers: R3 (arXiv 2510.11370) Eq. 5 and sec. 4.2, Pr2 (arXiv 2606.00395) App. E.2 for the size of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from theory.routing.counts import RouteCounts
from theory.routing.packed_rows import check_offsets, flat_rows, offsets_of, place, ranges, selected_rows

CHECKED = 2**20
"""Row-layers whose ids are checked at once: a record may be mapped, larger than memory."""

MISSING = -1
"""The id in every slot of a row-layer that was not recorded; such a row is routed naturally."""


def index_dtype(num_experts: int) -> torch.dtype:
    """The narrowest signed integer type that holds every id from 0 to `num_experts` - 1, and -1.

    `num_experts` itself need not fit: 128 experts take one byte. As torch wraps a Python number to the tensor's type
    before it compares (`ids >= 128` is true of every int8), compare ids with the largest id, never with `num_experts`.
    """
    for dtype in (torch.int8, torch.int16, torch.int32):
        if num_experts - 1 <= torch.iinfo(dtype).max:
            return dtype
    raise ValueError(f"expected at most {torch.iinfo(torch.int32).max + 1} experts, got {num_experts}")


def narrowed(ids: Int[Tensor, "R L K"], num_experts: int) -> Int[Tensor, "R L K"]:
    """Ids of any signed type in `index_dtype`, for files whose writer kept them wider.

    Raises ValueError for an id that the narrower type would turn into another.
    """
    wanted = index_dtype(num_experts)
    if ids.dtype.itemsize > wanted.itemsize and ids.numel():
        least, most = int(ids.min()), int(ids.max())
        if least < MISSING or most >= num_experts:
            raise ValueError(f"expected expert ids in [0, {num_experts}) or -1, got {least} to {most}")
    return ids.to(wanted) if ids.dtype.itemsize > wanted.itemsize else ids


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """Expert ids in [0, num_experts) per row, MoE layer and slot; response b has rows offsets[b]:offsets[b + 1].

    `layer_numbers` are the routers' own numbers (the decoder layer's index), ascending; dense layers have no entry.
    Errors: ValueError naming response, row and layer where an id is out of range, repeated, or only partly missing.
    """

    experts: Int[Tensor, "R L K"]
    offsets: Int[Tensor, " B_plus_1"]
    layer_numbers: tuple[int, ...]
    num_experts: int

    def __post_init__(self) -> None:
        R, L, K = self.experts.shape
        if self.experts.dtype != index_dtype(self.num_experts):
            expected = index_dtype(self.num_experts)
            raise ValueError(f"{self.num_experts} experts: expected ids as {expected}, got {self.experts.dtype}")
        check_layer_numbers(self.layer_numbers)
        if len(self.layer_numbers) != L:
            raise ValueError(f"expected {L} layer numbers for {L} layers of ids, got {len(self.layer_numbers)}")
        if not 1 <= K <= self.num_experts:
            raise ValueError(f"expected from 1 to {self.num_experts} slots, got {K}")
        check_offsets(self.offsets, R)
        self._check_ids()

    def _check_ids(self) -> None:
        num_rows = max(1, CHECKED // max(1, len(self.layer_numbers)))
        for start in range(0, len(self.experts), num_rows):
            bad_rL = self._bad(self.experts[start : start + num_rows])
            if bool(bad_rL.any()):
                row, layer = (int(i) for i in bad_rL.nonzero()[0])
                row += start
                raise ValueError(
                    f"{place(row, self.offsets)}, layer {self.layer_numbers[layer]}: expected "
                    f"distinct ascending expert ids in [0, {self.num_experts}), or -1 in every slot, "
                    f"got {self.experts[row, layer].tolist()}"
                )

    def _bad(self, ids_rLK: Int[Tensor, "r L K"]) -> Bool[Tensor, "r L"]:
        # Rows are sorted, so their ends decide the range: no pass over all K ids is needed for it.
        first, last = ids_rLK[..., 0], ids_rLK[..., -1]
        missing = (first == MISSING) & (last == MISSING)
        bad = ~missing & ((first < 0) | (last > self.num_experts - 1))
        for k in range(1, ids_rLK.shape[2]):
            # Equal in a missing row, where every id is -1, and ascending in all others.
            bad |= (ids_rLK[..., k] <= ids_rLK[..., k - 1]) != missing
        return bad

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self, b: int) -> Int[Tensor, "rows L K"]:
        """The rows of response b."""
        self._check_response(b)
        return self.experts[int(self.offsets[b]) : int(self.offsets[b + 1])]

    def _check_response(self, b: int) -> None:
        if not 0 <= b < len(self):
            raise ValueError(f"expected a response in [0, {len(self)}), got {b}")

    @property
    def num_rows_B(self) -> list[int]:
        """The number of rows of each response."""
        return self.offsets.diff().tolist()

    @property
    def num_slots(self) -> int:
        """K, the experts per row and layer."""
        return self.experts.shape[2]

    @property
    def is_recorded(self) -> Bool[Tensor, "R L"]:
        """True where the row's experts at that layer are known."""
        return self.experts[..., 0] != MISSING

    @property
    def row_mask(self) -> Bool[Tensor, " R"]:
        """True where the row is known at every layer."""
        return self.is_recorded.all(dim=1)

    @property
    def num_missing_rows(self) -> int:
        """The rows that are missing at one layer or more."""
        return int((~self.row_mask).sum())

    @property
    def nbytes(self) -> int:
        """The bytes of the ids."""
        return self.experts.nbytes

    def layer(self, number: int) -> Int[Tensor, "R K"]:
        """All rows at the layer whose router has this number."""
        self._check_layer(number)
        return self.experts[:, self.layer_numbers.index(number)]

    def part(
        self,
        *,
        responses: Sequence[int] | None = None,
        rows: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        num_empty: int = 0,
    ) -> RoutingRecord:
        """One rank's part: these responses, rows [start, stop) of each, these layers; then `num_empty` without rows.

        None means all. A response that ends before `stop` gives fewer rows. The ids are copied and checked once.
        """
        start, stop = (0, max(self.num_rows_B, default=0)) if rows is None else rows
        if not 0 <= start <= stop:
            raise ValueError(f"expected 0 <= start <= stop, got [{start}, {stop})")
        numbers = tuple(sorted(self.layer_numbers if layers is None else layers))
        for number in numbers:
            self._check_layer(number)
        which = self._which(range(len(self)) if responses is None else responses)
        # A response that ends before `start` has no rows here.
        num_rows = (self.offsets.diff()[which] - start).clamp(0, stop - start)
        offsets = torch.cat([self.offsets[:1], num_rows, num_rows.new_zeros(num_empty)]).cumsum(0)
        first = torch.full_like(which, start)
        return RoutingRecord(self._ids(which, first, first + num_rows, numbers), offsets, numbers, self.num_experts)

    def _ids(self, which_Q: Tensor, from_Q: Tensor, to_Q: Tensor, layers: Sequence[int]) -> Int[Tensor, "R L K"]:
        """The ids of rows [from, to) of these responses, one after the other, at these layers."""
        where_R = ranges(self.offsets[which_Q] + from_Q, to_Q - from_Q).to(self.experts.device)
        return self.experts[where_R[:, None], [self.layer_numbers.index(n) for n in layers]]

    def _check_layer(self, number: int) -> None:
        if number not in self.layer_numbers:
            raise ValueError(f"expected one of the record's layers {list(self.layer_numbers)}, got layer {number}")

    def _which(self, responses: Sequence[int]) -> Int[Tensor, " _"]:
        for b in responses:
            self._check_response(b)
        return torch.tensor(list(responses), dtype=torch.int64, device=self.offsets.device)

    def padded(self, width: int) -> Int[Tensor, "B width L K"]:
        """The rows of each response, then -1 up to `width`."""
        num_rows_B = self.num_rows_B
        if max(num_rows_B, default=0) > width:
            raise ValueError(f"expected a width of at least {max(num_rows_B)} rows, got {width}")
        _, L, K = self.experts.shape
        out = self.experts.new_full((len(self) * width, L, K), MISSING)
        out[flat_rows(num_rows_B, width).to(out.device)] = self.experts
        return out.view(len(self), width, L, K)

    def select(self, indices: Sequence[int]) -> RoutingRecord:
        """The record of these responses, in this order."""
        indices = list(indices)
        # All responses in their own order: ids that may be mapped from a file are not copied.
        if indices == list(range(len(self))):
            return self
        where, offsets = selected_rows(self.offsets, indices)
        experts = self.experts.index_select(0, where.to(self.experts.device))
        return RoutingRecord(experts, offsets, self.layer_numbers, self.num_experts)

    @staticmethod
    def concat(parts: Sequence[RoutingRecord]) -> RoutingRecord:
        """The responses of all parts, one part after the other; layers, slots and number of experts must agree."""
        if not parts:
            raise ValueError("expected at least one record, got none")
        first = parts[0]
        if len(parts) == 1:
            return first
        for i, part in enumerate(parts):
            got, expected = part._signature, first._signature
            if got != expected:
                raise ValueError(f"record {i}: expected (layers, slots, experts) {expected} as in record 0, got {got}")
        # By a method of the first: a record whose rows are in other processes joins them there.
        return first._followed_by(parts[1:])

    def _followed_by(self, others: Sequence[RoutingRecord]) -> RoutingRecord:
        parts = [self, *others]
        num_rows = [n for part in parts for n in part.num_rows_B]
        experts = torch.cat([part.experts for part in parts])
        return RoutingRecord(experts, offsets_of(num_rows).to(experts.device), self.layer_numbers, self.num_experts)

    @staticmethod
    def spliced(stretches_B: Sequence[Sequence[tuple[RoutingRecord, int, int]]]) -> RoutingRecord:
        """Response b has, for each (record, i, start) one after the other, the rows of response i from `start` on."""
        return stretches_B[0][0][0]._spliced(stretches_B)

    def _spliced(self, stretches_B: Sequence[Sequence[tuple[RoutingRecord, int, int]]]) -> RoutingRecord:
        rows = [torch.cat([record.rows(i)[start:] for record, i, start in stretches]) for stretches in stretches_B]
        offsets = offsets_of([len(r) for r in rows])
        return RoutingRecord(torch.cat(rows), offsets, self.layer_numbers, self.num_experts)

    @staticmethod
    def assembled(
        parts: Sequence[tuple[RoutingRecord, Sequence[int], int]], num_rows_B: Sequence[int]
    ) -> RoutingRecord:
        """The whole record: each (record, indices, start) has rows from `start` on of responses `indices`, its layers.

        Raises ValueError where a row is there twice, or not at all.
        """
        return parts[0][0]._assembled(parts, num_rows_B)

    def _assembled(
        self, parts: Sequence[tuple[RoutingRecord, Sequence[int], int]], num_rows_B: Sequence[int]
    ) -> RoutingRecord:
        layers = tuple(sorted({n for record, *_ in parts for n in record.layer_numbers}))
        offsets = offsets_of(num_rows_B)
        # -1 marks the places still to fill: parts come from whole passes, whose rows are never missing.
        out_RLK = self.experts.new_full((int(offsets[-1]), len(layers), self.num_slots), MISSING)
        for record, indices, start in parts:
            firsts_b = offsets[torch.tensor(list(indices), dtype=torch.int64)] + start
            rows_R = ranges(firsts_b, record.offsets.diff().cpu())
            where = (rows_R[:, None], torch.tensor([layers.index(n) for n in record.layer_numbers]))
            if bool((out_RLK[where] != MISSING).any()):
                raise ValueError(f"expected each row from one rank, got some of responses {tuple(indices)} twice")
            out_RLK[where] = record.experts
        is_absent_RL = out_RLK[..., 0] == MISSING
        if bool(is_absent_RL.any()):
            row, layer = (int(i) for i in is_absent_RL.nonzero()[0])
            raise ValueError(
                f"expected the route of every row, got none of {place(row, offsets)}, layer {layers[layer]}"
            )
        return RoutingRecord(out_RLK, offsets, layers, self.num_experts)

    def compared(self, other: RoutingRecord, count: Callable[[Tensor, Tensor], RouteCounts]) -> RouteCounts:
        """`count` of both records' ids (R, L, K), computed where this record's are."""
        return count(self.experts, other.experts)

    def blocks(self) -> Iterator[Int[Tensor, "rows L K"]]:
        """All ids in the order of rows, a part at a time where they are not in this process."""
        yield self.experts

    @property
    def _signature(self) -> tuple[tuple[int, ...], int, int]:
        return self.layer_numbers, self.num_slots, self.num_experts

    def check_same_rows(self, other: RoutingRecord) -> None:
        """Raises ValueError unless both records are over the same rows, layers, slots and experts."""
        if self._signature != other._signature:
            raise ValueError(f"expected (layers, slots, experts) {self._signature}, got {other._signature}")
        if self.num_rows_B != other.num_rows_B:
            raise ValueError(f"expected {self.num_rows_B} rows per response, got {other.num_rows_B}")


def check_layer_numbers(numbers: Sequence[int]) -> None:
    """Raises ValueError unless the layer numbers are non-negative and strictly ascending."""
    if any(n < 0 for n in numbers) or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError(f"expected distinct ascending layer numbers from 0 on, got {list(numbers)}")
