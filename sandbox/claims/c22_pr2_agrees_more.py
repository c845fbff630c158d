"""Cached and live routes agree more under Pr2 than under R2, and least without replay."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import AGREEMENT, ZERO_DEVIATION

CLAIM = Claim(
    number=22,
    name="pr2_agrees_more",
    sentence="Cached and live routes agree more under Pr2 than under R2, and least without replay.",
    source="Pr2 (arXiv 2606.00395) sec. 5.4, Fig. 4",
    home="paper",
    fresh_seeds=8,
    predictions=(
        Prediction(
            words="N = 8: top-k agreement is higher under Pr2 than under R2",
            treatment=arm("grpo", "Pr2", 8),
            control=arm("grpo", "R2", 8),
            measure=AGREEMENT,
            expected="more",
            margin=0.002,
        ),
        Prediction(
            words="N = 8: top-k agreement is higher under R2 than in GRPO",
            treatment=arm("grpo", "R2", 8),
            control=arm("grpo", "none", 8),
            measure=AGREEMENT,
            expected="more",
            margin=0.002,
        ),
        Prediction(
            words="N = 8: rows without a deviation are more under Pr2 than under R2 (91.5% and 88.8% in the paper)",
            treatment=arm("grpo", "Pr2", 8),
            control=arm("grpo", "R2", 8),
            measure=ZERO_DEVIATION,
            expected="more",
            margin=0.005,
        ),
        Prediction(
            words="N = 8: rows without a deviation are more under R2 than in GRPO (88.8% and 76.9%)",
            treatment=arm("grpo", "R2", 8),
            control=arm("grpo", "none", 8),
            measure=ZERO_DEVIATION,
            expected="more",
            margin=0.005,
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
    remarks=dict.fromkeys(
        ("paper", "stress"),
        "Likely reason: routers move so little within a step (97.8% of the slots agree without replay) that the "
        "predictor's own error is as large as what it could save.",
    ),
)
