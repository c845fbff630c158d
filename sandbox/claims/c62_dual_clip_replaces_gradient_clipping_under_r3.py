"""Dual clip in the place of gradient clipping, under R3: a bound on the one term that PPO's clip leaves open."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, with_dual_clip, with_free_norm
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

_R3 = with_free_norm(at("r0.5", "R3", 8))

CLAIM = BorderClaim(
    number=62,
    name="dual_clip_replaces_gradient_clipping_under_r3",
    sentence="At N = 8 and a large engine gap, gradients never clipped, R3 with a dual clip at 3 collapses less often "
    "than R3 alone, and in fewer than half of the runs.",
    source="here, after claim 60; dual clip: arXiv 1912.09729",
    predictions=tuple(
        Prediction(words, with_dual_clip(_R3), control, COLLAPSED, "less", planned=planned)
        for words, control, planned in (
            ("R3: fewer runs collapse with the dual clip than without it", _R3, -0.55),
            ("R3 with the dual clip: fewer than half of the runs collapse", 0.5, -0.4),
        )
    ),
    # After those of claim 60, whose runs of R3 alone have been seen.
    first_seed=358,
    # The effects and the seeds for which claim 60 was planned: 97% and 98% power at a fourteenth of 5%.
    num_seeds=28,
)
