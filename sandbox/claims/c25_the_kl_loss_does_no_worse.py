"""The predictor's KL loss does no worse than its delta loss."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.measures import AGREEMENT

DELTA = (("algorithm.replay.predictor.loss", "delta"),)

CLAIM = Claim(
    number=25,
    name="the_kl_loss_does_no_worse",
    sentence="The predictor's KL loss does no worse than its delta loss.",
    source="Pr2 (arXiv 2606.00395) App. G, Fig. 5a (off-2 there, N = 8 here)",
    home="paper",
    fresh_seeds=38,
    predictions=(
        Prediction(
            words="N = 8: the delta loss ends no higher",
            treatment=arm("grpo", "Pr2", 8, name="delta", changes=DELTA),
            control=arm("grpo", "Pr2", 8),
            measure=AREA,
            expected="at_most",
            margin=0.02,
        ),
        Prediction(
            words="N = 8: the delta loss agrees no more",
            treatment=arm("grpo", "Pr2", 8, name="delta", changes=DELTA),
            control=arm("grpo", "Pr2", 8),
            measure=AGREEMENT,
            expected="at_most",
            margin=0.002,
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
)
