"""Pr2 ends higher than R2, and R2 higher than GRPO, at N = 2, 4 and 8."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY

CLAIM = Claim(
    number=20,
    name="pr2_beats_r2_beats_grpo",
    sentence="Pr2 ends higher than R2, and R2 higher than GRPO, at N = 2, 4 and 8.",
    source="Pr2 (arXiv 2606.00395) sec. 5.2, Table 1",
    predictions=(
        Prediction(
            "N = 2: Pr2 ends higher than R2",
            arm("grpo", "Pr2", 2),
            arm("grpo", "R2", 2),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 2: R2 ends higher than GRPO",
            arm("grpo", "R2", 2),
            arm("grpo", "none", 2),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 4: Pr2 ends higher than R2",
            arm("grpo", "Pr2", 4),
            arm("grpo", "R2", 4),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 4: R2 ends higher than GRPO",
            arm("grpo", "R2", 4),
            arm("grpo", "none", 4),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 8: Pr2 ends higher than R2",
            arm("grpo", "Pr2", 8),
            arm("grpo", "R2", 8),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
        Prediction(
            "N = 8: R2 ends higher than GRPO",
            arm("grpo", "R2", 8),
            arm("grpo", "none", 8),
            FINAL_ACCURACY,
            "more",
            0.01,
        ),
    ),
)
