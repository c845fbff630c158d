"""Laws of sandbox/ledger/statistics.py: an effect's two p's, what ties say, the sides of a prediction, and Holm."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.ledger.contrasts import difference, moments
from sandbox.ledger.statistics import ALPHA, Effect, Expected, holm, opposite, sides, stand, two_sided

WORDS: tuple[Expected, ...] = ("more", "less", "same", "at_most")
finite = st.floats(-100.0, 100.0)
p_lists = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def effect(differences: list[float], fall: float | None = None) -> Effect:
    """The effect of one arm on 0."""
    return difference(moments([np.array(differences)], 0.0, "paired"), fall)


def _stand(found: Effect, expected: Expected, margin: float) -> str:
    return stand(*sides(found, expected, margin))


def _share(words: list[str], word: str) -> float:
    return sum(w == word for w in words) / len(words)


def test_seeds_that_agree_to_the_bit_are_counted() -> None:
    """Without any spread the interval is a point, and a p is that of the sign test: 1/32 for five seeds, or 1."""
    found = effect([0.3] * 5)
    assert (found.low, found.high, found.error) == (0.3, 0.3, 0.0)
    assert (found.p_above(0.2), found.p_below(0.2)) == (1 / 32, 1.0)
    assert (found.p_below(0.4), found.p_above(0.4)) == (1 / 32, 1.0)
    assert (found.p_above(0.3), found.p_below(0.3)) == (1.0, 1.0)
    assert _stand(effect([0.0] * 5), "less", 0.1) == "open"
    assert _stand(effect([0.0] * 7), "less", 0.1) == "against"


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
    """At the boundary (a seed falls by 0.85, with probability margin / 0.85) `against` comes at most as often as the
    level says, over all outcomes of 14 seeds. By Student's t on what varies, and the sign test on what does not, it
    comes in 5% to 43% of them."""
    p = margin / 0.85
    words = [_stand(effect([-0.85] * k + [0.0] * (14 - k), fall=1.0), "less", margin) for k in range(15)]
    chances = [math.comb(14, k) * p**k * (1 - p) ** (14 - k) for k in range(15)]
    assert sum(chance for word, chance in zip(words, chances, strict=True) if word == "against") <= ALPHA / 2


def test_a_plain_collapse_is_still_found() -> None:
    """Fourteen seeds of which all fall by two thirds, or by 0.3 to 1, are decided after 300 tests as after one."""
    for falls in ([-0.66] * 14, np.linspace(-1.0, -0.3, 14).tolist()):
        assert 300 * two_sided(*sides(effect(falls, fall=1.0), "less", 0.1)) < ALPHA


@functools.cache
def _drawn(at: float) -> list[Effect]:
    """4,000 effects of five normal seeds around that value."""
    return [effect(draw) for draw in np.random.default_rng(7).normal(at, 0.7, (4000, 5)).tolist()]


@pytest.mark.parametrize("expected", WORDS)
def test_at_the_margin_at_most_one_verdict_in_twenty_is_wrong(expected: Expected) -> None:
    """An effect on the margin itself is called either way at most as often as the level says (5 normal seeds).

    4,000 draws: at a rate of 5%, more than 6.5% would come once in 10^5.
    """
    words = [_stand(found, expected, 1.0) for found in _drawn(-1.0 if expected == "less" else 1.0)]
    assert 1 - _share(words, "open") < 0.065
    if expected in ("more", "less", "at_most"):  # the two-sided test is exact, not only bounded
        assert 1 - _share(words, "open") > 0.035


@pytest.mark.parametrize(
    ("expected", "at", "word"),
    [
        ("more", 4.0, "for"), ("more", 0.0, "against"), ("more", -4.0, "against"),
        ("less", -4.0, "for"), ("less", 0.0, "against"), ("less", 4.0, "against"),
        ("same", 0.0, "for"), ("same", 4.0, "against"), ("same", -4.0, "against"),
        ("at_most", 0.0, "for"), ("at_most", -9.0, "for"), ("at_most", 4.0, "against"),
    ],
)  # fmt: skip
def test_a_planted_effect_is_named(expected: Expected, at: float, word: str) -> None:
    """Effects far from the margin, against a spread of a fifth of it, get their word in 99 of 100 draws."""
    generator = np.random.default_rng(11)
    words = [_stand(effect(draw), expected, 1.0) for draw in generator.normal(at, 0.2, (300, 5)).tolist()]
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


@given(finite, st.floats(0.01, 10.0), st.floats(0.01, 5.0))
def test_more_and_less_are_mirror_images(mean: float, error: float, margin: float) -> None:
    """An effect under `more` reads as its negative under `less`; so does the opposite."""
    found, mirrored = (Effect(5, m, error, m, m, 4.0, "Welch") for m in (mean, -mean))
    assert sides(found, "more", margin) == pytest.approx(sides(mirrored, "less", margin), abs=1e-12)
    assert opposite(found, "more", margin) == pytest.approx(opposite(mirrored, "less", margin), abs=1e-12)


def test_what_is_opposite_is_beyond_the_margin_on_the_other_side() -> None:
    """Small where the effect is far on the other side, for more and less alone."""
    far = effect([-2.0, -2.1, -1.9, -2.05])
    assert opposite(far, "more", 1.0) < 1e-3 < 0.5 < opposite(far, "more", 3.0)
    assert [opposite(far, word, 1.0) for word in ("same", "at_most")] == [1.0, 1.0]


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_stand_is_the_smaller_sides(holds: float, fails: float) -> None:
    """Open unless the smaller p doubled is below the level; then the side whose p it is."""
    word = stand(holds, fails)
    assert (word == "open") == (min(1.0, 2 * min(holds, fails)) >= ALPHA)
    assert word == "open" or word == ("for" if holds < fails else "against")


def test_a_margin_below_zero_is_refused() -> None:
    """A negative margin, and none at all for `same`, are ValueErrors."""
    found = effect([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="margin: expected at least 0"):
        sides(found, "more", -1.0)
    with pytest.raises(ValueError, match="margin: expected more than 0"):
        sides(found, "same", 0.0)
