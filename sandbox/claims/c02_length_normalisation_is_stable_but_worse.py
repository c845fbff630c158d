"""On-policy, length normalisation is stable and ends lower."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, SURVIVAL

CLAIM = Claim(
    number=2,
    name="length_normalisation_is_stable_but_worse",
    sentence="On-policy, length normalisation is stable and ends lower.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    predictions=(
        Prediction(
            "no rule of the verdict fires before the last tenth",
            arm("minirl_lengthnorm"),
            0.9,
            SURVIVAL,
            "more",
            0.0,
        ),
        Prediction(
            "ends with lower accuracy",
            arm("minirl_lengthnorm"),
            arm("minirl"),
            FINAL_ACCURACY,
            "less",
            0.02,
        ),
    ),
)
