"""Pr3 ends higher than R3."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

CLAIM = Claim(
    number=27,
    name="pr3_beats_r3",
    sentence="Pr3 ends higher than R3.",
    source="Pr2 (arXiv 2606.00395) App. C.2",
    predictions=(
        Prediction(
            "N = 4: it ends higher",
            arm("grpo", "Pr3", 4),
            arm("grpo", "R3", 4),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 8: it ends higher",
            arm("grpo", "Pr3", 8),
            arm("grpo", "R3", 8),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
    ),
)
