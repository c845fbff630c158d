"""On-policy, training without the weight of the engine gap collapses, with a sharp drop in entropy."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ENTROPY, SURVIVAL

CLAIM = Claim(
    number=3,
    name="no_weight_collapses",
    sentence="On-policy, training without the weight of the engine gap collapses, with a sharp drop in entropy.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    predictions=(
        Prediction(
            "collapses earlier by a quarter of the run",
            arm("minirl_no_is"),
            arm("minirl"),
            SURVIVAL,
            "less",
            0.25,
        ),
        Prediction(
            "ends with less entropy, by a third at least",
            arm("minirl_no_is"),
            arm("minirl"),
            FINAL_ENTROPY,
            "less",
            1.5,
            "ratio",
        ),
    ),
    seeds_in=COLLAPSES | {"noisy": 14},
    regimes=AND_NOISY,
    remarks={"hot": "Seeds 0 to 4 were seen before 14 were asked for.", "noisy": SEEN_IN_NOISY},
)
