"""R2 does better than R3 at N = 2, R3 better than R2 at N = 4 and 8."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = Claim(
    number=6,
    name="r2_at_small_r3_at_large_off_policiness",
    sentence="R2 does better than R3 at N = 2, R3 better than R2 at N = 4 and 8.",
    source="MiniRL (arXiv 2512.01374) sec. 4.4, Fig. 2 to 4",
    home="border",
    fresh_seeds=36,
    exact=(Link("w5", "The claim's comparison at N = 8."),),
    predictions=tuple(
        Prediction(
            words=f"N = {n}: {better} ends with higher accuracy",
            treatment=arm("minirl", better, n),
            control=arm("minirl", worse, n),
            measure=AREA,
            expected="more",
        )
        for n, better, worse in ((2, "R2", "R3"), (4, "R3", "R2"), (8, "R3", "R2"))
    ),
)
