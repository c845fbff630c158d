"""R3 on policy brings no gain."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA, COLLAPSED
from sandbox.ledger.measures import KL

CLAIM = Claim(
    number=4,
    name="r3_on_policy_brings_no_gain",
    sentence="On-policy, R3 narrows the gap without a gain; with length normalisation it hurts.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    home="border",
    fresh_seeds=40,
    predictions=(
        Prediction(
            words="lowers k3 KL(mu || old) by a third at least",
            treatment=arm("minirl", "R3"),
            control=arm("minirl"),
            measure=KL,
            expected="less",
            margin=1.5,
            scale="ratio",
        ),
        Prediction(
            words="brings no gain in accuracy of 0.1",
            treatment=arm("minirl", "R3"),
            control=arm("minirl"),
            measure=AREA,
            expected="at_most",
            margin=0.1,
        ),
        Prediction(
            words="with length normalisation, ends lower than without R3",
            treatment=arm("minirl_lengthnorm", "R3"),
            control=arm("minirl_lengthnorm"),
            measure=AREA,
            expected="less",
        ),
        Prediction(
            words="without the weight, still collapses more often, by a quarter of the runs",
            treatment=arm("minirl_no_is", "R3"),
            control=arm("minirl"),
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
        ),
    ),
    regimes=AND_NOISY,
    remarks={"noisy": SEEN_IN_NOISY},
)
