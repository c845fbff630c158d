"""The weight of the engine gap hurts with one update per rollout and helps with four or more."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = BorderClaim(
    number=37,
    name="the_weight_changes_sign",
    sentence="Where the engine gap is large, the token weight hurts at N = 1 and helps from N = 4 on.",
    source="here; it would reconcile MiniRL (arXiv 2512.01374) sec. 4.3 with R3 (2510.11370) Table 1",
    exact=(
        Link("w1", "The claim says that the weight lowers reward at N = 1.", is_opposite=True),
        Link("w2", "And raises it at N = 4; without GRPO's clip here."),
    ),
    predictions=(
        Prediction(
            words="GRPO, N = 1: truncated importance sampling lowers accuracy by 0.05",
            treatment=at("r0.5", "tis", 1),
            control=at("r0.5", "none", 1),
            measure=AREA,
            expected="less",
            margin=0.05,
            planned=-0.15,
        ),
        *(
            Prediction(
                words=f"GRPO, N = {n}: truncated importance sampling raises accuracy by 0.05",
                treatment=at("r0.5", "tis", n),
                control=at("r0.5", "none", n),
                measure=AREA,
                expected="more",
                margin=0.05,
                planned=0.15,
            )
            for n in (4, 8, 16)
        ),
        Prediction(
            words="MiniRL, N = 8: its weight raises accuracy by 0.05",
            treatment=at("r0.5", "none", 8, "minirl"),
            control=at("r0.5", "none", 8, "minirl_no_is"),
            measure=AREA,
            expected="more",
            margin=0.05,
            planned=0.15,
        ),
    ),
    num_seeds=15,
    # MiniRL at N = 1 has no prediction: with an SD of 0.14 a hundred seeds would not decide it (docs/decisions/0008).
    also=(at("r0.5", "none", 1, "minirl"), at("r0.5", "none", 1, "minirl_no_is")),
    also_seeds=8,
)
