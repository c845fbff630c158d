"""The predictor's KL loss does no worse than its delta loss."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import AGREEMENT, FINAL_ACCURACY

DELTA = (("algorithm.replay.predictor.loss", "delta"),)

CLAIM = Claim(
    number=25,
    name="the_kl_loss_does_no_worse",
    sentence="The predictor's KL loss does no worse than its delta loss.",
    source="Pr2 (arXiv 2606.00395) App. G",
    predictions=(
        Prediction(
            "N = 8: the delta loss ends no higher",
            arm("grpo", "Pr2", 8, name="delta", changes=DELTA),
            arm("grpo", "Pr2", 8),
            FINAL_ACCURACY,
            "at_most",
            0.02,
        ),
        Prediction(
            "N = 8: the delta loss agrees no more",
            arm("grpo", "Pr2", 8, name="delta", changes=DELTA),
            arm("grpo", "Pr2", 8),
            AGREEMENT,
            "at_most",
            0.002,
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
)
