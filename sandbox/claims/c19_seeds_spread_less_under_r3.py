"""Results spread less over seeds with R3 than with GSPO."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

CLAIM = Claim(
    number=19,
    name="seeds_spread_less_under_r3",
    sentence="Results spread less over seeds with R3 than with GSPO.",
    source="R3 (arXiv 2510.11370) App. E",
    predictions=(
        Prediction(
            "the accuracy of GRPO + R3 strays less from its median over seeds, at N = 4",
            arm("grpo", "R3", 4),
            arm("gspo", "none", 4),
            FINAL_ACCURACY,
            "less",
            0.0,
            "spread",
        ),
    ),
)
