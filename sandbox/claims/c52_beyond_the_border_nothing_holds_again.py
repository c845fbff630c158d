"""Claim 44 again: 36 seeds, enough to show that collapses in five runs of six are more than half."""

from __future__ import annotations

from sandbox.claims import c44_beyond_the_border_nothing_holds as first

CLAIM = first.CLAIM.again(52, first_seed=300, num_seeds=36)
