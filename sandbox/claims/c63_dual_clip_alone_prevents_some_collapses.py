"""Dual clip as the only remedy: neither replay nor a weight."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, with_dual_clip
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA, COLLAPSED

_NONE = at("r0.5", "none", 8)

CLAIM = BorderClaim(
    number=63,
    name="dual_clip_alone_prevents_some_collapses",
    sentence="At N = 8 and a large engine gap GRPO without replay or weight collapses less often with a dual clip at "
    "3, and its accuracy over the run is higher by more than 0.1.",
    source="here, after a look at claim 62's arms; dual clip: arXiv 1912.09729",
    predictions=(
        Prediction(
            "no remedy: fewer runs collapse with the dual clip than without it",
            with_dual_clip(_NONE), _NONE, COLLAPSED, "less", planned=-0.45,
        ),
        Prediction(
            "no remedy: the accuracy with the dual clip is higher by more than 0.1",
            with_dual_clip(_NONE), _NONE, AREA, "more", margin=0.1, planned=0.17,
        ),
    ),
    # After those of claim 62: no claim has used either arm on them.
    first_seed=386,
    # 88% power at shares of 0.95 and 0.5 and a fourteenth of 5%, by the score statistic's normal approximation (Holm's
    # step was nearer a 22nd: LOG, claim 66).
    num_seeds=28,
)  # fmt: skip
