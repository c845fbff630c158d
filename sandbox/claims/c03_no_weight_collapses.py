"""On-policy, training without the weight of the engine gap collapses, with a sharp drop in entropy."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm
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
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={
        "hot": "Seeds 0 to 4 were seen before 14 were asked for. Tried: a KL from 1.9e-3 to 2.6e-2 nats a token, "
        "rates of 1e-3 and 2e-3. Likely reason: 400 updates on 21 tokens a response are too few for the "
        "bias of the missing weight to add up.",
        "noisy": "One run of minirl-N1 and of minirl_no_is-N1 was seen, with other errors, as the regime was "
        "chosen. Likely reason: the bias of the missing weight is small beside the noise of 64 rewards "
        "that err; what falls, falls by that noise.",
    },
)
