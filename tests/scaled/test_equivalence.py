"""The promise of two worlds: one checkpoint and one batch give the same numbers in the sandbox and in every layout.

Both sides are fp32 with sums in different orders; tolerances are about four times what docs/equivalence.md measured.
"""

from __future__ import annotations

import pytest

from tests.scaled.equivalence import OBJECTIVES, WORLDS, Row, asked_of, measure

SHARE = 4
"""Two ranks that wait for each other take half a second an update; the table has every objective in every layout."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Row]:
    return {row.layout: row for row in measure(tmp_path_factory.mktemp("equivalence") / "model", SHARE)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", WORLDS)
def test_a_layout_is_the_sandbox(layout, rows):
    """log pi and routes of every pass, value and gradient of its objectives, weights after two updates agree."""
    row = rows[layout]
    assert row.routes == 0
    assert row.logp < 1e-5  # nats
    assert row.value < 4e-6  # objectives of size 1
    assert row.gradient < 4e-6  # of its norm
    assert row.weights < 6e-6  # weights of size 0.2 that moved by 0.02


def test_every_objective_meets_layouts_of_every_kind():
    """Each objective is measured on one rank and in three layouts or more of two."""
    layouts = {key: [name for name in WORLDS if key in asked_of(name, SHARE)] for key in OBJECTIVES}
    assert all("1 rank" in names and len(names) >= 4 for names in layouts.values()), layouts
