"""Laws of the aggregations, for every row of the table in `laws_objectives.py`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import batches
from tests.theory.laws_objectives import AGGREGATION_ROWS
from tests.theory.objective_batches import Batch
from theory.objectives.aggregations import AGGREGATIONS, count


@pytest.mark.parametrize("name", AGGREGATION_ROWS)
@given(batch=batches(), cut=st.integers(0, 4))
def test_aggregations_equal_lists_and_add_up(name: str, batch: Batch, cut: int) -> None:
    """The aggregate is the formula on the kept responses, and with the totals of the whole its parts sum to it."""
    term, kept, aggregate = batch.pi, batch.mask, AGGREGATIONS[name]
    rows = [x[k].tolist() for x, k in zip(term, kept, strict=True) if k.any()]
    whole = aggregate(term, kept, count(kept)).item()
    assert whole == pytest.approx(AGGREGATION_ROWS[name](rows) if rows else 0.0, rel=1e-12, abs=1e-14)
    parts = [aggregate(term[part], kept[part], count(kept)).item() for part in (slice(0, cut), slice(cut, None))]
    assert sum(parts) == pytest.approx(whole, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", AGGREGATION_ROWS)
@given(batch=batches())
def test_masked_terms_are_nowhere(name: str, batch: Batch) -> None:
    """nan and inf under a False mask change no value, and get exactly zero gradient; kept terms get some."""
    totals = count(batch.mask)
    clean = AGGREGATIONS[name](batch.pi, batch.mask, totals)
    dirty_BT = torch.where(batch.mask, batch.pi, math.nan).requires_grad_()
    dirty = AGGREGATIONS[name](dirty_BT, batch.mask, totals)
    dirty.backward()
    assert torch.equal(clean, dirty)
    assert dirty_BT.grad is not None
    assert torch.equal(dirty_BT.grad != 0, batch.mask)
