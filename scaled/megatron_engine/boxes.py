"""A range of a tensor's elements in row-major order as boxes of the tensor: the pieces of a checkpoint are boxes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A box's first index and its size, along every axis."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that have the elements `start` to `stop` of a tensor, in row-major order; `shape` has no 0.

    There are at most 2 D - 1 of them for D axes: rows in part before and after the whole ones, each cut again.
    """
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within(shape, last, start, stop)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _within(shape, last, last * row, stop)


def _within(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    offset = number * prod(shape[1:])
    for place, size in boxes(shape[1:], start - offset, stop - offset):
        yield (number, *place), (1, *size)


__all__ = ["Box", "boxes"]
