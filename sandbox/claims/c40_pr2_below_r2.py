"""At a large engine gap Pr2 ends below R2: prediction moves its target further from what was sampled."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

PLACES = tuple((gap, n) for gap in ("r0.1", "r0.2", "r0.3") for n in (4, 8, 16))

CLAIM = BorderClaim(
    number=40,
    name="pr2_below_r2",
    sentence="At a large engine gap Pr2 does worse than R2, against Pr2's finding at a small one.",
    source="here; Pr2 (arXiv 2606.00395) sec. 5.2",
    exact=(Link("d4", "The claim says that Pr2 ends below R2.", is_opposite=True),),
    predictions=(
        Prediction(
            words="router noise 0.1 to 0.3, N = 4 to 16: accuracy is lower by 0.005",
            treatment=tuple(at(gap, "Pr2", n) for gap, n in PLACES),
            control=tuple(at(gap, "R2", n) for gap, n in PLACES),
            measure=AREA,
            expected="less",
            margin=0.005,
            planned=-0.03,
        ),
    ),
    num_seeds=15,
    shown=(),
)
