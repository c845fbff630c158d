"""Pr2 ends higher than R2, and R2 higher than GRPO, at N = 2, 4 and 8."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = Claim(
    number=20,
    name="pr2_beats_r2_beats_grpo",
    sentence="Pr2 ends higher than R2, and R2 higher than GRPO, at N = 2, 4 and 8.",
    source="Pr2 (arXiv 2606.00395) sec. 5.2, Table 1",
    home="border",
    fresh_seeds=36,
    exact=(
        Link("d4", "The claim's first order, at N = 8 under noisy routers."),
        Link("d1", "Its second: R2 above no replay.", is_opposite=True),
    ),
    predictions=(
        Prediction(
            words="N = 2: Pr2 ends higher than R2",
            treatment=arm("grpo", "Pr2", 2),
            control=arm("grpo", "R2", 2),
            measure=AREA,
            expected="more",
        ),
        Prediction(
            words="N = 2: R2 ends higher than GRPO",
            treatment=arm("grpo", "R2", 2),
            control=arm("grpo", "none", 2),
            measure=AREA,
            expected="more",
        ),
        Prediction(
            words="N = 4: Pr2 ends higher than R2",
            treatment=arm("grpo", "Pr2", 4),
            control=arm("grpo", "R2", 4),
            measure=AREA,
            expected="more",
        ),
        Prediction(
            words="N = 4: R2 ends higher than GRPO",
            treatment=arm("grpo", "R2", 4),
            control=arm("grpo", "none", 4),
            measure=AREA,
            expected="more",
        ),
        Prediction(
            words="N = 8: Pr2 ends higher than R2",
            treatment=arm("grpo", "Pr2", 8),
            control=arm("grpo", "R2", 8),
            measure=AREA,
            expected="more",
        ),
        Prediction(
            words="N = 8: R2 ends higher than GRPO",
            treatment=arm("grpo", "R2", 8),
            control=arm("grpo", "none", 8),
            measure=AREA,
            expected="more",
        ),
    ),
)
