"""A Mixture-of-Experts model has a larger engine gap than its dense twin."""

from __future__ import annotations

from sandbox.claims.arms import arm, dense
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import EARLY_EXTREME, EARLY_KL

CLAIM = Claim(
    number=9,
    name="moe_gap_exceeds_dense",
    sentence="A Mixture-of-Experts model has a larger engine gap than its dense twin.",
    source="R3 (arXiv 2510.11370) sec. 3.1, Fig. 2",
    predictions=(
        Prediction(
            "k3 KL(mu || old) at the start is higher by half at least (2.4 times in the paper)",
            arm("minirl"),
            dense("minirl"),
            EARLY_KL,
            "more",
            1.5,
            "ratio",
        ),
        Prediction(
            "F(2) at the start is higher by 3 times at least (ten in the paper)",
            arm("minirl"),
            dense("minirl"),
            EARLY_EXTREME,
            "more",
            3.0,
            "ratio",
        ),
    ),
)
