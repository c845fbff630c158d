"""Different cold starts end alike under one stable recipe, and stable recipes end alike."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

BACKWARD = (("cold_start.teacher", "backward"),)
ATTEMPTS = (("cold_start.teacher", "attempts"), ("algorithm.sampling.max_tokens", "64"))

CLAIM = Claim(
    number=8,
    name="cold_starts_end_alike",
    sentence="Different cold starts end alike under one stable recipe, and stable recipes end alike.",
    source="MiniRL (arXiv 2512.01374) sec. 4.5, Fig. 5",
    home="paper",
    fresh_seeds=6,
    predictions=(
        Prediction(
            words="the teacher backward ends within 0.1 of forward",
            treatment=arm("minirl", name="backward", changes=BACKWARD),
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
        Prediction(
            words="the teacher attempts ends within 0.1 of forward",
            treatment=arm("minirl", name="attempts", changes=ATTEMPTS),
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
        Prediction(
            words="R2 at N = 2 ends within 0.1 of on-policy",
            treatment=arm("minirl", "R2", 2),
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
        Prediction(
            words="R3 at N = 4 ends within 0.1 of on-policy",
            treatment=arm("minirl", "R3", 4),
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
    ),
)
