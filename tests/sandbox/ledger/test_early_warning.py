"""Laws of sandbox/ledger/early_warning.py: which windows count, what the area is, that a planted signal is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.early_warning import LEAD, SIGNALS, area, signals, warnings

KL, REWARD = "rollout_corr/k3_kl", "reward/mean"
numbers = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=12)


def _row(first: int | None, **series: Sequence[float | None]) -> dict[str, Any]:
    return {"first_step": first, "num_steps": 10 * NUM_WINDOWS, "series": series}


@given(numbers, numbers)
def test_the_area_is_mann_and_whitneys(before: list[float], quiet: list[float]) -> None:
    """The area is U / (n m), ties counted half, and swapping the sides gives 1 minus it."""
    u = stats.mannwhitneyu(before, quiet, alternative="two-sided", method="asymptotic").statistic
    a, b = np.asarray(before), np.asarray(quiet)
    assert area(a, b) == pytest.approx(u / (len(a) * len(b)))
    assert area(b, a) == pytest.approx(1 - area(a, b))


def test_windows_are_before_a_collapse_or_quiet_or_neither() -> None:
    """The last LEAD windows before the first reason warn, those earlier are quiet, those after count for nothing."""
    rising: list[float | None] = [float(2**w) for w in range(NUM_WINDOWS)]
    before, quiet = signals(_row(101, **{KL: rising}), KL)  # its first reason stands in window 10
    base = math.log(1.5)
    assert before.tolist() == pytest.approx([w * math.log(2) - base for w in range(10 - LEAD, 10)])
    assert quiet.tolist() == pytest.approx([w * math.log(2) - base for w in range(2, 10 - LEAD)])
    before, quiet = signals(_row(None, **{KL: rising}), KL)
    assert len(before) == 0
    assert len(quiet) == NUM_WINDOWS - 2 - LEAD  # what comes after the last windows is not known


def test_what_falls_warns_where_falling_is_feared() -> None:
    """The direction of a metric is that of its fear: a falling reward is a positive signal."""
    falling: list[float | None] = [1.0 / (w + 1) for w in range(NUM_WINDOWS)]
    before, _ = signals(_row(151, **{REWARD: falling}), REWARD)
    assert (before > 0).all() and SIGNALS[REWARD] == -1


def test_a_run_without_a_beginning_has_no_signal() -> None:
    """Without a positive value in the first two windows there is nothing to compare with."""
    for series in ([None, None, 1.0], [0.0, 0.0, 1.0], []):
        assert [len(side) for side in signals(_row(None, **{KL: series}), KL)] == [0, 0]


def test_a_planted_signal_is_found_and_noise_is_not() -> None:
    """A KL that doubles before each collapse has an area near 1 whose interval is above 0.9; noise has 0.5 inside."""
    draws, rows = np.random.default_rng(3), []
    for i in range(40):
        first = int(draws.integers(80, 190)) if i % 2 else None
        kl = draws.uniform(1.0, 1.3, NUM_WINDOWS)
        if first is not None:
            end = (first - 1) * NUM_WINDOWS // (10 * NUM_WINDOWS)
            kl[end - LEAD : end] *= 2.0
        rows.append(_row(first, **{KL: kl.tolist(), "actor/grad_norm": draws.uniform(1.0, 1.3, NUM_WINDOWS).tolist()}))
    found = {one.metric: one for one in warnings(rows)}
    assert set(found) == {KL, "actor/grad_norm"}
    assert found[KL].auc > 0.99 and found[KL].low > 0.9 and found[KL].hits > 0.95
    assert found["actor/grad_norm"].low < 0.5 < found["actor/grad_norm"].high
    assert warnings(rows)[0].metric == KL
    assert found[KL].num_before == sum(row["first_step"] is not None for row in rows) * LEAD


def test_without_a_collapse_there_is_nothing_to_warn_of() -> None:
    """Stable runs alone give no area."""
    assert warnings([_row(None, **{KL: [1.0] * NUM_WINDOWS})]) == []
