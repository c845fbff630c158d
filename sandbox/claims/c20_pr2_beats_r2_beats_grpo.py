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
    predictions=tuple(
        Prediction(
            words=f"N = {n}: {words}",
            treatment=arm("grpo", better, n),
            control=arm("grpo", worse, n),
            measure=AREA,
            expected="more",
        )
        for n in (2, 4, 8)
        for words, better, worse in (
            ("Pr2 ends higher than R2", "Pr2", "R2"),
            ("R2 ends higher than GRPO", "R2", "none"),
        )
    ),
)
