"""Truncated importance sampling lowers accuracy with one update per rollout and raises it with four.

Claim 37 predicts 0.05 on either side; 15 seeds left it open, at N = 1 by -0.106 (-0.184 to -0.028). This claim is about
the sign alone, on later seeds.
"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import FRESH, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = BorderClaim(
    number=46,
    name="the_sign_of_the_weight",
    sentence="Where the engine gap is large, the token weight lowers GRPO's accuracy at N = 1 and raises it at N = 4.",
    source="here; it would reconcile MiniRL (arXiv 2512.01374) sec. 4.3 with R3 (2510.11370) Table 1",
    exact=(
        Link("w1", "The claim says that the weight lowers reward at N = 1.", is_opposite=True),
        Link("w2", "And raises it at N = 4; without GRPO's clip here."),
    ),
    predictions=(
        Prediction(
            words="N = 1: truncated importance sampling lowers accuracy",
            treatment=at("r0.5", "tis", 1),
            control=at("r0.5", "none", 1),
            measure=AREA,
            expected="less",
            planned=-0.1,
        ),
        Prediction(
            words="N = 4: truncated importance sampling raises accuracy",
            treatment=at("r0.5", "tis", 4),
            control=at("r0.5", "none", 4),
            measure=AREA,
            expected="more",
            planned=0.1,
        ),
    ),
    num_seeds=40,
    # Claim 37 has these arms on the 15 seeds before.
    first_seed=FRESH + 15,
)
