"""On-policy, MiniRL with the importance weight of the engine gap does best."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

CLAIM = Claim(
    number=1,
    name="token_weight_is_best_on_policy",
    sentence="On-policy, MiniRL with the importance weight of the engine gap does best.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    predictions=(
        Prediction(
            "ends with higher accuracy than without the weight",
            arm("minirl"),
            arm("minirl_no_is"),
            FINAL_ACCURACY,
            "more",
            0.02,
        ),
        Prediction(
            "ends with higher accuracy than with length normalisation",
            arm("minirl"),
            arm("minirl_lengthnorm"),
            FINAL_ACCURACY,
            "more",
            0.02,
        ),
        Prediction(
            "ends with higher accuracy than under R3",
            arm("minirl"),
            arm("minirl", "R3"),
            FINAL_ACCURACY,
            "more",
            0.02,
        ),
    ),
    regimes=AND_NOISY,
    remarks={"noisy": SEEN_IN_NOISY},
)
