"""Claim 8 again: twelve seeds instead of six, enough to see one teacher end 0.1 apart."""

from __future__ import annotations

from sandbox.claims import c08_cold_starts_end_alike as first

CLAIM = first.CLAIM.again(51, first_seed=300, num_seeds=12)
