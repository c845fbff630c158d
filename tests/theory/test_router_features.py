"""Router features: rows, inputs and logits that stay together, predictors that fold, and rows drawn from responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theory.routing.features import RouterFeatures, draw_rows, draw_sampling_rows
from theory.routing.packed_rows import offsets_of
from theory.streams import stream

LAYERS = (1, 2, 5)


def draw_features(seed: int, num_rows: list[int], L: int = 3, D: int = 4, E: int = 5) -> RouterFeatures:
    """Random features with these numbers of feature rows per response."""
    generator = stream(seed, "features")
    F = sum(num_rows)
    return RouterFeatures(
        rows=torch.cat([torch.arange(n) * 2 for n in num_rows]),
        offsets=offsets_of(num_rows),
        hidden=torch.randn(F, L, D, generator=generator),
        logits=torch.randn(F, L, E, generator=generator),
        layer_numbers=LAYERS[:L],
    )


@given(seed=st.integers(0, 999), num_rows=st.lists(st.integers(0, 4), min_size=1, max_size=5), data=st.data())
def test_features_select_and_concat_keep_rows_together(seed: int, num_rows: list[int], data: st.DataObject) -> None:
    """A response's rows, inputs and logits move together, and splitting then joining gives the features again."""
    features = draw_features(seed, num_rows)
    order = data.draw(st.permutations(range(len(num_rows))))
    moved = features.select(order)
    bounds = features.offsets.tolist()
    for place, b in enumerate(order):
        span, at = slice(bounds[b], bounds[b + 1]), slice(*moved.offsets.tolist()[place : place + 2])
        assert torch.equal(moved.rows_of(place), features.rows[span])
        assert torch.equal(moved.logits[at], features.logits[span])
        assert moved.hidden is not None
        assert features.hidden is not None
        assert torch.equal(moved.hidden[at], features.hidden[span])
    joined = RouterFeatures.concat([features.select([b]) for b in range(len(num_rows))])
    assert torch.equal(joined.logits, features.logits)
    assert torch.equal(joined.offsets, features.offsets)


def test_minus_bias_undoes_a_folded_gate() -> None:
    """h (W + W_p) - h W_p = h W: a folded engine's logits give back p_old."""
    features = draw_features(0, [3, 2])
    generator = stream(0, "predictor")
    predictor = {n: torch.randn(4, 5, generator=generator) for n in LAYERS}
    back = features.plus_bias(predictor).minus_bias(predictor)
    # Two roundings of numbers of order 10 in float64.
    torch.testing.assert_close(back.logits, features.logits, atol=1e-14, rtol=0)
    for i, n in enumerate(LAYERS):
        assert features.hidden is not None
        expected = features.logits[:, i] - features.hidden[:, i] @ predictor[n]
        torch.testing.assert_close(features.minus_bias(predictor).logits[:, i], expected, atol=1e-14, rtol=0)
    with pytest.raises(ValueError, match=r"for layers \[1, 2, 5\], got none for \[5\]"):
        features.minus_bias({1: predictor[1], 2: predictor[2]})


@given(
    seed=st.integers(0, 999),
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=4),
    num_positions=st.integers(1, 8),
)
def test_drawn_rows_are_distinct_ascending_and_inside(seed: int, spans: list, num_positions: int) -> None:
    """Each response gives min(T_c, its rows) distinct rows of [first, num_rows), ascending."""
    first, num_rows = [a for a, _ in spans], [a + n for a, n in spans]
    drawn = draw_rows(num_rows, first, num_positions, stream(seed, "rows"))
    for rows, a, b in zip(drawn, first, num_rows, strict=True):
        assert len(rows) == min(num_positions, b - a)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert all(a <= row < b for row in rows.tolist())


@pytest.mark.parametrize("num_positions", [1, 3, 50])
def test_drawn_rows_are_the_first_of_a_permutation_per_response(num_positions: int) -> None:
    """The draw is torch's permutation of each response's rows in turn, cut: a record of old runs hangs on it."""
    lengths, firsts = [5, 0, 1, 12], [2, 7, 0, 3]
    draws = torch.Generator().manual_seed(4)
    orders = [torch.randperm(n, generator=draws)[:num_positions].sort().values for n in lengths]
    expected = [(order + first).tolist() for order, first in zip(orders, firsts, strict=True)]

    def again() -> torch.Generator:
        return torch.Generator().manual_seed(4)

    ends = [n + first for n, first in zip(lengths, firsts, strict=True)]
    assert [rows.tolist() for rows in draw_rows(ends, firsts, num_positions, again())] == expected
    rows_B = [3 * torch.arange(n) + first for n, first in zip(lengths, firsts, strict=True)]
    found = draw_sampling_rows(rows_B, num_positions, again())
    wanted = [rows[order].tolist() for rows, order in zip(rows_B, orders, strict=True)]
    assert [rows.tolist() for rows in found] == wanted


def test_features_cannot_be_built_invalid() -> None:
    """The constructor names both shapes; layers, responses and parts are checked as those of a record are."""
    good = draw_features(0, [3, 2])
    rows, offsets, hidden, logits = good.rows, good.offsets, good.hidden, good.logits
    cases = [
        ((rows, offsets, hidden, logits, (1, 2)), r"^expected logits on \(rows, layers\) = \(5, 2\), got \(5, 3\)$"),
        ((rows, offsets[:-1], hidden, logits, LAYERS), "rise from 0 to 5 rows"),
        ((rows, offsets, hidden, logits, (2, 1, 5)), "ascending layer numbers"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            RouterFeatures(*arguments)
    for b in (-1, 2):
        with pytest.raises(ValueError, match=rf"^expected a response in \[0, 2\), got {b}$"):
            good.select([0, b])


def test_feature_rows_are_those_of_each_response() -> None:
    """The rows that a later pass is asked for: each response's own rows, an empty response's none."""
    assert [rows.tolist() for rows in draw_features(0, [3, 0, 2]).feature_rows] == [[0, 2, 4], [], [0, 2]]
    assert len(draw_features(0, [3, 0, 2]).select([])) == 0


def test_features_that_differ_do_not_join() -> None:
    """Layers agree, and hidden is there in all parts or in none; logits alone join, and shift by no predictor."""
    good = draw_features(0, [3, 2])
    alone = RouterFeatures(good.rows, good.offsets, None, good.logits, LAYERS)
    other = RouterFeatures(good.rows, good.offsets, good.hidden, good.logits, (1, 2, 6))
    assert RouterFeatures.concat([alone]) is alone
    joined = RouterFeatures.concat([alone, alone])
    assert joined.hidden is None
    assert torch.equal(joined.logits, torch.cat([good.logits, good.logits]))
    assert joined.select([3]).hidden is None
    errors = {
        r"^expected at least one set of features, got none$": [],
        r"^part 1: expected layers \(1, 2, 5\) as in part 0, got \(1, 2, 6\)$": [good, other],
        r"^expected hidden in all parts or in none, got a difference between parts 0 and 1$": [good, alone],
        r"^expected hidden in all parts or in none, got a difference between parts 0 and 2$": [alone, alone, good],
    }
    for message, parts in errors.items():
        with pytest.raises(ValueError, match=message):
            RouterFeatures.concat(parts)
    with pytest.raises(ValueError, match=r"^expected features with the router's input \(hidden\), got logits alone$"):
        alone.plus_bias({n: torch.zeros(4, 5) for n in LAYERS})


def test_parts_by_layers_and_responses_are_assembled() -> None:
    """Two stages of two ranks each give the whole; where a stage has no row of a rank, the number of pairs is named."""
    whole, halves = draw_features(3, [3, 1, 0, 2]), ([3, 0], [1, 2])

    def part(own: list[int], layers: tuple[int, ...]) -> RouterFeatures:
        some = whole.select(own)
        return some.at(torch.arange(len(some.rows)), some.offsets, layers)

    parts = [(part(own, layers), own) for layers in ((1, 5), (2,)) for own in halves]
    found = RouterFeatures.assembled(parts, len(whole))
    assert torch.equal(found.rows, whole.rows) and torch.equal(found.offsets, whole.offsets)
    assert found.hidden is not None and whole.hidden is not None and found.layer_numbers == LAYERS
    assert torch.equal(found.logits, whole.logits) and torch.equal(found.hidden, whole.hidden)
    with pytest.raises(ValueError, match=r"^expected features of 18 rows and layers, got 16$"):
        RouterFeatures.assembled([parts[0], *parts[2:]], len(whole))


def test_half_precision_logits_widen() -> None:
    """p_old of 16-bit logits is taken in float32: the bias is not rounded to eight bits."""
    features = draw_features(0, [2])
    assert features.hidden is not None
    half = RouterFeatures(
        features.rows, features.offsets, features.hidden.bfloat16(), features.logits.bfloat16(), LAYERS
    )
    predictor = {n: torch.full((4, 5), 1e-3) for n in LAYERS}
    shifted = half.plus_bias(predictor)
    assert shifted.logits.dtype == torch.float32
    expected = half.logits.double() + 1e-3 * features.hidden.bfloat16().double().sum(-1, keepdim=True)
    # Five float32 roundings of numbers of order 3.
    torch.testing.assert_close(shifted.logits.double(), expected, atol=2e-6, rtol=0)


def test_drawn_rows_say_what_is_wrong() -> None:
    """A first row per response, inside it; at least one position."""
    errors = {
        r"^expected a first row per response, got 1 for 2 responses$": ([3, 3], [0], 2),
        r"^expected at least 1 position per response, got 0$": ([3], [0], 0),
        r"^response 1: expected a first row in \[0, 3\], got 4$": ([3, 3], [0, 4], 2),
        r"^response 0: expected a first row in \[0, 3\], got -1$": ([3], [-1], 2),
    }
    for message, (num_rows, first, num_positions) in errors.items():
        with pytest.raises(ValueError, match=message):
            draw_rows(num_rows, first, num_positions, stream(0, "rows"))
    assert draw_rows([3], [3], 2, stream(0, "rows"))[0].tolist() == []
