"""Laws of the aggregations: those of every row of the table in `laws_objectives.py`, and what the three share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import batches
from tests.theory.laws_objectives import AGGREGATION_ROWS
from tests.theory.objective_batches import Batch, make_batch
from theory.objectives.aggregations import AGGREGATIONS, Totals, count


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


@pytest.mark.parametrize("name", AGGREGATION_ROWS)
def test_nothing_kept_is_zero(name: str) -> None:
    """With every response rejected the aggregate is 0 with zero gradient, not 0/0."""
    term_BT = torch.ones(2, 3, requires_grad=True)
    kept_BT = torch.zeros(2, 3, dtype=torch.bool)
    assert count(kept_BT) == Totals(num_responses=0, num_tokens=0)
    value = AGGREGATIONS[name](term_BT, kept_BT, count(kept_BT))
    value.backward()
    assert value.item() == 0
    assert term_BT.grad is not None
    assert not term_BT.grad.any()


def test_the_three_differ_only_by_length() -> None:
    """On equal lengths L, token_sum is L times the other two; on ragged ones all three differ."""
    ragged = make_batch(0)
    full = replace(ragged, mask=torch.ones_like(ragged.mask))
    values = {name: a(full.pi, full.mask, count(full.mask)).item() for name, a in AGGREGATIONS.items()}
    assert values["token_sum"] == pytest.approx(5 * values["token_mean"])
    assert values["length_norm"] == pytest.approx(values["token_mean"])
    assert len({round(a(ragged.pi, ragged.mask, count(ragged.mask)).item(), 9) for a in AGGREGATIONS.values()}) == 3
