"""Pr2 clips fewer tokens than R2, and R2 fewer than GRPO."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import CLIP_FRACTION

CLAIM = Claim(
    number=21,
    name="pr2_clips_less",
    sentence="Pr2 clips fewer tokens than R2, and R2 fewer than GRPO.",
    source="Pr2 (arXiv 2606.00395) sec. 5.3, Fig. 3",
    home="paper",
    fresh_seeds=30,
    predictions=(
        Prediction(
            words="N = 8: the clip fraction is lower under Pr2 than under R2, by a tenth",
            treatment=arm("grpo", "Pr2", 8),
            control=arm("grpo", "R2", 8),
            measure=CLIP_FRACTION,
            expected="less",
            # Of the size that 40 seeds can detect, here and below (docs/decisions/0007).
            margin=1.1,
            scale="ratio",
        ),
        Prediction(
            words="N = 8: the clip fraction is lower under R2 than in GRPO, by a tenth",
            treatment=arm("grpo", "R2", 8),
            control=arm("grpo", "none", 8),
            measure=CLIP_FRACTION,
            expected="less",
            margin=1.1,
            scale="ratio",
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
)
