"""R2 without a weight amplifies the engine gap: its target leaves the policy that sampled."""

from __future__ import annotations

from sandbox.claims.border_arms import FIRST_SEED, at
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.measures import FINAL_KL

PLACES = tuple((gap, n) for gap in ("r0.2", "r0.3") for n in (4, 8, 16))
"""Below the border of no remedy, where there is room to fall."""

CLAIM = Claim(
    number=39,
    name="r2_amplifies_the_gap",
    sentence="R2 without a weight amplifies the engine gap and lowers accuracy.",
    source="here; R2 as in MiniRL (arXiv 2512.01374) sec. 3.2",
    home="border",
    predictions=(
        Prediction(
            words="router noise 0.2 and 0.3, N = 4 to 16: the KL of mu and old ends higher than without, by a tenth",
            treatment=tuple(at(gap, "R2", n) for gap, n in PLACES),
            control=tuple(at(gap, "none", n) for gap, n in PLACES),
            measure=FINAL_KL,
            expected="more",
            margin=1.1,
            scale="ratio",
        ),
        Prediction(
            words="router noise 0.2 and 0.3, N = 4 to 16: accuracy is lower by 0.01",
            treatment=tuple(at(gap, "R2", n) for gap, n in PLACES),
            control=tuple(at(gap, "none", n) for gap, n in PLACES),
            measure=AREA,
            expected="less",
            margin=0.01,
        ),
    ),
    num_seeds=8,
    first_seed=FIRST_SEED,
    regimes=("border",),
    shown=(),
)
