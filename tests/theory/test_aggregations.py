"""Laws of the aggregations: what the mask leaves out is nowhere, and the parts of a mini-batch add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from theory.objectives.aggregations import AGGREGATIONS, Totals, count
from theory.streams import stream

NAMES = sorted(AGGREGATIONS)


def ragged(seed: int) -> tuple[Tensor, Tensor]:
    """Terms and a mask with gaps in the middle, different lengths, and one row without any token."""
    generator = stream(seed, "aggregations")
    term_BT = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    kept_BT = torch.rand(5, 6, generator=generator) < 0.6
    kept_BT[:, 0] = True
    kept_BT[3] = False
    return term_BT, kept_BT


def by_hand(name: str, term_BT: Tensor, kept_BT: Tensor) -> float:
    """The aggregate with Python lists: responses as lists of their own tokens."""
    rows = [
        [x for x, k in zip(xs, ks, strict=True) if k] for xs, ks in zip(term_BT.tolist(), kept_BT.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [x for row in rows for x in row]
    return {
        "token_sum": sum(tokens) / len(rows),
        "length_norm": sum(sum(row) / len(row) for row in rows) / len(rows),
        "token_mean": sum(tokens) / len(tokens),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
def test_equals_lists(name: str, seed: int) -> None:
    """Masked sums equal those over plain lists of the kept tokens."""
    term_BT, kept_BT = ragged(seed)
    got = AGGREGATIONS[name](term_BT, kept_BT, count(kept_BT)).item()
    assert got == pytest.approx(by_hand(name, term_BT, kept_BT), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 4))
def test_micro_batches_add_up(name: str, seed: int, cut: int) -> None:
    """With the totals of the whole, the aggregates of two parts sum to that of the whole, wherever it is cut."""
    term_BT, kept_BT = ragged(seed)
    totals = count(kept_BT)
    whole = AGGREGATIONS[name](term_BT, kept_BT, totals)
    parts = [AGGREGATIONS[name](term_BT[part], kept_BT[part], totals) for part in (slice(0, cut), slice(cut, None))]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_masked_terms_are_nowhere(name: str) -> None:
    """nan and inf under a False mask change no value, and get exactly zero gradient."""
    term_BT, kept_BT = ragged(0)
    clean = AGGREGATIONS[name](term_BT, kept_BT, count(kept_BT))
    dirty_BT = torch.where(kept_BT, term_BT, math.nan).requires_grad_()
    dirty = AGGREGATIONS[name](dirty_BT, kept_BT, count(kept_BT))
    dirty.backward()
    assert torch.equal(clean, dirty)
    assert dirty_BT.grad is not None
    assert torch.equal(dirty_BT.grad != 0, kept_BT)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_kept_is_zero(name: str) -> None:
    """With every response rejected the aggregate is 0 with zero gradient, not 0/0."""
    term_BT = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    kept_BT = torch.zeros(2, 3, dtype=torch.bool)
    assert count(kept_BT) == Totals(num_responses=0, num_tokens=0)
    value = AGGREGATIONS[name](term_BT, kept_BT, count(kept_BT))
    value.backward()
    assert value.item() == 0
    assert term_BT.grad is not None
    assert not term_BT.grad.any()


def test_the_three_differ_only_by_length() -> None:
    """On equal lengths L, token_sum is L times the other two; on ragged ones all three differ."""
    term_BT, kept_BT = ragged(0)
    full = torch.ones_like(kept_BT)
    values = {name: a(term_BT, full, count(full)).item() for name, a in AGGREGATIONS.items()}
    assert values["token_sum"] == pytest.approx(6 * values["token_mean"])
    assert values["length_norm"] == pytest.approx(values["token_mean"])
    assert len({round(a(term_BT, kept_BT, count(kept_BT)).item(), 9) for a in AGGREGATIONS.values()}) == 3
