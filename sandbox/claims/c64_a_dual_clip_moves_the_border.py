"""A dual clip moves the border to a larger N, and does not remove it; R3 still helps there."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, with_dual_clip
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA, COLLAPSED

_NONE, _R3 = (with_dual_clip(at("r0.5", remedy, 16)) for remedy in ("none", "R3"))
_SMALLER = at("r0.3", "none", 16)

CLAIM = BorderClaim(
    number=64,
    name="a_dual_clip_moves_the_border",
    sentence="At N = 16 and two engine gaps GRPO without replay or weight collapses less often with a dual clip at 3; "
    "at the larger gap it still does, less often with R3, whose accuracy over the run is higher by more than 0.03.",
    source="here, after claim 63; dual clip: arXiv 1912.09729",
    predictions=(
        Prediction(
            "router noise 0.5, no remedy: fewer runs collapse with the dual clip than without it",
            _NONE, at("r0.5", "none", 16), COLLAPSED, "less", planned=-0.4,
        ),
        Prediction(
            "router noise 0.3, no remedy: fewer runs collapse with the dual clip than without it",
            with_dual_clip(_SMALLER), _SMALLER, COLLAPSED, "less", planned=-0.6,
        ),
        Prediction(
            "router noise 0.5, dual clip: fewer runs collapse with R3 than without it",
            _R3, _NONE, COLLAPSED, "less", planned=-0.55,
        ),
        Prediction(
            "router noise 0.5, dual clip: the accuracy with R3 is higher by more than 0.03",
            _R3, _NONE, AREA, "more", margin=0.03, planned=0.11,
        ),
    ),
    # After those of claim 63: no claim has used any of these arms on them.
    first_seed=414,
    # The accuracy needs the most: spreads of 0.1 and 0.03, a difference of 0.11 and a fourteenth of 5% give 93%
    # by Student's t (Holm's step was nearer a 22nd: LOG, claim 66).
    num_seeds=32,
    # Places for the border under a dual clip.
    also=tuple(with_dual_clip(at(gap, "none", n)) for gap, n in (("r0.2", 16), ("r0.3", 8), ("r0.5", 4))),
    also_seeds=8,
)  # fmt: skip
