"""The meaning of a strength: how often the cause that was named with it was right, counted on planted faults."""

from __future__ import annotations

BINS: tuple[tuple[float, int, int], ...] = ((0.0, 19, 31), (0.8, 17, 22), (0.85, 386, 407))
"""The least strength of a bin; how often what was named with it was right; how often something was named.

Counted on 545 traces of the models of the thresholds (widths 64, 48, 128, 40 and 80; undecided ones left out), on finer
bins that were pooled until the share grows with the strength.
"""


def bin_of(strength: float) -> int:
    """The number of a strength's bin; the strength is in [0, 1]."""
    return max(i for i, (least, _, _) in enumerate(BINS) if strength >= least)


def share_right(strength: float) -> float:
    """The share of causes that were right among those named with such a strength, in [0, 1]."""
    _, right, named = BINS[bin_of(strength)]
    return right / named
