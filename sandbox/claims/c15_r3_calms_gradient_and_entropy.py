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
    predictions=(
        Prediction(
            "the gradient norm is lower by a twentieth",
            arm("grpo", "R3"),
            arm("grpo"),
            GRAD_NORM,
            "less",
            1.05,
            "ratio",
        ),
        Prediction(
            "the entropy wanders less from window to window, by a tenth",
            arm("grpo", "R3"),
            arm("grpo"),
            ENTROPY_SPREAD,
            "less",
            1.1,
            "ratio",
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
    regimes=AND_NOISY,
)
