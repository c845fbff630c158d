"""The reliability of a strength: how often causes named with it were right, counted on planted faults."""

from __future__ import annotations

BINS: tuple[tuple[float, int, int], ...] = ((0.0, 28, 43), (0.75, 65, 80), (0.85, 829, 864))
"""The bins as (least strength, causes named rightly, causes named).

Counted on 1,145 traces of nine models (five that set the thresholds, four held out; undecided traces excluded), on
finer bins pooled until the share grows with the strength. docs/doctor.md compares them with three more models.
"""


def bin_of(strength: float) -> int:
    """The index in BINS of a strength in [0, 1]."""
    return max(i for i, (least, _, _) in enumerate(BINS) if strength >= least)


def share_right(strength: float) -> float:
    """The share of causes named with such a strength that were right, in [0, 1]."""
    _, right, named = BINS[bin_of(strength)]
    return right / named
