"""Laws of the border's printed figures."""

from __future__ import annotations

import pandas as pd

from sandbox.border.pictures import phase_diagram, svg


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
