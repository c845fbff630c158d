"""R3 on policy brings no gain."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, KL, SURVIVAL

CLAIM = Claim(
    number=4,
    name="r3_on_policy_brings_no_gain",
    sentence="On-policy, R3 narrows the gap without a gain; with length normalisation it hurts.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    predictions=(
        Prediction(
            "lowers k3 KL(mu || old) by a fifth at least",
            arm("minirl", "R3"),
            arm("minirl"),
            KL,
            "less",
            1.25,
            "ratio",
        ),
        Prediction(
            "brings no gain in accuracy",
            arm("minirl", "R3"),
            arm("minirl"),
            FINAL_ACCURACY,
            "at_most",
            0.02,
        ),
        Prediction(
            "with length normalisation, ends lower than without R3",
            arm("minirl_lengthnorm", "R3"),
            arm("minirl_lengthnorm"),
            FINAL_ACCURACY,
            "less",
            0.02,
        ),
        Prediction(
            "without the weight, still collapses a quarter of the run earlier",
            arm("minirl_no_is", "R3"),
            arm("minirl"),
            SURVIVAL,
            "less",
            0.25,
        ),
    ),
    regimes=AND_NOISY,
    remarks={"noisy": SEEN_IN_NOISY},
)
