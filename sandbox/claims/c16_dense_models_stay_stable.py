"""Dense models stay stable where Mixtures of Experts collapse."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm, dense
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import SURVIVAL

CLAIM = Claim(
    number=16,
    name="dense_models_stay_stable",
    sentence="Dense models stay stable where Mixtures of Experts collapse.",
    source="R3 (arXiv 2510.11370) App. B",
    predictions=(
        Prediction(
            "the dense twin of GRPO lasts to the last twentieth",
            dense("grpo"),
            0.95,
            SURVIVAL,
            "more",
            0.0,
        ),
        Prediction(
            "it lasts longer than the Mixture of Experts by a tenth of the run",
            dense("grpo"),
            arm("grpo"),
            SURVIVAL,
            "more",
            0.1,
        ),
    ),
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={
        "hot": "Some runs of seeds 0 to 4 were seen before 14 were asked for. Likely reason: the Mixture of "
        "Experts lasts on-policy here, too.",
    },
)
