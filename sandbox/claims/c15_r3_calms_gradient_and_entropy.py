"""R3 brings smaller gradient norms and a steadier entropy."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import ENTROPY_SPREAD, GRAD_NORM

CLAIM = Claim(
    number=15,
    name="r3_calms_gradient_and_entropy",
    sentence="R3 brings smaller gradient norms and a steadier entropy.",
    source="R3 (arXiv 2510.11370) sec. 5.2, Fig. 6",
    home="border",
    fresh_seeds=24,
    predictions=(
        Prediction(
            words="the gradient norm is lower by a third",
            treatment=arm("grpo", "R3"),
            control=arm("grpo"),
            measure=GRAD_NORM,
            expected="less",
            # Of the size that 40 seeds can detect, here and below (docs/decisions/0007).
            margin=1.5,
            scale="ratio",
        ),
        Prediction(
            words="the entropy wanders less from window to window, by a third",
            treatment=arm("grpo", "R3"),
            control=arm("grpo"),
            measure=ENTROPY_SPREAD,
            expected="less",
            margin=1.5,
            scale="ratio",
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
    regimes=AND_NOISY,
)
