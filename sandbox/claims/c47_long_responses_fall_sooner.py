"""Long responses collapse at a smaller engine gap per token than short ones.

Every response of the border's map has some 21 tokens, so the map cannot distinguish KL x N from KL x length x N. The
digits of sums set the length: 2 digits take 22 tokens, 6 digits 61. Tried before the claim was written, with seed 20:
sums of 2 digits were stable at router noise 0.3 and 0.5; sums of 6 digits collapsed at 0.2 and 0.3 and were stable with
an exact engine.
"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, sums
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED
from sandbox.ledger.measures import EARLY_KL

LONG, SHORT = sums(6, "r0.2"), sums(2, "r0.5")

CLAIM = BorderClaim(
    number=47,
    name="long_responses_fall_sooner",
    sentence="At N = 8 responses of 61 tokens collapse at an engine gap per token at which responses of 22 stand.",
    source="here; the settings of R3 (arXiv 2510.11370) sec. 3.1, where responses have up to 30,720 tokens",
    predictions=(
        Prediction(
            words="61 tokens at router noise 0.2 have at most half of the KL per token of 22 tokens at 0.5",
            treatment=LONG,
            control=SHORT,
            measure=EARLY_KL,
            expected="less",
            margin=2.0,
            scale="ratio",
            planned=0.25,
        ),
        Prediction(
            words="61 tokens at router noise 0.2 collapse more often than 22 tokens at 0.5",
            treatment=LONG,
            control=SHORT,
            measure=COLLAPSED,
            expected="more",
            planned=0.75,
        ),
        Prediction(
            words="61 tokens at router noise 0.2 collapse more often than with an exact engine",
            treatment=LONG,
            control=sums(6, "exact"),
            measure=COLLAPSED,
            expected="more",
            planned=0.75,
        ),
    ),
    # With 12 of 14 against 2 of 14 Fisher's p is 4e-4, below Holm's first step (docs/decisions/0008).
    num_seeds=14,
    also=(sums(6, "r0.2", "R3"), sums(6, "r0.2", "tis"), sums(6, "r0.1"), sums(2, "exact")),
    also_seeds=6,
)
