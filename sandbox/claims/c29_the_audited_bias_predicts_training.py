"""The objective whose gradient the exact audit finds most biased is the one that trains worst.

docs/audit-claims.md: under the three regimes' engines, T = 5, length normalisation has a relative bias of 0.44, and
a bias of 0.18 to 0.19 is left at the best step size; the token weight, no weight and the prefix weight have at most
0.04, and differ by less. So the audit predicts that length normalisation does worse and that the other three do equally
well. The home is `hot`, the one regime of the three under whose engine runs collapse.
"""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.claims.c33_the_prefix_weight_in_training import PREFIX
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

MOST_BIASED = arm("minirl_lengthnorm")
OTHERS = {"token": arm("minirl"), "none": arm("minirl_no_is"), "prefix": arm("minirl", name="prefix", changes=PREFIX)}

CLAIM = Claim(
    number=29,
    name="the_audited_bias_predicts_training",
    sentence="The objective that the exact audit finds most biased trains worst, and those it finds alike train alike.",
    source="here; docs/audit-claims.md",
    home="hot",
    fresh_seeds=39,
    exact=(Link("e1", "The claim's premise: bias at step 0 tells the loss of reward."),),
    predictions=(
        *(
            Prediction(
                words=f"length normalisation does worse than the weight `{name}`, by 0.05",
                treatment=MOST_BIASED,
                control=other,
                measure=AREA,
                expected="less",
                margin=0.05,
            )
            for name, other in OTHERS.items()
        ),
        Prediction(
            words="token and none end within 0.05 of each other",
            treatment=OTHERS["none"],
            control=OTHERS["token"],
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
        Prediction(
            words="token and prefix end within 0.05 of each other",
            treatment=OTHERS["prefix"],
            control=OTHERS["token"],
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
    ),
    regimes=AND_NOISY,
    remarks={
        "stress": "Runs of minirl-N1, minirl_no_is-N1 and two of minirl_lengthnorm-N1 were made before.",
        "noisy": SEEN_IN_NOISY,
    },
)
