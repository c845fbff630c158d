"""The engine gap itself does harm: with an exact engine the same recipe lasts longer and ends higher."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA, COLLAPSED
from sandbox.ledger.exact import Link

EXACT = arm("minirl", name="exact", changes=(("engine.defects", "[]"),))

CLAIM = Claim(
    number=35,
    name="the_gap_itself_does_harm",
    sentence="The engine gap itself does harm: with an exact engine the same recipe lasts longer and ends higher.",
    source="here; the premise of MiniRL (arXiv 2512.01374) sec. 3.1 and R3 (arXiv 2510.11370) sec. 3",
    home="border",
    fresh_seeds=36,
    exact=(
        Link("b1", "The claim's recipe has the token weight; the sequence weight's run is that of an exact engine."),
    ),
    predictions=(
        Prediction(
            words="on-policy, it collapses more often than with an exact engine, by a quarter of the runs",
            treatment=arm("minirl"),
            control=EXACT,
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
        ),
        Prediction(
            words="with an exact engine accuracy is higher",
            treatment=EXACT,
            control=arm("minirl"),
            measure=AREA,
            expected="more",
        ),
    ),
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={"noisy": "The 14 runs of minirl-N1 had been seen."},
)
