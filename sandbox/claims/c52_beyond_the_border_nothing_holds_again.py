"""Claim 44 again: the 36 seeds that a difference of a quarter of the runs needs, instead of 12."""

from __future__ import annotations

from sandbox.claims import c44_beyond_the_border_nothing_holds as first

# 36 seeds: the power is some 80% if in truth 10 of 12 runs collapse, the least of the first trial's arms (LOG.md).
CLAIM = first.CLAIM.again(52, first_seed=300, num_seeds=36, planned=dict.fromkeys(range(4), 10 / 12 - 0.5))
