"""Claim 48 again: 113 seeds instead of 26, which could not tell whether most runs with 256 responses collapse."""

from __future__ import annotations

from sandbox.claims import c48_bias_or_variance as first

# 113 seeds: the power is 88% at Holm's step of the day (0.05 / 20) if 69% of those runs collapse, as before.
CLAIM = first.CLAIM.again(61, first_seed=300, num_seeds=113, planned={0: 0.192})
