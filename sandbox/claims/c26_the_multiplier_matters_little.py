"""Pr2 does alike over two decades of the predictor's learning rate multiplier."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Arm, Claim, Prediction
from sandbox.ledger.course import AREA


def multiplied(multiplier: str) -> Arm:
    """Pr2 at N = 8 with this multiplier; the regimes' own is 0.03."""
    changes = (("algorithm.replay.predictor.learning_rate_multiplier", multiplier),)
    return arm("grpo", "Pr2", 8, name=f"multiplier{multiplier}", changes=changes)


CLAIM = Claim(
    number=26,
    name="the_multiplier_matters_little",
    sentence="Pr2 does alike over two decades of the predictor's learning rate multiplier.",
    source="Pr2 (arXiv 2606.00395) App. G, Fig. 5b (1e4 and 1e6 at off-2 there, N = 8 here)",
    home="paper",
    fresh_seeds=13,
    predictions=(
        Prediction(
            words="N = 8: a tenth of it ends within 0.05",
            treatment=multiplied("0.003"),
            control=arm("grpo", "Pr2", 8),
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
        Prediction(
            words="N = 8: ten times it ends within 0.05",
            treatment=multiplied("0.3"),
            control=arm("grpo", "Pr2", 8),
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
    ),
)
