"""The engine gap itself does harm: with an exact engine the same recipe lasts longer and ends higher."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, SURVIVAL

EXACT = arm("minirl", name="exact", changes=(("engine.defects", "[]"),))

CLAIM = Claim(
    number=35,
    name="the_gap_itself_does_harm",
    sentence="The engine gap itself does harm: with an exact engine the same recipe lasts longer and ends higher.",
    source="here; the premise of MiniRL (arXiv 2512.01374) sec. 3.1 and R3 (arXiv 2510.11370) sec. 3",
    predictions=(
        Prediction(
            "with an exact engine, on-policy, it lasts longer by a tenth of the run",
            EXACT,
            arm("minirl"),
            SURVIVAL,
            "more",
            0.1,
        ),
        Prediction(
            "it ends with higher accuracy",
            EXACT,
            arm("minirl"),
            FINAL_ACCURACY,
            "more",
            0.02,
        ),
    ),
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={"noisy": "The 14 runs of minirl-N1 had been seen."},
)
