"""A frozen router does not prevent the collapse."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import SURVIVAL

FROZEN = (("algorithm.freeze_router", "true"),)

CLAIM = Claim(
    number=14,
    name="a_frozen_router_does_not_help",
    sentence="A frozen router does not prevent the collapse.",
    source="R3 (arXiv 2510.11370) App. C",
    predictions=(
        Prediction(
            "GRPO with a frozen router lasts no longer than GRPO",
            arm("grpo", name="frozen", changes=FROZEN),
            arm("grpo"),
            SURVIVAL,
            "at_most",
            0.05,
            premise=arm("grpo"),
        ),
        Prediction(
            "it collapses earlier than GRPO + R3 by a tenth of the run",
            arm("grpo", name="frozen", changes=FROZEN),
            arm("grpo", "R3"),
            SURVIVAL,
            "less",
            0.1,
            premise=arm("grpo"),
        ),
    ),
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={
        "hot": "Some runs of seeds 0 to 4 were seen before 14 were asked for. Likely reason: GRPO itself lasts "
        "on-policy here, so there is no collapse that R3 could prevent and a frozen router not.",
    },
)
