"""Laws of sandbox/ledger/contrasts.py: which test is taken, that it is scipy's, and Fieller's method on sides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sandbox.ledger.contrasts import choose, difference, moments, on_scale, ratio_of_means, seeds_matter

columns = st.lists(st.integers(-100, 100), min_size=4, max_size=9, unique=True)


@given(columns, columns, st.floats(-50.0, 50.0))
def test_two_arms_are_compared_by_welchs_test(one: list[int], other: list[int], bound: float) -> None:
    """Against any bound both p's are scipy's with unequal variances, and so is the interval."""
    a, b = np.array(one, dtype=float), np.array(other, dtype=float)
    found = difference(moments([a], [b], "Welch"))
    theirs = stats.ttest_ind(a, b + bound, equal_var=False, alternative="greater")
    assert found.p_above(bound) == pytest.approx(float(theirs.pvalue), abs=1e-9)
    assert found.p_above(bound) + found.p_below(bound) == pytest.approx(1.0)
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert found.n == min(len(a), len(b))


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=3, max_size=9), st.floats(-50.0, 50.0))
def test_a_pair_is_compared_by_the_paired_test(pairs: list[tuple[int, int]], bound: float) -> None:
    """Within seeds: scipy's one-sample test of the differences, with n - 1 degrees of freedom."""
    a, b = np.array(pairs, dtype=float).T
    found = difference(moments([a], [b], "paired"))
    if len(set((a - b).tolist())) > 1:
        theirs = stats.ttest_1samp(a - b, bound, alternative="less")
        assert found.p_below(bound) == pytest.approx(float(theirs.pvalue), abs=1e-9)


def test_a_side_of_several_arms_is_their_mean() -> None:
    """Two arms against one: the variance of the mean is a quarter of each; within seeds it is that of their mean."""
    draws = np.random.default_rng(2)
    a, b, c = draws.normal(size=(3, 7))
    found = moments([a, b], [c], "Welch")
    assert (found.a, found.b) == pytest.approx(((a.mean() + b.mean()) / 2, c.mean()))
    assert found.aa == pytest.approx((a.var(ddof=1) + b.var(ddof=1)) / 28)
    paired = moments([a, b], [c], "paired")
    assert paired.aa == pytest.approx(((a + b) / 2).var(ddof=1) / 7)
    parts = np.array([a.var(ddof=1) / 28, b.var(ddof=1) / 28, c.var(ddof=1) / 7])
    assert found.df == pytest.approx(parts.sum() ** 2 / (parts**2 / 6).sum())


def test_seeds_are_paired_where_they_have_something_in_common() -> None:
    """A spread that arms share is found, and the paired test then sees what Welch's does not; without one 5% are."""
    draws = np.random.default_rng(4)
    shared = draws.normal(0.0, 5.0, 8)
    arms = [shared + shift + draws.normal(0.0, 0.1, 8) for shift in (0.0, 0.0, 1.0)]
    assert choose(arms) == "paired"
    assert difference(moments(arms[2:], arms[:1], "paired")).low > 0.5
    assert difference(moments(arms[2:], arms[:1], "Welch")).low < 0.0
    chance = sum(seeds_matter(list(draws.normal(size=(4, 8)))) for _ in range(2000)) / 2000
    assert abs(chance - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_what_seeds_share_needs_two_arms_and_three_seeds() -> None:
    """One arm, or two complete seeds, decide nothing; seeds that an arm lacks are left out; equal numbers are no F."""
    ramp = np.arange(8.0)
    assert not seeds_matter([ramp]) and not seeds_matter([]) and choose([ramp]) == "Welch"
    assert seeds_matter([ramp, ramp + 1.0]) and not seeds_matter([np.ones(8), np.zeros(8)])
    holes = np.where(ramp < 2, ramp, np.nan)
    assert not seeds_matter([ramp, holes])


def test_numbers_are_put_on_a_scale() -> None:
    """Logarithms where a ratio is asked for (none of 0), distances from the median on `spread`."""
    assert on_scale(np.array([1.0, math.e]), "ratio") == pytest.approx([0.0, 1.0])
    assert math.isnan(on_scale(np.array([0.0, 1.0]), "ratio")[0])
    assert on_scale(np.array([1.0, 2.0, 9.0]), "spread").tolist() == [1.0, 0.0, 7.0]


counts = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=12)


@given(counts.filter(lambda pairs: all(sum(side) > 0 for side in zip(*pairs, strict=True)) and len(set(pairs)) > 1))
@pytest.mark.parametrize("test", ["paired", "Welch"])
def test_fieller_ends_where_its_test_does(test, pairs: list[tuple[int, int]]) -> None:
    """Each end of the interval is a ratio at which a one-sided p is 2.5%; swapping the sides turns the ends' signs."""
    a, b = np.array(pairs, dtype=float).T
    found = ratio_of_means(moments([a], [b], test, ratio=True))
    assert found.low <= found.mean <= found.high
    if math.isfinite(found.low):
        assert found.p_above(found.low) == pytest.approx(0.025, rel=1e-4) or found.low == pytest.approx(found.high)
    if math.isfinite(found.high):
        assert found.p_below(found.high) == pytest.approx(0.025, rel=1e-4) or found.low == pytest.approx(found.high)
    other = ratio_of_means(moments([b], [a], test, ratio=True))
    if math.isfinite(found.low) and math.isfinite(found.high):
        ends = (-found.high, -found.mean, -found.low)
        assert (other.low, other.mean, other.high) == pytest.approx(ends, rel=1e-6, abs=1e-6)


def test_fieller_has_no_ends_where_either_mean_may_be_zero() -> None:
    """Neither side is told from 0 by three seeds: no ratio above 0 is ruled out."""
    found = ratio_of_means(moments([np.array([0.0, 4.0, 0.0])], [np.array([1.0, 0.0, 0.0])], "paired"))
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_fieller_covers_with_zeros() -> None:
    """Over 2,000 draws of 12 seeds with counts (Poisson of 2 and 6, many 0), the interval holds the true third in 95%.

    Three standard errors of that share are 1.5%; counts are not normal, which moves it by less than that.
    """
    draws = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        sides = draws.poisson(2.0, 12) * 1.0, draws.poisson(6.0, 12) * 1.0
        found = ratio_of_means(moments([sides[0]], [sides[1]], "Welch", ratio=True))
        inside += found.low <= math.log(1 / 3) <= found.high
    assert abs(inside / 2000 - 0.95) < 0.015


@pytest.mark.parametrize(
    ("values", "message"),
    [([1.0], "at least 2, got 1"), ([1.0, math.nan], "finite number"), ([1.0, math.inf], "finite number")],
)
def test_what_has_no_interval_is_refused(values: list[float], message: str) -> None:
    """One seed, or a number that is none, is a ValueError that says so; so is a ratio of a mean of 0."""
    for test in ("paired", "Welch"):
        with pytest.raises(ValueError, match=message):
            moments([np.array(values)], 0.0, test)
    with pytest.raises(ValueError, match="sides: expected means above 0"):
        ratio_of_means(moments([np.zeros(3)], [np.ones(3)], "Welch"))
