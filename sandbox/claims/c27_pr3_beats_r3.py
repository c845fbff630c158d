"""Pr3 ends higher than R3."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

CLAIM = Claim(
    number=27,
    name="pr3_beats_r3",
    sentence="Pr3 ends higher than R3.",
    source="Pr2 (arXiv 2606.00395) App. F, Table 4",
    home="border",
    fresh_seeds=36,
    predictions=tuple(
        Prediction(
            words=f"N = {n}: it ends higher",
            treatment=arm("grpo", "Pr3", n),
            control=arm("grpo", "R3", n),
            measure=AREA,
            expected="more",
        )
        for n in (4, 8)
    ),
)
