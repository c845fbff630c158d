"""Laws of the border's printed figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sandbox.border.pictures import border_line, phase_diagram, svg
from sandbox.claims.border_arms import DEGREES


def test_a_gap_without_runs_has_no_row() -> None:
    """Rows are the gaps that some shown panel has run, in their order; a remedy that is not shown adds none."""
    runs = [("exact", "none"), ("r0.5", "none"), ("r0.5", "R3"), ("r0.2", "R2")]
    places = pd.DataFrame(
        [{"gap": gap, "N": 8, "remedy": remedy, "area": 0.3, "collapsed": 0.5, "n": 4} for gap, remedy in runs]
    )
    shown = phase_diagram(places, ("none", "R3"))
    first = shown.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["exact", "FP8, noise 0.5"]
    # Two areas in the first panel, each with its collapses; R3's has one of both.
    assert [len(axis.texts) for axis in shown.axes[:2]] == [4, 2]
    every = phase_diagram(places)
    assert [label.get_text() for label in every.axes[0].get_yticklabels()][1] == "FP8, noise 0.2"
    assert svg(every) == svg(phase_diagram(places))


def _rows(kls: dict[str, float]) -> pd.DataFrame:
    lines = [{"gap": gap, "N": 8, "remedy": "none", "area": 0.3, "collapsed": 0.5, "n": 4, "kl": kl}
             for gap, kl in kls.items()]  # fmt: skip
    return pd.DataFrame(lines)


def test_the_line_crosses_a_row_where_kl_times_n_is_the_border() -> None:
    """Rows with a KL of x* / 8 and x* / 2 are crossed at N = 8 and N = 2; beyond the last one it goes on as steeply,
    and it never enters the row of the exact engine."""
    gaps, border = ("exact", "r0.2", "r0.5"), 0.8
    found = border_line(_rows({"exact": 0.0, "r0.2": border / 8, "r0.5": border / 2}), gaps, border)
    assert found is not None
    x, y = found
    at = {n: float(np.interp(DEGREES.index(n), x, y)) for n in DEGREES}
    assert (at[8], at[2]) == (pytest.approx(1.0, abs=1e-2), pytest.approx(2.0, abs=1e-2))
    assert at[4] == pytest.approx(1.5, abs=1e-2) and at[1] == pytest.approx(2.5, abs=1e-2)
    assert at[16] == pytest.approx(0.5, abs=1e-2) and y.min() == 0.5
    # One row with a KL has no slope.
    assert border_line(_rows({"exact": 0.0, "r0.5": 0.4}), ("exact", "r0.5"), border) is None


def test_the_border_is_a_line_in_every_panel() -> None:
    places = _rows({"exact": 0.0, "r0.2": 0.1, "r0.5": 0.4})
    bare, lined = (phase_diagram(places, ("none", "R3"), border=border) for border in (None, 0.8))
    assert [len(axis.lines) for axis in bare.axes[:2]] == [0, 0]
    assert [len(axis.lines) for axis in lined.axes[:2]] == [2, 2]
