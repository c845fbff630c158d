"""Weights one rollout old under a dual clip: does the token weight prevent the collapses that a dual clip leaves?"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, with_dual_clip
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA, COLLAPSED

_NONE, _TIS, _R3 = (with_dual_clip(at("stale", remedy, 8)) for remedy in ("none", "tis", "R3"))

CLAIM = BorderClaim(
    number=67,
    name="the_weight_helps_old_weights_under_a_dual_clip",
    sentence="At N = 8, with an exact engine whose weights are one rollout old, GRPO with a dual clip at 3 collapses "
    "less often with Token-TIS, whose accuracy over the run is higher by more than 0.02.",
    source="here, after claims 49 and 64; dual clip: arXiv 1912.09729",
    predictions=(
        Prediction(
            "weights one rollout old, dual clip: fewer runs collapse with Token-TIS than without it",
            _TIS, _NONE, COLLAPSED, "less", planned=-0.5,
        ),
        Prediction(
            "weights one rollout old, dual clip: the accuracy with Token-TIS is higher by more than 0.02",
            _TIS, _NONE, AREA, "more", margin=0.02, planned=0.065,
        ),
    ),
    # After those of claim 66: no claim has used any of these arms on them.
    first_seed=474,
    # The accuracy needs the most: spreads of 0.044 (claim 49's Token-TIS) and 0.042 and a difference of 0.065 give 90%
    # at a 22nd of 5%, two-sided, by Student's t.
    num_seeds=36,
    # One run of R3 was looked at: it collapsed, as most do without the dual clip.
    also=(_R3,),
    also_seeds=8,
)  # fmt: skip
