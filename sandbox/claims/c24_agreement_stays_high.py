"""Under Pr2 cached and live routes agree over all mini-steps."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import AGREEMENT

CLAIM = Claim(
    number=24,
    name="agreement_stays_high",
    sentence="Under Pr2 top-k agreement stays high over mini-steps and layers.",
    source="Pr2 (arXiv 2606.00395) App. G, Fig. 6",
    home="paper",
    fresh_seeds=22,
    predictions=(
        Prediction(
            words="N = 8: the mean top-k agreement of all mini-steps and layers is above 0.9",
            treatment=arm("grpo", "Pr2", 8),
            control=0.9,
            measure=AGREEMENT,
            expected="more",
        ),
    ),
    shown=("routing/topk_agreement", "routing/zero_deviation"),
    remarks=dict.fromkeys(
        ("paper", "stress", "hot"),
        "A low bar: GRPO at N = 8 without replay agrees as much (claim 22); the paper has 98% in most layers.",
    ),
)
