"""At N = 8, GSPO + R3 ends at least as high as GRPO + R3, and that higher than GSPO."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

CLAIM = Claim(
    number=13,
    name="gspo_with_r3_first",
    sentence="At N = 8, GSPO + R3 ends at least as high as GRPO + R3, and that higher than GSPO.",
    source="R3 (arXiv 2510.11370) sec. 5.2, Table 1",
    home="border",
    fresh_seeds=40,
    predictions=(
        Prediction(
            words="GRPO + R3 ends no higher than GSPO + R3",
            treatment=arm("grpo", "R3", 8),
            control=arm("gspo", "R3", 8),
            measure=AREA,
            expected="at_most",
            margin=0.1,
        ),
        Prediction(
            words="GRPO + R3 ends higher than GSPO",
            treatment=arm("grpo", "R3", 8),
            control=arm("gspo", "none", 8),
            measure=AREA,
            expected="more",
        ),
    ),
)
