"""Router features: the router's input and logits on a few rows of each response, packed as the routing record is.

The predictor learns from them: (h_old, p_old) from the pass that recorded the route, p_pi from later passes.

Letters beyond theory/contracts.py: F feature rows of all responses together.
Paper: Pr2 (arXiv 2606.00395) sec. 4.1, App. D and E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.routing.packed_rows import check_offsets, offsets_of, ranges, selected_rows
from theory.routing.record import check_layer_numbers

COMPARED = 512
"""Feature rows that are compared at once: a multiple of every vector's width, so that no row falls on a ragged end."""


@dataclass(frozen=True, eq=False)
class RouterFeatures:
    """Router inputs and logits at feature rows; response b has rows[offsets[b]:offsets[b + 1]], ascending.

    `rows` are row indices inside the response. `hidden` is None where only logits were requested.
    """

    rows: Int[Tensor, " F"]
    offsets: Int[Tensor, " B_plus_1"]
    hidden: Float[Tensor, "F L D"] | None
    logits: Float[Tensor, "F L E"]
    layer_numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        check_layer_numbers(self.layer_numbers)
        check_offsets(self.offsets, len(self.rows))
        if self.logits.shape[:2] != (len(self.rows), len(self.layer_numbers)):
            expected = (len(self.rows), len(self.layer_numbers))
            raise ValueError(f"expected logits on (rows, layers) = {expected}, got {tuple(self.logits.shape[:2])}")
        if self.hidden is not None and self.hidden.shape[:2] != self.logits.shape[:2]:
            expected = tuple(self.logits.shape[:2])
            raise ValueError(f"expected hidden on (rows, layers) = {expected}, got {tuple(self.hidden.shape[:2])}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows_of(self, b: int) -> Int[Tensor, " rows"]:
        """The feature rows of response b, as row indices inside it."""
        return self.rows[int(self.offsets[b]) : int(self.offsets[b + 1])]

    @property
    def feature_rows(self) -> tuple[Int[Tensor, " _"], ...]:
        """The feature rows of each response, for a later pass to record its logits on the same rows."""
        return tuple(self.rows_of(b) for b in range(len(self)))

    def select(self, indices: Sequence[int]) -> RouterFeatures:
        """The features of these responses, in this order."""
        # All responses in their own order: the hidden states need no copy.
        if list(indices) == list(range(len(self))):
            return self
        # Features in other processes override `at` (scaled/cluster/features.py), so that nothing is fetched here.
        return self.at(*selected_rows(self.offsets, indices))

    def at(
        self,
        where: Int[Tensor, " F2"],
        offsets: Int[Tensor, " B2_plus_1"],
        layer_numbers: tuple[int, ...] | None = None,
    ) -> RouterFeatures:
        """The features at these packed rows, which belong to responses by `offsets`, of these layers (all of them)."""
        numbers = self.layer_numbers if layer_numbers is None else layer_numbers
        columns = None if numbers == self.layer_numbers else [self.layer_numbers.index(n) for n in numbers]
        where = where.to(self.rows.device)

        def taken(x_FLX: Tensor) -> Tensor:
            # On rows of a kilobyte `index_select` is several times as fast as indexing.
            # Rows first, so that the copy by columns is of the kept rows alone.
            rows_FLX = x_FLX.index_select(0, where)
            return rows_FLX if columns is None else rows_FLX[:, columns]

        hidden = None if self.hidden is None else taken(self.hidden)
        return RouterFeatures(self.rows[where], offsets, hidden, taken(self.logits), numbers)

    def without_hidden(self) -> RouterFeatures:
        """The logits alone."""
        return RouterFeatures(self.rows, self.offsets, None, self.logits, self.layer_numbers)

    @property
    def has_hidden(self) -> bool:
        """Whether the router's input is there."""
        return self.hidden is not None

    @property
    def nbytes(self) -> int:
        """Bytes of hidden states and logits."""
        return self.logits.nbytes + (0 if self.hidden is None else self.hidden.nbytes)

    @staticmethod
    def concat(parts: Sequence[RouterFeatures]) -> RouterFeatures:
        """The responses of all parts, one part after the other; layers must agree, and all or none have `hidden`."""
        if not parts:
            raise ValueError("expected at least one set of features, got none")
        first = parts[0]
        if len(parts) == 1:
            return first
        for i, part in enumerate(parts):
            if part.layer_numbers != first.layer_numbers:
                expected, got = first.layer_numbers, part.layer_numbers
                raise ValueError(f"part {i}: expected layers {expected} as in part 0, got {got}")
            if part.has_hidden != first.has_hidden:
                raise ValueError(f"expected hidden in all parts or in none, got a difference between parts 0 and {i}")
        num_rows = [n for part in parts for n in part.offsets.diff().tolist()]
        # The first part joins the others and reads no rows here: features in other processes are joined there.
        return first._followed_by(parts[1:], offsets_of(num_rows).to(first.offsets.device))

    def _followed_by(self, others: Sequence[RouterFeatures], offsets: Tensor) -> RouterFeatures:
        parts = (self, *others)
        hidden = [part.hidden for part in parts if part.hidden is not None]
        return RouterFeatures(
            rows=torch.cat([part.rows for part in parts]),
            offsets=offsets,
            hidden=torch.cat(hidden) if hidden else None,
            logits=torch.cat([part.logits for part in parts]),
            layer_numbers=self.layer_numbers,
        )

    @staticmethod
    def assembled(parts: Sequence[tuple[RouterFeatures, Sequence[int]]], num_responses: int) -> RouterFeatures:
        """The features of `num_responses` responses in the order of rows, from parts that have some responses (these
        indices), rows and layers.

        Raises ValueError where a row that one part has lacks a layer.
        """
        layers = tuple(sorted({n for part, _ in parts for n in part.layer_numbers}))
        # The key of a feature row is response * width + row: sorted keys are in the order of responses and rows.
        width = 1 + max((int(part.rows.max()) for part, _ in parts if len(part.rows)), default=0)
        response_F = [
            torch.tensor(list(own), dtype=torch.int64).repeat_interleave(part.offsets.diff()) for part, own in parts
        ]
        keys = [own_F * width + part.rows for (part, _), own_F in zip(parts, response_F, strict=True)]
        all_F = torch.cat(keys).unique()
        places = []
        # A mask per set of layers, of which there are few, not per layer: rows may be those of a whole batch.
        filled = {part.layer_numbers: torch.zeros(len(all_F), dtype=torch.bool) for part, _ in parts}
        for (part, _), key_F in zip(parts, keys, strict=True):
            # Every key is in `all_F`, so that its insertion point is its own place.
            where_F = torch.searchsorted(all_F, key_F)
            filled[part.layer_numbers][where_F] = True
            # (F, 1) and (L,): together they index a part's block of rows and layers.
            places.append((part, (where_F[:, None], torch.tensor([layers.index(n) for n in part.layer_numbers]))))
        num_filled = _num_filled(filled, layers)
        if num_filled < len(all_F) * len(layers):
            raise ValueError(f"expected features of {len(all_F) * len(layers)} rows and layers, got {num_filled}")
        counts = torch.bincount(all_F // width, minlength=num_responses).tolist()
        return parts[0][0]._assembled(places, all_F % width, offsets_of(counts), layers)

    def _assembled(
        self,
        places: Sequence[tuple[RouterFeatures, tuple[Tensor, Tensor]]],
        rows: Tensor,
        offsets: Tensor,
        layers: tuple[int, ...],
    ) -> RouterFeatures:
        """The features on these rows and layers, from parts that hold them at these places."""

        def filled(parts: Sequence[Tensor]) -> Tensor:
            # NaN, not empty memory: a place that no part fills would hold a plausible number.
            out_FLX = torch.full((len(rows), len(layers), parts[0].shape[2]), torch.nan, dtype=parts[0].dtype)
            for x_FLX, (_, where) in zip(parts, places, strict=True):
                out_FLX[where] = x_FLX
            return out_FLX

        hidden = [part.hidden for part, _ in places if part.hidden is not None]
        logits = filled([part.logits for part, _ in places])
        return RouterFeatures(rows, offsets, filled(hidden) if hidden else None, logits, layers)

    def compared(
        self, other: RouterFeatures, measure: Callable[[Tensor, Tensor], Float[Tensor, "F L X"]]
    ) -> Float[Tensor, "F L X"]:
        """`measure` of these logits and the other's, a function of every row and layer by itself.

        Raises ValueError where the features are of other rows or layers.
        """
        is_same = torch.equal(self.rows, other.rows) and torch.equal(self.offsets, other.offsets)
        if not is_same or self.layer_numbers != other.layer_numbers:
            ours, theirs = ((len(one.rows), len(one), one.layer_numbers) for one in (self, other))
            raise ValueError(f"expected features of the same (rows, responses, layers), got {ours} and {theirs}")
        # In a method of its own, so that features in other processes are measured where they are.
        return self._compared(other, measure)

    def _compared(self, other: RouterFeatures, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        # COMPARED rows at a time, with the same bits: what a measure computes on the way then stays in a core's cache.
        pairs = zip(self.logits.split(COMPARED), other.logits.split(COMPARED), strict=True)
        return torch.cat([measure(own, others) for own, others in pairs])

    def minus_bias(self, predictor: Mapping[int, Float[Tensor, "D E"]]) -> RouterFeatures:
        """The features with p_old = logits - h W_p: an engine whose gate holds W + W_p reports h (W + W_p).

        Exact up to rounding; 16-bit logits become float32. Raises ValueError without `hidden`, or where a layer has no
        W_p.
        """
        return self._shifted(predictor, -1.0)

    def plus_bias(self, predictor: Mapping[int, Float[Tensor, "D E"]]) -> RouterFeatures:
        """The features with the predictive logits p_old + h_old W_p (Pr2 Eq. 4); errors as for `minus_bias`."""
        return self._shifted(predictor, 1.0)

    def _shifted(self, predictor: Mapping[int, Tensor], sign: float) -> RouterFeatures:
        self._check_layers(predictor)
        assert self.hidden is not None
        # Widened before product and sum, as in `predictive_logits` (theory/routing/predictor.py).
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        W_LDE = torch.stack([predictor[n].to(self.hidden.device, wide) for n in self.layer_numbers])
        logits = self.logits.to(wide) + sign * layer_products(self.hidden.to(wide), W_LDE)
        return RouterFeatures(self.rows, self.offsets, self.hidden, logits, self.layer_numbers)

    def _check_layers(self, predictor: Mapping[int, Tensor]) -> None:
        if not self.has_hidden:
            raise ValueError("expected features with the router's input (hidden), got logits alone")
        absent = [n for n in self.layer_numbers if n not in predictor]
        if absent:
            raise ValueError(f"expected a predictor for layers {list(self.layer_numbers)}, got none for {absent}")


def _num_filled(filled: Mapping[tuple[int, ...], Bool[Tensor, " F"]], layers: Sequence[int]) -> int:
    """The number of (row, layer) pairs that some part has, from the rows that each set of layers has."""
    # Layers with the same holders have the same rows, which are counted once and multiplied.
    holders = Counter(tuple(numbers for numbers in filled if layer in numbers) for layer in layers)
    return sum(num * int(torch.stack([filled[n] for n in own]).any(0).sum()) for own, num in holders.items())


def layer_products(hidden_FLD: Float[Tensor, "F L D"], W_LDE: Float[Tensor, "L D E"]) -> Float[Tensor, "F L E"]:
    """h W_p of every feature row and layer: each layer's rows by its own matrix."""
    return torch.bmm(hidden_FLD.transpose(0, 1), W_LDE).transpose(0, 1)


def draw_rows(
    num_rows_B: Sequence[int], first_row_B: Sequence[int], num_positions: int, generator: torch.Generator
) -> tuple[Int[Tensor, " _"], ...]:
    """At most `num_positions` rows of each response, uniform without replacement from [first_row, num_rows), ascending.

    With first_row = num_prompt - 1 these are the rows that predict the response's tokens, so that the predictor sees
    the whole response evenly (Pr2 App. E.1, T_c). A response with no more rows than that gives all of them.
    """
    if len(num_rows_B) != len(first_row_B):
        raise ValueError(f"expected a first row per response, got {len(first_row_B)} for {len(num_rows_B)} responses")
    for b, (num_rows, first) in enumerate(zip(num_rows_B, first_row_B, strict=True)):
        if not 0 <= first <= num_rows:
            raise ValueError(f"response {b}: expected a first row in [0, {num_rows}], got {first}")
    num_B = [num_rows - first for num_rows, first in zip(num_rows_B, first_row_B, strict=True)]
    is_drawn_R, sizes_B = _drawn(num_B, num_positions, generator)
    rows_R = ranges(torch.tensor(list(first_row_B), dtype=torch.int64), torch.tensor(num_B, dtype=torch.int64))
    return rows_R[is_drawn_R].split(sizes_B)


def _drawn(
    num_B: Sequence[int], num_positions: int, generator: torch.Generator
) -> tuple[Bool[Tensor, " R"], list[int]]:
    """Whether each of the packed rows, num_B[b] of each response, is drawn, and how many of each response are."""
    if num_positions < 1:
        raise ValueError(f"expected at least 1 position per response, got {num_positions}")
    # Whole permutations, then cut: later responses' draws do not depend on num_positions.
    orders = [torch.randperm(num, generator=generator) for num in num_B]
    is_drawn_R = torch.zeros(sum(num_B), dtype=torch.bool)
    if orders:
        length_B, first_B = torch.tensor(num_B), offsets_of(num_B)[:-1]
        is_kept_R = ranges(torch.zeros_like(length_B), length_B) < num_positions
        is_drawn_R[(torch.cat(orders) + first_B.repeat_interleave(length_B))[is_kept_R]] = True
    return is_drawn_R, [min(num, num_positions) for num in num_B]


def sampling_rows(num_prompt: int, is_response_T: Bool[Tensor, " T"]) -> Int[Tensor, " _"]:
    """The rows of a response that predict the tokens which mu sampled: num_prompt + t - 1, ascending."""
    return num_prompt - 1 + is_response_T.nonzero()[:, 0]


def draw_sampling_rows(
    rows_B: Sequence[Int[Tensor, " _"]], num_positions: int, generator: torch.Generator
) -> tuple[Int[Tensor, " _"], ...]:
    """`draw_rows` among the `sampling_rows` of each response; without observations this is the draw of `draw_rows`."""
    is_drawn_R, sizes_B = _drawn([rows.shape[0] for rows in rows_B], num_positions, generator)
    return torch.cat(list(rows_B))[is_drawn_R].split(sizes_B) if rows_B else ()
