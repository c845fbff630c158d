"""The objective whose gradient the exact audit finds most biased is the one that trains worst.

docs/audit-claims.md: under the three regimes' engines, T = 5, length normalisation has a relative bias of 0.44, of
which no step size repairs 0.18 to 0.19; the token weight, none and the prefix weight have at most 0.04, and differ by
less. So what the audit predicts is one thing: length normalisation does worse, and the other three do alike.
"""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.claims.c33_the_prefix_weight_in_training import PREFIX
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, SURVIVAL

MOST_BIASED = arm("minirl_lengthnorm")
OTHERS = {"token": arm("minirl"), "none": arm("minirl_no_is"), "prefix": arm("minirl", name="prefix", changes=PREFIX)}

CLAIM = Claim(
    number=29,
    name="the_audited_bias_predicts_training",
    sentence="The objective that the exact audit finds most biased trains worst, and those it finds alike train alike.",
    source="here; docs/audit-claims.md",
    predictions=(
        *(
            Prediction(
                f"length normalisation ends lower than the weight `{name}`, by 0.02",
                MOST_BIASED,
                other,
                FINAL_ACCURACY,
                "less",
                0.02,
            )
            for name, other in OTHERS.items()
        ),
        Prediction(
            "it lasts no longer than no weight, the next in bias",
            MOST_BIASED,
            OTHERS["none"],
            SURVIVAL,
            "at_most",
            0.05,
        ),
        Prediction(
            "token and none end within 0.05 of each other",
            OTHERS["none"],
            OTHERS["token"],
            FINAL_ACCURACY,
            "same",
            0.05,
        ),
        Prediction(
            "token and prefix end within 0.05 of each other",
            OTHERS["prefix"],
            OTHERS["token"],
            FINAL_ACCURACY,
            "same",
            0.05,
        ),
    ),
    regimes=AND_NOISY,
    remarks={
        "stress": "Runs of minirl-N1, minirl_no_is-N1 and two of minirl_lengthnorm-N1 were made before.",
        "noisy": SEEN_IN_NOISY,
    },
)
