"""On-policy, length normalisation is stable and ends lower."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA, COLLAPSED

CLAIM = Claim(
    number=2,
    name="length_normalisation_is_stable_but_worse",
    sentence="On-policy, length normalisation is stable and ends lower.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    home="border",
    fresh_seeds=36,
    predictions=(
        Prediction(
            words="fewer than a quarter of its runs collapse",
            treatment=arm("minirl_lengthnorm"),
            control=0.25,
            measure=COLLAPSED,
            expected="less",
        ),
        Prediction(
            words="ends with lower accuracy",
            treatment=arm("minirl_lengthnorm"),
            control=arm("minirl"),
            measure=AREA,
            expected="less",
        ),
    ),
)
