"""R3 costs at most 3.45% of a step."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import STEP_SECONDS

CLAIM = Claim(
    number=18,
    name="r3_costs_little",
    sentence="R3 costs at most 3.45% of a step.",
    source="R3 (arXiv 2510.11370) sec. 5.3, App. F",
    predictions=(
        Prediction(
            "a global step of GRPO + R3 takes at most 1.0345 times as long",
            arm("grpo", "R3"),
            arm("grpo"),
            STEP_SECONDS,
            "at_most",
            1.0345,
            "ratio",
        ),
    ),
)
