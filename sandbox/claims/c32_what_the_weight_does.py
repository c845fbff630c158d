"""The token weight matters by damping what mu samples and pi disbelieves, not by the gradient's bias.

From the exact lab: with a baseline the token weight changes the gradient's bias by a quarter in the median
(docs/token-weight.md). If that were its benefit, a weight that may only shrink (a cap of 1) would do worse,
since it is biased anew; if what it does is to damp tokens that pi disbelieves, the cap of 1 keeps all of it.
"""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, FINAL_KL, SURVIVAL

DAMPING = arm("minirl", name="damping", changes=(("algorithm.objective.cap", "1.0"),))

CLAIM = Claim(
    number=32,
    name="what_the_weight_does",
    sentence="The token weight helps in training by damping tokens that pi disbelieves, not by lowering the bias.",
    source="here; docs/token-weight.md, MiniRL (arXiv 2512.01374) sec. 4.3",
    predictions=(
        Prediction(
            "leaving the weight out changes the accuracy by less than 0.05",
            arm("minirl_no_is"),
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.05,
        ),
        Prediction(
            "without the weight the engine gap ends larger, by a quarter",
            arm("minirl_no_is"),
            arm("minirl"),
            FINAL_KL,
            "more",
            1.25,
            "ratio",
        ),
        Prediction(
            "a weight of at most 1 ends within 0.05 of the whole weight",
            DAMPING,
            arm("minirl"),
            FINAL_ACCURACY,
            "same",
            0.05,
        ),
        Prediction("a weight of at most 1 lasts no shorter", arm("minirl"), DAMPING, SURVIVAL, "at_most", 0.05),
    ),
    regimes=AND_NOISY,
    remarks={
        "stress": "minirl-N1 and minirl_no_is-N1 had run here before this claim was written.",
        "noisy": SEEN_IN_NOISY,
    },
)
