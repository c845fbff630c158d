"""Claim 38 again: 30 seeds instead of 15, which could not tell on policy that R3 costs at most 0.1."""

from __future__ import annotations

from sandbox.claims import c38_r3_helps_throughout as first

# 30 seeds: the power is 93% at Holm's first step if R3 gains 0.04 at N = 1, as in the first trial, 53% if nothing.
CLAIM = first.CLAIM.again(55, first_seed=300, num_seeds=30, planned={0: -0.04})
