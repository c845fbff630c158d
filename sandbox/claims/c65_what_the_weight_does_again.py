"""Claim 32 again, with twice the seeds: 37 could not tell whether the gain without the weight, 0.162, is above 0.1."""

from __future__ import annotations

from sandbox.claims import c32_what_the_weight_does as first

CLAIM = first.CLAIM.again(65, first_seed=300, num_seeds=72)
