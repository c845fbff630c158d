"""The meaning of a strength: how often the cause that was named with it was right, counted on planted faults."""

from __future__ import annotations

BINS: tuple[tuple[float, int, int], ...] = ((0.0, 28, 43), (0.75, 65, 80), (0.85, 829, 864))
"""The least strength of a bin; how often what was named with it was right; how often something was named.

Counted on 1,145 traces of nine models (five of the thresholds, four that were held out; undecided ones left out), on
finer bins that were pooled until the share grows with the strength. docs/doctor.md has three other models beside it.
"""


def bin_of(strength: float) -> int:
    """The number of a strength's bin; the strength is in [0, 1]."""
    return max(i for i, (least, _, _) in enumerate(BINS) if strength >= least)


def share_right(strength: float) -> float:
    """The share of causes that were right among those named with such a strength, in [0, 1]."""
    _, right, named = BINS[bin_of(strength)]
    return right / named
