"""Different cold starts end alike under one stable recipe, and stable recipes end alike."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

BACKWARD = (("cold_start.teacher", "backward"),)
ATTEMPTS = (("cold_start.teacher", "attempts"), ("algorithm.sampling.max_tokens", "64"))

CLAIM = Claim(
    number=8,
    name="cold_starts_end_alike",
    sentence="Different cold starts end alike under one stable recipe, and stable recipes end alike.",
    source="MiniRL (arXiv 2512.01374) sec. 4.5, Fig. 5",
    predictions=(
        Prediction(
            "the teacher backward ends within 0.1 of forward",
            arm("minirl", name="backward", changes=BACKWARD),
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.1,
        ),
        Prediction(
            "the teacher attempts ends within 0.1 of forward",
            arm("minirl", name="attempts", changes=ATTEMPTS),
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.1,
        ),
        Prediction(
            "R2 at N = 2 ends within 0.1 of on-policy",
            arm("minirl", "R2", 2),
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.1,
        ),
        Prediction(
            "R3 at N = 4 ends within 0.1 of on-policy",
            arm("minirl", "R3", 4),
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.1,
        ),
    ),
)
