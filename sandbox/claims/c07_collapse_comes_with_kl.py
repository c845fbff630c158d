"""A collapse comes with a sharp rise of the training-inference KL."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, SEEDS_OF_SMALL_SPREAD, arm, without_clipping
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import KL_RISE

CLAIM = Claim(
    number=7,
    name="collapse_comes_with_kl",
    sentence="A collapse comes with a sharp rise of the training-inference KL.",
    source="MiniRL (arXiv 2512.01374) sec. 4.2 to 4.4; R3 (arXiv 2510.11370) sec. 5.2, Fig. 5",
    home="border",
    fresh_seeds=37,
    predictions=(
        Prediction(
            words="without clipping at N = 8, the largest KL of a window is more than 3 times the early one",
            treatment=without_clipping("minirl", "none", 8),
            control=1.0,
            measure=KL_RISE,
            expected="more",
            margin=3.0,
            scale="ratio",
            premise=without_clipping("minirl", "none", 8),
        ),
        Prediction(
            words="it rises more than with clipping, by half at least",
            treatment=without_clipping("minirl", "none", 8),
            control=arm("minirl", "none", 8),
            measure=KL_RISE,
            expected="more",
            margin=1.5,
            scale="ratio",
            premise=without_clipping("minirl", "none", 8),
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
    regimes=AND_NOISY,
    remarks={
        "hot": "Seeds 0 to 13 were made for claim 5. Likely reason: updates that go too far break the policy "
        "within a few steps, at an engine gap that is hardly another; the papers' models degenerate over "
        "hundreds of steps.",
        "border": "Of the 37 runs without clipping 20 have collapsed within the first tenth already, with which the "
        "rise compares.",
    },
)
