"""Laws of sandbox/ledger/statistics.py: intervals cover, planted effects are found, absent ones are not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sandbox.ledger.statistics import ALPHA, Effect, Expected, decisive_p, effect, holm, ratio_of_means, verdict

WORDS: tuple[Expected, ...] = ("more", "less", "same", "at_most")
finite = st.floats(-100.0, 100.0)
p_lists = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def _word(found: Effect, expected: Expected, margin: float) -> str:
    return verdict(found, expected, margin, decisive_p(found, expected, margin))


def _share(words: list[str], word: str) -> float:
    return sum(w == word for w in words) / len(words)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique=True))
def test_the_interval_is_students(values: list[int]) -> None:
    """Mean and interval are those of scipy's t distribution with n - 1 degrees of freedom."""
    found = effect([float(v) for v in values])
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high), rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(-100, 100), min_size=3, max_size=9), st.floats(-50.0, 50.0))
def test_one_sided_p_values_are_those_of_the_t_test(values: list[int], bound: float) -> None:
    """Against any bound, both p's are scipy's one-sample t-tests, and add up to 1."""
    found = effect([float(v) for v in values])
    if len(set(values)) > 1:
        _, above = stats.ttest_1samp(values, bound, alternative="greater")
        assert found.p_above(bound) == pytest.approx(above, abs=1e-9)
        assert found.p_above(bound) + found.p_below(bound) == pytest.approx(1.0)


def test_seeds_that_agree_to_the_bit_are_counted() -> None:
    """Without any spread the interval is a point, and a p is that of the sign test: 1/32 for five seeds, or 1."""
    found = effect([0.3] * 5)
    assert (found.low, found.high, found.error) == (0.3, 0.3, 0.0)
    assert (found.p_above(0.2), found.p_below(0.2)) == (1 / 32, 1.0)
    assert (found.p_below(0.4), found.p_above(0.4)) == (1 / 32, 1.0)
    assert (found.p_above(0.3), found.p_below(0.3)) == (1.0, 1.0)
    assert _word(effect([0.0] * 5), "less", 0.1) == "inconclusive"
    assert _word(effect([0.0] * 7), "less", 0.1) == "not reproduced"


@given(st.integers(2, 60), st.floats(0.01, 0.9), st.booleans())
def test_seeds_that_tie_do_not_rule_out_what_befalls_few(n: int, margin: float, is_near: bool) -> None:
    """One seed in 1 / margin falls by 1, the rest by 0: the mean is -margin, and n seeds show none in (1 - margin)^n.

    So a test of that mean must not call n ties rarer than that; nor n - 1 of them beside a seed that is off by little.
    """
    found = effect([-1e-3 * is_near] + [0.0] * (n - 1), fall=1.0)
    assert found.p_above(-margin) == pytest.approx((1 - margin - found.mean) ** n, rel=1e-9) or not is_near
    assert found.p_above(-margin) >= (1 - margin) ** n * (1 - 1e-9)
    assert effect([0.0] * n, fall=1.0).p_above(-margin) == pytest.approx((1 - margin) ** n)
    assert effect([0.0] * n, fall=1.0).p_below(-margin) == 1.0


@pytest.mark.parametrize("margin", [0.05, 0.1, 0.25])
def test_rare_collapses_are_seldom_called_absent(margin: float) -> None:
    """At the boundary (one seed in 0.85 / margin loses 0.85), "not reproduced" comes with the level at most.

    10,000 draws of 14 seeds: at 2.5% (its side of the test) more than 3.2% would come once in 10^5. By Student's t on
    what varies, and the sign test on what does not, it comes in 5% to 43% of them.
    """
    draws = np.random.default_rng(3).random((10_000, 14)) < margin / 0.85
    words = [_word(effect((-0.85 * d).tolist(), fall=1.0), "less", margin) for d in draws]
    assert _share(words, "not reproduced") <= 0.032


def test_a_plain_collapse_is_still_found() -> None:
    """Fourteen seeds of which all fall by two thirds, or by 0.3 to 1, are decided after 300 tests as after one."""
    for falls in ([-0.66] * 14, np.linspace(-1.0, -0.3, 14).tolist()):
        assert 300 * decisive_p(effect(falls, fall=1.0), "less", 0.1) < ALPHA


counts = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=12)


@given(counts.filter(lambda pairs: all(sum(side) > 0 for side in zip(*pairs, strict=True)) and len(set(pairs)) > 1))
def test_fieller_ends_where_its_test_does(pairs: list[tuple[int, int]]) -> None:
    """Each end of the interval is a ratio at which a one-sided p is 2.5%; swapping the sides turns the ends' signs."""
    found = ratio_of_means([(float(a), float(b)) for a, b in pairs])
    assert found.low <= found.mean <= found.high
    if math.isfinite(found.low):
        assert found.p_above(found.low) == pytest.approx(0.025, rel=1e-4) or found.low == pytest.approx(found.high)
    if math.isfinite(found.high):
        assert found.p_below(found.high) == pytest.approx(0.025, rel=1e-4) or found.low == pytest.approx(found.high)
    other = ratio_of_means([(float(b), float(a)) for a, b in pairs])
    if math.isfinite(found.low) and math.isfinite(found.high):
        ends = (-found.high, -found.mean, -found.low)
        assert (other.low, other.mean, other.high) == pytest.approx(ends, rel=1e-6, abs=1e-6)


def test_fieller_has_no_ends_where_either_mean_may_be_zero() -> None:
    """Neither side is told from 0 by three pairs: no ratio above 0 is ruled out."""
    found = ratio_of_means([(0.0, 1.0), (4.0, 0.0), (0.0, 0.0)])
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_fieller_covers_with_zeros() -> None:
    """Over 2,000 draws of 12 pairs of counts (Poisson of 2 and 6, many 0), the interval holds the true third in 95%.

    Three standard errors of that share are 1.5%; counts are not normal, which moves it by less than that.
    """
    draws = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        found = ratio_of_means(list(zip(draws.poisson(2.0, 12) * 1.0, draws.poisson(6.0, 12) * 1.0, strict=True)))
        inside += found.low <= math.log(1 / 3) <= found.high
    assert abs(inside / 2000 - 0.95) < 0.015


@pytest.mark.parametrize("pairs", [[(1.0, 1.0)], [(0.0, 1.0), (0.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)]])
def test_a_ratio_of_means_needs_both(pairs: list[tuple[float, float]]) -> None:
    """One pair, or a side whose mean is 0, is an error that says so."""
    with pytest.raises(ValueError, match="pairs: expected"):
        ratio_of_means(pairs)


@pytest.mark.parametrize("expected", WORDS)
def test_at_the_margin_at_most_one_verdict_in_twenty_is_wrong(expected: Expected) -> None:
    """An effect on the margin itself is called either way at most as often as the level says (5 normal seeds).

    4,000 draws: at a rate of 5%, more than 6.5% would come once in 10^5.
    """
    generator = np.random.default_rng(7)
    margin, at = 1.0, -1.0 if expected == "less" else 1.0
    words = [_word(effect(draw), expected, margin) for draw in generator.normal(at, 0.7, (4000, 5)).tolist()]
    assert 1 - _share(words, "inconclusive") < 0.065
    if expected in ("more", "less", "at_most"):  # the two-sided test is exact, not only bounded
        assert 1 - _share(words, "inconclusive") > 0.035


@pytest.mark.parametrize(
    ("expected", "at", "word"),
    [
        ("more", 4.0, "reproduced"), ("more", 0.0, "not reproduced"), ("more", -4.0, "opposite"),
        ("less", -4.0, "reproduced"), ("less", 0.0, "not reproduced"), ("less", 4.0, "opposite"),
        ("same", 0.0, "reproduced"), ("same", 4.0, "not reproduced"), ("same", -4.0, "not reproduced"),
        ("at_most", 0.0, "reproduced"), ("at_most", -9.0, "reproduced"), ("at_most", 4.0, "not reproduced"),
    ],
)  # fmt: skip
def test_a_planted_effect_is_named(expected: Expected, at: float, word: str) -> None:
    """Effects far from the margin, against a spread of a fifth of it, get their word in 99 of 100 draws."""
    generator = np.random.default_rng(11)
    words = [_word(effect(draw), expected, 1.0) for draw in generator.normal(at, 0.2, (300, 5)).tolist()]
    assert _share(words, word) > 0.99


@given(p_lists)
def test_holm_is_its_definition(p_values: list[float]) -> None:
    """An adjusted p is the least level at which Holm's step-down procedure rejects that hypothesis."""
    adjusted, m = holm(p_values), len(p_values)
    for level in (0.001, 0.01, 0.05, 0.2, 0.7):
        order, rejected = sorted(range(m), key=lambda i: p_values[i]), set()
        for rank, i in enumerate(order):
            if p_values[i] * (m - rank) >= level:
                break
            rejected.add(i)
        assert rejected == {i for i in range(m) if adjusted[i] < level}


@given(p_lists)
def test_holm_only_raises_and_keeps_the_order(p_values: list[float]) -> None:
    """No p falls, none exceeds 1, and a smaller p stays no larger."""
    adjusted = holm(p_values)
    assert all(a >= p and a <= 1.0 for a, p in zip(adjusted, p_values, strict=True))
    for (p, a), (q, b) in itertools.combinations(zip(p_values, adjusted, strict=True), 2):
        assert (p <= q) <= (a <= b) or p == q


def test_over_a_whole_ledger_of_true_nulls_one_in_twenty_has_any_verdict() -> None:
    """With 40 effects on their margins, the share of ledgers with any verdict at all is at most the level.

    2,000 ledgers: at a rate of 5%, more than 7% would come once in 10^4.
    """
    generator = np.random.default_rng(13)
    hits = 0
    for draws in generator.normal(1.0, 0.7, (2000, 40, 5)).tolist():
        adjusted = holm([decisive_p(effect(draw), "more", 1.0) for draw in draws])
        hits += any(p < ALPHA for p in adjusted)
    assert 0.03 < hits / 2000 < 0.07


@given(finite, st.floats(0.01, 10.0), st.floats(0.01, 5.0))
def test_more_and_less_are_mirror_images(mean: float, error: float, margin: float) -> None:
    """The verdict on an effect and `more` is that on its negative and `less`."""
    found, mirrored = Effect(5, mean, error, mean, mean), Effect(5, -mean, error, -mean, -mean)
    assert decisive_p(found, "more", margin) == pytest.approx(decisive_p(mirrored, "less", margin), abs=1e-12)
    assert _word(found, "more", margin) == _word(mirrored, "less", margin)


def test_a_word_needs_its_p() -> None:
    """At an adjusted p of the level itself the verdict is inconclusive, just below it is not."""
    found = effect([2.0, 2.1, 1.9, 2.05, 1.95])
    assert verdict(found, "more", 1.0, ALPHA) == "inconclusive"
    assert verdict(found, "more", 1.0, ALPHA - 1e-9) == "reproduced"


@pytest.mark.parametrize(
    ("values", "message"),
    [([1.0], "at least 2 seeds, got 1"), ([1.0, math.nan], "finite numbers"), ([1.0, math.inf], "finite numbers")],
)
def test_what_has_no_interval_is_refused(values: list[float], message: str) -> None:
    """One seed, or a number that is none, is a ValueError that says so."""
    with pytest.raises(ValueError, match=message):
        effect(values)


def test_a_margin_below_zero_is_refused() -> None:
    """A negative margin, and none at all for `same`, are ValueErrors."""
    found = effect([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="margin: expected at least 0"):
        decisive_p(found, "more", -1.0)
    with pytest.raises(ValueError, match="margin: expected more than 0"):
        decisive_p(found, "same", 0.0)
