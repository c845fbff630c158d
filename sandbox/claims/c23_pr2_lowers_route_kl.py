"""The router's KL from its cached distribution is lower under Pr2 than under R2."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import ROUTE_KL

CLAIM = Claim(
    number=23,
    name="pr2_lowers_route_kl",
    sentence="The router's KL from its cached distribution is lower under Pr2 than under R2.",
    source="Pr2 (arXiv 2606.00395) sec. 5.4",
    home="paper",
    fresh_seeds=15,
    predictions=(
        Prediction(
            words="N = 8: it is lower by a tenth at least",
            treatment=arm("grpo", "Pr2", 8),
            control=arm("grpo", "R2", 8),
            measure=ROUTE_KL,
            expected="less",
            # Of the size that 40 seeds can detect (docs/decisions/0007).
            margin=1.1,
            scale="ratio",
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
)
