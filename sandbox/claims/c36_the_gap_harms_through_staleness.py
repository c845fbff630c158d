"""The engine gap harms through staleness: little with one update per rollout, much with eight or sixteen."""

from __future__ import annotations

from sandbox.claims.border_arms import MAP, BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA

CLAIM = BorderClaim(
    number=36,
    name="the_gap_harms_through_staleness",
    sentence="The engine gap harms through staleness: little with one update per rollout, much with eight or more.",
    source="here; MiniRL (arXiv 2512.01374) Eq. 5 and sec. 4.4",
    predictions=(
        Prediction(
            words="the gap costs more at N = 8 than at N = 1: half the difference of the two losses exceeds 0.025",
            treatment=(at("exact", "none", 8), at("r0.5", "none", 1)),
            control=(at("r0.5", "none", 8), at("exact", "none", 1)),
            measure=AREA,
            expected="more",
            # Half of 0.05: a side of two arms is their mean, so the effect is half of the interaction.
            margin=0.025,
            planned=0.1,
        ),
        Prediction(
            words="at N = 1 the gap costs at most 0.1",
            treatment=at("exact", "none", 1),
            control=at("r0.5", "none", 1),
            measure=AREA,
            expected="at_most",
            # In `border` "at most" has a margin of 0.1, and "by" one of 0.05 (docs/decisions/0008).
            margin=0.1,
        ),
        Prediction(
            words="at N = 8 a router noise of 0.5 costs more than one of 0.1, by 0.05",
            treatment=at("r0.1", "none", 8),
            control=at("r0.5", "none", 8),
            measure=AREA,
            expected="more",
            margin=0.05,
            planned=0.15,
        ),
        Prediction(
            words="at N = 16 the gap costs more than 0.05",
            treatment=at("exact", "none", 16),
            control=at("r0.5", "none", 16),
            measure=AREA,
            expected="more",
            margin=0.05,
            planned=0.2,
        ),
    ),
    num_seeds=15,
    also=MAP,
    also_seeds=8,
)
