"""On-policy, MiniRL with the importance weight of the engine gap does best."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEN_IN_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = Claim(
    number=1,
    name="token_weight_is_best_on_policy",
    sentence="On-policy, MiniRL with the importance weight of the engine gap does best.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    home="border",
    fresh_seeds=36,
    exact=(Link("w1", "It is the claim's first comparison, at N = 1 under an error that stays."),),
    predictions=tuple(
        Prediction(
            words=f"ends with higher accuracy than {words}",
            treatment=arm("minirl"),
            control=other,
            measure=AREA,
            expected="more",
        )
        for words, other in (
            ("without the weight", arm("minirl_no_is")),
            ("with length normalisation", arm("minirl_lengthnorm")),
            ("under R3", arm("minirl", "R3")),
        )
    ),
    regimes=AND_NOISY,
    remarks={"noisy": SEEN_IN_NOISY},
)
