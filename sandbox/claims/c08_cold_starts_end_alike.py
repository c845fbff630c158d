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
    predictions=tuple(
        Prediction(
            words=f"{words} ends within 0.1 of {other}",
            treatment=treatment,
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        )
        for words, treatment, other in (
            ("the teacher backward", arm("minirl", name="backward", changes=BACKWARD), "forward"),
            ("the teacher attempts", arm("minirl", name="attempts", changes=ATTEMPTS), "forward"),
            ("R2 at N = 2", arm("minirl", "R2", 2), "on-policy"),
            ("R3 at N = 4", arm("minirl", "R3", 4), "on-policy"),
        )
    ),
)
