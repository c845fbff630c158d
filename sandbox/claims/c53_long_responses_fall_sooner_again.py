"""Claim 47 again: the 33 seeds that a difference of half of the runs needs, instead of 14."""

from __future__ import annotations

from sandbox.claims import c47_long_responses_fall_sooner as first

# 33 seeds: the power is 85% if 6 of 14 long runs and no others collapse, as in the first trial. `planned` is half of
# the runs, centred at one half, as `--power` reads it.
CLAIM = first.CLAIM.again(53, first_seed=300, num_seeds=33, planned={1: 0.5, 2: 0.5})
