"""Claim 26 again: 50 seeds instead of 13, which could not tell that ten times the multiplier costs less than 0.05."""

from __future__ import annotations

from sandbox.claims import c26_the_multiplier_matters_little as first

# 50 seeds: the power is some 80% at Holm's step of the day (0.05 / 20) if ten times costs 0.031, as in the first trial.
CLAIM = first.CLAIM.again(56, first_seed=300, num_seeds=50, planned={1: -0.031})
