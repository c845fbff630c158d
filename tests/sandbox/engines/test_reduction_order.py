"""Sums in another order cover every index once, in as many parts as the last wave of tiles has room for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.engines import ReductionOrder
from sandbox.engines.reduction_order import num_splits
from sandbox.kernels.numerics import EXACT, compose
from theory.streams import stream


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, 8), (16, 8), (17, 4), (48, 2), (64, 2), (80, 1), (128, 1), (129, 8), (144, 8), (256, 1)],
)
def test_the_last_wave_of_tiles_is_split(num_rows, expected):
    """8 units, tiles of 16 rows: units // (tiles mod units) parts, and none where the last wave is full."""
    assert num_splits(num_rows, units=8, tile_rows=16) == expected
    assert num_splits(num_rows, units=1, tile_rows=16) == 1


@given(st.integers(9, 70), st.integers(2, 8), st.sampled_from(["fp32", "bf16"]))
def test_parts_sum_to_the_product(width, units, partials):
    """Split products cover every inner index once, and differ from the exact ones by rounding alone."""
    x, weight = (torch.randn(3, width, generator=stream(width, name), dtype=torch.float64) for name in "xw")
    spans = []

    def part(start, stop):
        spans.append((start, stop))
        return x[:, start:stop] @ weight[:, start:stop].T

    total = ReductionOrder(units=units, partials=partials).order().product(part, width, 3, "o")
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(width))
    assert len(spans) <= units
    assert all(stop - start >= 8 for start, stop in spans[:-1])
    # bf16 rounds each of at most 8 partial sums and totals by 2^-9 of it.
    bound = x.abs() @ weight.abs().T * (1e-14 if partials == "fp32" else 16 * 2**-9)
    assert ((total - x @ weight.T).abs() <= bound).all()


def test_only_large_products_are_split():
    """Router, shared gate and vocabulary keep one order, and so does everything with one unit."""
    x = torch.randn(2, 64, generator=stream(0, "x"))

    def splits(site, units=8):
        spans = []
        ReductionOrder(units=units).order().product(lambda a, b: spans.append(a) or x[:, a:b].sum(1), 64, 2, site)
        return len(spans)

    assert [splits(site) for site in ("qkv", "o", "gate_up", "down")] == [8, 8, 8, 8]
    assert [splits(site) for site in ("router", "shared_gate", "head")] == [1, 1, 1]
    assert splits("qkv", units=1) == 1
    assert ReductionOrder(units=1).order() is EXACT


def test_nested_orders_still_cover_the_sum():
    """Two orders composed split each other's parts: the sum is the same to rounding, over every index once."""
    both = compose([ReductionOrder(units=2).order(), ReductionOrder(units=4).order()])
    seen = []
    both.product(lambda a, b: seen.extend(range(a, b)) or torch.zeros(1, 1), 64, 1, "o")
    assert seen == list(range(64))
