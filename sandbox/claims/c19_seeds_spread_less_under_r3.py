"""Results spread less over seeds with R3 than with GSPO."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

CLAIM = Claim(
    number=19,
    name="seeds_spread_less_under_r3",
    sentence="Results spread less over seeds with R3 than with GSPO.",
    source="R3 (arXiv 2510.11370) App. E",
    home="border",
    fresh_seeds=36,
    predictions=(
        Prediction(
            words="the accuracy of GRPO + R3 strays less from its median over seeds, at N = 4",
            treatment=arm("grpo", "R3", 4),
            control=arm("gspo", "none", 4),
            measure=AREA,
            expected="less",
            scale="spread",
        ),
    ),
)
