"""Laws of sandbox/ledger/events.py: the exact test is exact, intervals cover, and the log-rank test is scipy's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize_scalar

from sandbox.ledger.contrasts import difference, moments
from sandbox.ledger.events import dated, exact_p, score, shares, times


def runs(events: int, number: int) -> np.ndarray:
    return np.array([1.0] * events + [0.0] * (number - events))


@pytest.mark.parametrize("table", [(7, 8, 1, 8), (3, 12, 0, 10), (8, 8, 0, 8), (14, 20, 5, 20)])
def test_at_margin_0_it_is_barnards_test(table: tuple[int, int, int, int]) -> None:
    """scipy's exact unconditional test with the pooled variance, one-sided."""
    k1, n1, k2, n2 = table
    theirs = stats.barnard_exact([[k1, k2], [n1 - k1, n2 - k2]], alternative="greater").pvalue
    assert exact_p(*table, 0.0) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("margin", [-0.3, 0.0, 0.25])
def test_the_statistic_has_the_likeliest_shares_at_the_margin(margin: float) -> None:
    """The closed form of the restricted likelihood's maximum against a search, for every table of 5 and 7 runs."""
    found = score(5, 7, margin)
    for a, c in itertools.product(range(6), range(8)):
        low, high = max(0.0, margin), min(1.0, 1.0 + margin)

        def loss(p: float, a: int = a, c: int = c) -> float:
            return -float(stats.binom.logpmf(a, 5, p) + stats.binom.logpmf(c, 7, min(1.0, max(0.0, p - margin))))

        p = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9}).x
        variance = p * (1 - p) / 5 + (p - margin) * (1 - p + margin) / 7
        top = a / 5 - c / 7 - margin
        if variance > 1e-6:
            assert found[a, c] == pytest.approx(top / variance**0.5, abs=1e-3)


@pytest.mark.parametrize(("margin", "n"), [(0.0, 8), (0.25, 8), (0.25, 14), (-0.2, 10)])
def test_no_share_is_rejected_more_often_than_the_level_says(margin: float, n: int) -> None:
    """For every nuisance share at the margin, the exact chance of p <= alpha is at most alpha, and not far below it."""
    p = np.array([[exact_p(a, n, c, n, margin) for c in range(n + 1)] for a in range(n + 1)])
    for alpha in (0.05, 0.0125, 0.05 / 60):
        sizes = []
        for share in np.linspace(max(0.0, -margin), min(1.0, 1.0 - margin), 101):
            first = stats.binom.pmf(np.arange(n + 1), n, share + margin)
            sizes.append(first @ (p <= alpha) @ stats.binom.pmf(np.arange(n + 1), n, share))
        assert max(sizes) <= alpha * (1 + 1e-6)
    assert (p <= 0.05).any()


@given(st.integers(0, 9), st.integers(0, 9), st.floats(-0.9, 0.9))
def test_the_two_sides_mirror_each_other(a: int, c: int, bound: float) -> None:
    """p1 - p2 above a bound reads as p2 - p1 below its negative; p falls as events are added."""
    found, other = shares(runs(a, 9), runs(c, 9)), shares(runs(c, 9), runs(a, 9))
    assert found.p_above(bound) == pytest.approx(other.p_below(-bound), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((-other.high, -other.low), abs=1e-9)
    assert found.low <= found.mean <= found.high
    if a < 9:
        assert shares(runs(a + 1, 9), runs(c, 9)).p_above(bound) <= found.p_above(bound) + 1e-9


def test_the_interval_holds_what_its_test_keeps() -> None:
    """Just outside of either end a one-sided p is at most 2.5%, just inside it is above."""
    found = shares(runs(7, 10), runs(2, 10))
    assert found.p_above(found.low) <= 0.025 < found.p_above(found.low + 0.01)
    assert found.p_below(found.high) <= 0.025 < found.p_below(found.high - 0.01)


def test_seeds_that_agree_say_what_they_rule_out() -> None:
    """0 of 14 against 0 of 14 rules out a difference of one half and not one of a tenth."""
    found = shares(runs(0, 14), runs(0, 14))
    assert found.p_below(0.5) < 1e-3 < 0.1 < found.p_below(0.1)
    assert found.p_above(0.0) == pytest.approx(1.0)


def test_a_share_against_a_number_is_binomial() -> None:
    """scipy's binomial test on either side, and the interval of Clopper and Pearson."""
    found = shares(runs(2, 12), 0.5)
    less = stats.binomtest(2, 12, 0.5, alternative="less")
    assert found.p_below(0.0) == pytest.approx(less.pvalue)
    assert found.p_above(0.0) == pytest.approx(stats.binomtest(2, 12, 0.5, alternative="greater").pvalue)
    theirs = stats.binomtest(2, 12).proportion_ci(method="exact")
    assert (found.low + 0.5, found.high + 0.5) == pytest.approx((theirs.low, theirs.high), abs=1e-3)
    # A bound beyond the other end is that end: a share that is not 0 is above it, one that is not 1 below.
    assert (found.p_above(-0.6), found.p_below(0.6)) == (0.0, 0.0) and found.p_below(-0.6) == 1.0
    assert shares(runs(0, 12), 0.5).p_above(-0.6) == 1.0 and shares(runs(12, 12), 0.5).p_below(0.6) == 1.0
    with pytest.raises(ValueError, match="event: expected 0 or 1"):
        shares(np.array([0.5, 1.0]), 0.5)


def test_lasting_is_compared_by_the_log_rank_test() -> None:
    """At margin 0 the p's are scipy's, with runs that last censored; the side that lasts longer is `later`."""
    short, long = np.array([0.1, 0.2, 0.3, 0.1, 1.0]), np.array([1.0, 1.0, 1.0, 1.0, 0.9])
    found = times(long, short, difference(moments([long], [short], "paired"), 1.0))
    censored = [stats.CensoredData(uncensored=x[x < 1], right=x[x == 1]) for x in (long, short)]
    assert found.p_above(0.0) == pytest.approx(stats.logrank(*censored).pvalue / 2)
    assert found.p_above(0.0) < 0.05 < found.p_below(0.0) and found.p_below(0.0) == pytest.approx(
        1 - found.p_above(0.0)
    )
    assert found.mean == pytest.approx(long.mean() - short.mean()) and found.test == "log-rank"


def test_a_finer_grid_of_dates_is_no_earlier_collapse() -> None:
    """Runs that fall at one moment, dated by the next evaluation of their own arm: no p of either side is small once
    the dates are on the wider grid, and dates that are on it, and runs that last, stay as they are."""
    moments_of = np.linspace(0.001, 0.999, 40)
    fine, coarse = (np.minimum(np.ceil(moments_of / grid) * grid, 0.999) for grid in (0.01, 0.2))
    student = difference(moments([fine], [coarse], "paired"), 1.0)
    assert times(fine, coarse, student).p_below(0.0) < 0.025
    found = times(dated(fine, 0.2), dated(coarse, 0.2), student)
    assert found.p_below(0.0) == found.p_above(0.0) == pytest.approx(0.5)
    ends = np.array([0.08, 0.1, 0.98, 1.0])
    assert dated(ends, 0.05) == pytest.approx([0.1, 0.1, 1.0, 1.0]) and (dated(ends, 0.05) < 1.0).sum() == 3


def test_no_event_decides_nothing_of_times() -> None:
    """Where no run falls both p's are 1; with a margin, ties have the floor of a rare fall."""
    whole = np.ones(14)
    found = times(whole, whole, difference(moments([whole], [whole], "paired"), 1.0))
    assert found.p_above(0.0) == found.p_below(0.0) == 1.0
    assert found.p_below(0.1) == pytest.approx(0.9**14)
