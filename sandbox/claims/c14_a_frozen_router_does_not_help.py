"""A frozen router does not prevent the collapse.

R3 has one mini-batch per global step there. GRPO is stable at N = 1 in `border` (as in the earlier regimes, where this
claim was not applicable), so it is tried at N = 8, where GRPO collapses.
"""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import COLLAPSED

FROZEN = (("algorithm.freeze_router", "true"),)

CLAIM = Claim(
    number=14,
    name="a_frozen_router_does_not_help",
    sentence="A frozen router does not prevent the collapse.",
    source="R3 (arXiv 2510.11370) App. C",
    home="border",
    fresh_seeds=26,
    predictions=(
        Prediction(
            words="N = 8: GRPO with a frozen router collapses in more than half of its runs",
            treatment=arm("grpo", n=8, name="frozen", changes=FROZEN),
            control=0.5,
            measure=COLLAPSED,
            expected="more",
            premise=arm("grpo", n=8),
        ),
        Prediction(
            words="N = 8: it collapses more often than GRPO + R3, by a quarter of the runs",
            treatment=arm("grpo", n=8, name="frozen", changes=FROZEN),
            control=arm("grpo", "R3", 8),
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
            premise=arm("grpo", n=8),
        ),
    ),
    regimes=(),
)
