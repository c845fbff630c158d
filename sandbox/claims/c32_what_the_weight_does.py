"""The token weight matters by damping what mu samples and pi disbelieves, not by the gradient's bias.

From exact enumeration: with a baseline the token weight changes the gradient's bias by a quarter in the median
(docs/token-weight.md). If that were its benefit, a weight that may only shrink (a cap of 1) would do worse, as it adds
a bias; if its benefit is to damp tokens that pi disbelieves, the cap of 1 keeps all of it.
"""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link
from sandbox.ledger.measures import FINAL_KL

DAMPING = arm("minirl", name="damping", changes=(("algorithm.objective.cap", "1.0"),))

CLAIM = Claim(
    number=32,
    name="what_the_weight_does",
    sentence="The token weight helps in training by damping tokens that pi disbelieves, not by lowering the bias.",
    source="here; docs/token-weight.md, MiniRL (arXiv 2512.01374) sec. 4.3",
    home="border",
    fresh_seeds=37,
    fresh_from=200,  # claims 1, 3 and 33 had used two of its arms on 104 to 143
    exact=(Link("e1", "If the weight does not help by lowering bias, bias does not tell the loss.", is_opposite=True),),
    predictions=(
        Prediction(
            words="leaving the weight out changes the accuracy by less than 0.1",
            treatment=arm("minirl_no_is"),
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
        Prediction(
            words="without the weight the engine gap ends larger",
            treatment=arm("minirl_no_is"),
            control=arm("minirl"),
            measure=FINAL_KL,
            expected="more",
            margin=1.0,
            scale="ratio",
        ),
        Prediction(
            words="a weight of at most 1 ends within 0.1 of the whole weight",
            treatment=DAMPING,
            control=arm("minirl"),
            measure=AREA,
            expected="same",
            margin=0.1,
        ),
    ),
    regimes=AND_NOISY,
    remarks={
        "stress": "minirl-N1 and minirl_no_is-N1 had run here before this claim was written.",
        "noisy": SEEN_IN_NOISY,
    },
)
