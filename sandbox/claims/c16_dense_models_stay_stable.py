"""Dense models stay stable where Mixtures of Experts collapse.

R3 has one mini-batch per global step there. GRPO is stable at N = 1 in `border`, so it is tried at N = 8, where GRPO
collapses. The dense twin keeps the engine's FP8 weights and activations and has no noisy router.
"""

from __future__ import annotations

from sandbox.claims.arms import arm, dense
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = Claim(
    number=16,
    name="dense_models_stay_stable",
    sentence="Dense models stay stable where Mixtures of Experts collapse.",
    source="R3 (arXiv 2510.11370) App. B",
    home="border",
    fresh_seeds=26,
    predictions=(
        Prediction(
            words="N = 8: fewer than a quarter of the dense twin's runs of GRPO collapse",
            treatment=dense("grpo", 8),
            control=0.25,
            measure=COLLAPSED,
            expected="less",
        ),
        Prediction(
            words="N = 8: the Mixture of Experts collapses more often, by a quarter of the runs",
            treatment=arm("grpo", n=8),
            control=dense("grpo", 8),
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
        ),
    ),
    regimes=(),
    remarks={
        "border": "The dense twin has no routers, so none of the noise on them: its KL before training is 40 times "
        "smaller. A Mixture of Experts with FP8 alone has twice the twin's, and does not collapse at N = 8, either "
        "(exploratory).",
    },
)
