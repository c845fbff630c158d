"""Laws of the boxes that a range of a tensor's elements is cut into; checkpoints have a piece for each."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from scaled.megatron_engine.boxes import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape of up to four axes, and a range of its elements that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape) - 1))
    return shape, start, draw(st.integers(start + 1, prod(shape)))


@given(ranges())
def test_boxes_are_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """One after the other they have the range's elements and no others. They are few, and one for the whole."""
    shape, start, stop = case
    whole = torch.arange(prod(shape)).reshape(shape)
    found = list(boxes(shape, start, stop))
    parts = []
    for place, size in found:
        assert len(place) == len(size) == len(shape)
        part = whole[tuple(slice(first, first + num) for first, num in zip(place, size, strict=True))]
        assert part.shape == size and part.numel() > 0
        parts.append(part.reshape(-1))
    assert torch.cat(parts).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert stop - start < prod(shape) or found == [(tuple(0 for _ in shape), shape)]
