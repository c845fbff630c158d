"""At N = 8, GSPO + R3 ends at least as high as GRPO + R3, and that higher than GSPO."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

CLAIM = Claim(
    number=13,
    name="gspo_with_r3_first",
    sentence="At N = 8, GSPO + R3 ends at least as high as GRPO + R3, and that higher than GSPO.",
    source="R3 (arXiv 2510.11370) sec. 5.2, Table 1",
    predictions=(
        Prediction(
            "GRPO + R3 ends no higher than GSPO + R3",
            arm("grpo", "R3", 8),
            arm("gspo", "R3", 8),
            FINAL_ACCURACY,
            "at_most",
            0.02,
        ),
        Prediction(
            "GRPO + R3 ends higher than GSPO",
            arm("grpo", "R3", 8),
            arm("gspo", "none", 8),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
    ),
)
