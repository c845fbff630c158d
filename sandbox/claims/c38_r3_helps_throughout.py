"""Where the engine gap is large, R3 helps GRPO whatever N is."""

from __future__ import annotations

from sandbox.claims.border_arms import FIRST_SEED, at
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

CLAIM = Claim(
    number=38,
    name="r3_helps_throughout",
    sentence="Where the engine gap is large, R3 helps GRPO off-policy and costs nothing on-policy.",
    source="here; R3 (arXiv 2510.11370) sec. 5.2",
    home="border",
    predictions=(
        Prediction(
            words="N = 1: R3 costs at most 0.02",
            treatment=at("r0.5", "none", 1),
            control=at("r0.5", "R3", 1),
            measure=AREA,
            expected="at_most",
            margin=0.02,
        ),
        *(
            Prediction(
                words=f"N = {n}: R3 raises accuracy by {margin}",
                treatment=at("r0.5", "R3", n),
                control=at("r0.5", "none", n),
                measure=AREA,
                expected="more",
                margin=margin,
            )
            for n, margin in ((2, 0.02), (4, 0.02), (8, 0.05), (16, 0.05))
        ),
    ),
    num_seeds=8,
    first_seed=FIRST_SEED,
    regimes=("border",),
    shown=("eval/accuracy", "rollout_corr/k3_kl", "actor/entropy"),
)
