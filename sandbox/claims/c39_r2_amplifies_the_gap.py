"""R2 without a weight widens the engine gap, as its target leaves the policy that sampled; it learns more even so."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link
from sandbox.ledger.measures import FINAL_KL

PLACES = tuple((gap, n) for gap in ("r0.2", "r0.3") for n in (4, 8))
"""Near the border of no remedy, where there is room to fall and to rise."""

CLAIM = BorderClaim(
    number=39,
    name="r2_amplifies_the_gap",
    sentence="At a middling engine gap R2 without a weight ends at a larger KL of mu and old, and yet learns more.",
    source="here; R2 as in MiniRL (arXiv 2512.01374) sec. 3.2",
    exact=(Link("d1", "The claim says that R2 learns more than no replay.", is_opposite=True),),
    predictions=(
        Prediction(
            words="router noise 0.2 and 0.3, N = 4 and 8: the KL of mu and old ends higher than without, by a tenth",
            treatment=tuple(at(gap, "R2", n) for gap, n in PLACES),
            control=tuple(at(gap, "none", n) for gap, n in PLACES),
            measure=FINAL_KL,
            expected="more",
            margin=1.1,
            planned=1.6,
            scale="ratio",
        ),
        Prediction(
            words="router noise 0.2 and 0.3, N = 4 and 8: accuracy is higher by 0.02",
            treatment=tuple(at(gap, "R2", n) for gap, n in PLACES),
            control=tuple(at(gap, "none", n) for gap, n in PLACES),
            measure=AREA,
            expected="more",
            margin=0.02,
            planned=0.06,
        ),
    ),
    # With the spread recorded before its own runs, 15 seeds had a power of 46% (docs/decisions/0008).
    num_seeds=25,
    shown=(),
    also=(at("r0.5", "R2", 8),),
    also_seeds=20,
)
