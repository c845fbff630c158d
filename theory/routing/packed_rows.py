"""Rows of several responses packed one after the other: response b has rows offsets[b]:offsets[b + 1].

The arithmetic of their places; routing records and router features are packed so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor


def offsets_of(num_rows_B: Sequence[int]) -> Int[Tensor, " B_plus_1"]:
    """The first packed row of each response, and the total at the end."""
    return torch.tensor([0, *num_rows_B], dtype=torch.int64).cumsum(0)


def place(row: int, offsets: Int[Tensor, " B_plus_1"]) -> str:
    """A packed row in words: its response, and its number there."""
    # right=True: past responses without rows, whose offsets are equal.
    b = int(torch.searchsorted(offsets, row, right=True)) - 1
    return f"response {b}, row {row - int(offsets[b])}"


def flat_rows(num_rows_B: Sequence[int], width: int) -> Int[Tensor, " R"]:
    """The place of each packed row in the flattened (B, width) batch: row s of response b at b * width + s."""
    starts_B = torch.arange(len(num_rows_B)) * width
    return ranges(starts_B, torch.tensor(num_rows_B, dtype=torch.int64))


def selected_rows(
    offsets: Int[Tensor, " B_plus_1"], indices: Sequence[int]
) -> tuple[Int[Tensor, " R"], Int[Tensor, " _"]]:
    """The packed rows of these responses, in this order, and their new offsets.

    Raises ValueError for a response that does not exist.
    """
    which = checked(offsets, indices)
    starts_B, num_rows_B = offsets[which], offsets.diff()[which]
    # offsets[:1] is the leading 0, in the offsets' own type and on their device.
    return ranges(starts_B, num_rows_B), torch.cat([offsets[:1], num_rows_B.cumsum(0)])


def checked(offsets: Int[Tensor, " B_plus_1"], indices: Sequence[int]) -> Int[Tensor, " _"]:
    """These numbers of responses; ValueError for a response that does not exist."""
    num = offsets.shape[0] - 1
    # Indexing would take a negative number from the end.
    for b in indices:
        if not 0 <= b < num:
            raise ValueError(f"expected a response in [0, {num}), got {b}")
    return torch.tensor(list(indices), dtype=torch.int64, device=offsets.device)


def ranges(starts_B: Int[Tensor, " B"], num_B: Int[Tensor, " B"]) -> Int[Tensor, " R"]:
    """num_B[b] consecutive numbers from starts_B[b], for each b in turn, without a loop over b."""
    # A number is its place in the output plus a shift that is constant within b.
    shift_R = (starts_B - num_B.cumsum(0) + num_B).repeat_interleave(num_B)
    return shift_R + torch.arange(shift_R.shape[0], device=shift_R.device)


def check_offsets(offsets: Int[Tensor, " B_plus_1"], num_rows: int) -> None:
    """Raises ValueError unless the offsets rise from 0 to the number of rows."""
    values = offsets.tolist()
    is_rising = all(a <= b for a, b in pairwise(values))
    if not values or values[0] != 0 or values[-1] != num_rows or not is_rising:
        raise ValueError(f"expected offsets that rise from 0 to {num_rows} rows, got {values}")
