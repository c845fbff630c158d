"""Laws of a regime's place on the map: it follows from KL, the border and the map's N alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.border.regimes import ARMS, KL, first_kl, markdown, place
from sandbox.border.table import runs
from sandbox.claims import REGIMES
from sandbox.claims.border_arms import DEGREES

POSITIVE = st.floats(1e-3, 1e3)


@given(border=POSITIVE, ratio=st.one_of(st.floats(1 / 64, 4), st.sampled_from([1 / n for n in DEGREES])))
def test_the_place_says_at_which_updates_per_rollout_the_border_is_reached(border: float, ratio: float) -> None:
    """Quiet: KL x N stays below x* at every N of the map; beyond: at none; border: at some but not at all."""
    kl = border * ratio
    is_below = [kl * n < border for n in DEGREES]
    expected = "quiet" if all(is_below) else "border" if any(is_below) else "beyond"
    assert place(kl, border) == expected


def test_the_kl_is_that_of_the_first_window() -> None:
    """Rows without that metric, or with a hole where it was no number, are left out."""
    rows = [{"series": {KL: [0.2, 9.0]}}, {"series": {KL: [0.4]}}, {"series": {}}, {"series": {KL: [None, 1.0]}}]
    assert first_kl(rows) == pytest.approx(0.3)
    assert math.isnan(first_kl(rows[2:]))


def test_regimes_stand_in_the_order_of_their_gaps() -> None:
    """Arms that replay, or are exact, say nothing of the regime's engine; a gap without runs has no line."""
    made = [("loud", ARMS[0], 2.0), ("calm", ARMS[1], 1e-3), ("calm", ARMS[2], 3e-3), ("calm", "minirl-R3-N8", 50.0)]
    rows = {str(i): {"regime": r, "arm": arm, "seed": 0, "series": {KL: [kl]}} for i, (r, arm, kl) in enumerate(made)}
    (border,) = (regime for regime in REGIMES if regime.name == "border")
    said = markdown(rows, runs({}, border), 1.0, 2e-3)
    assert "at the learning rate of `border`, 2e-3;" in said
    assert said.splitlines()[-2:] == ["| `calm` | 2e-3 | 500 | quiet |", "| `loud` | 2 | 0.5 | beyond |"]
