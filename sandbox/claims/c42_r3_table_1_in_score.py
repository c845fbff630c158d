"""R3's Table 1 in score, off-policy: GRPO below TIS, TIS below R3, TIS adds nothing to R3, GSPO below R3.

At N = 8 the table has GRPO, GSPO and R3; its rows with TIS are of N = 1, and App. E has TIS below R3 at N = 4. So
that TIS adds nothing to R3 off-policy is carried over from N = 1.

Claim 12 (GRPO collapses, with TIS later or not, with R3 not; TIS adds nothing to R3) was the same table by survival, in
regimes where GRPO does not collapse. Its runs are in cells.jsonl; this claim replaces it.
"""

from __future__ import annotations

from sandbox.claims.border_arms import DEMO, BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA, COLLAPSED

CLAIM = BorderClaim(
    number=42,
    name="r3_table_1_in_score",
    sentence="Off-policy, in score: GRPO < TIS < R3; TIS adds nothing to R3; R3 is above GSPO.",
    source="R3 (arXiv 2510.11370) Table 1 (TIS there: N = 1), App. E (TIS: N = 4)",
    predictions=(
        Prediction(
            words="N = 8: GRPO collapses more often than GRPO + R3, by more than half of the runs",
            treatment=at("r0.5", "none", 8),
            control=at("r0.5", "R3", 8),
            measure=COLLAPSED,
            expected="more",
            margin=0.5,
        ),
        Prediction(
            words="N = 8: GRPO + R3 is above GRPO + TIS by 0.02",
            treatment=at("r0.5", "R3", 8),
            control=at("r0.5", "tis", 8),
            measure=AREA,
            expected="more",
            margin=0.02,
        ),
        Prediction(
            words="N = 8: TIS adds at most 0.02 to R3",
            treatment=at("r0.5", "tis-R3", 8),
            control=at("r0.5", "R3", 8),
            measure=AREA,
            expected="at_most",
            margin=0.02,
        ),
        Prediction(
            words="N = 8: GRPO + R3 is above GSPO",
            treatment=at("r0.5", "R3", 8),
            control=at("r0.5", "none", 8, "gspo"),
            measure=AREA,
            expected="more",
        ),
    ),
    # The predictions with a margin of 0.02 have little power; they stay, since the claim is R3's table (decision 8).
    num_seeds=20,
    also=(*DEMO.values(), at("r0.5", "R3", 8, "gspo")),
)
