"""The border of stability over engine gap and off-policiness, and how replay, clipping and the weight move it.

The regimes are the steps of the engine gap. No paper has this map; its runs are also those of the phase diagrams.
"""

from __future__ import annotations

from sandbox.claims.arms import COLLAPSES, arm, without_clipping
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import LASTING
from sandbox.ledger.exact import Link

CLAIM = Claim(
    number=34,
    name="the_border_of_stability",
    sentence="Off-policiness brings training closer to failure, and clipping, the weight and replay each move it away.",
    source="here; the recipe of MiniRL (arXiv 2512.01374) sec. 4.4",
    home="border",
    fresh_seeds=36,
    exact=(
        Link("c2", "Off-policiness, by bias alone."),
        Link("c3", "Clipping."),
        Link("w3", "The weight, at N = 16."),
        Link("d3", "Replay: the claim says that R3 does better.", is_opposite=True),
    ),
    predictions=(
        Prediction(
            words="without clipping, N = 8 lasts shorter than N = 1",
            treatment=without_clipping("minirl", "none", 8),
            control=without_clipping("minirl", "none", 1),
            measure=LASTING,
            expected="less",
        ),
        Prediction(
            words="N = 8, no replay: without clipping it lasts shorter",
            treatment=without_clipping("minirl", "none", 8),
            control=arm("minirl", "none", 8),
            measure=LASTING,
            expected="less",
        ),
        Prediction(
            words="N = 8, no replay: without the weight it lasts shorter",
            treatment=arm("minirl_no_is", "none", 8),
            control=arm("minirl", "none", 8),
            measure=LASTING,
            expected="less",
        ),
        *(
            Prediction(
                words=f"N = 8, without clipping: {mode} lasts longer than no replay",
                treatment=without_clipping("minirl", mode, 8),
                control=without_clipping("minirl", "none", 8),
                measure=LASTING,
                expected="more",
            )
            for mode in ("R2", "R3", "Pr2", "Pr3")
        ),
    ),
    shown=(),
    also=tuple(
        build(preset, mode, n)
        # With one mini-batch R2 and Pr2 replay pi's own routes, and Pr3 is R3.
        for n, modes in ((1, ("none", "R3")), *((n, ("none", "R2", "R3", "Pr2", "Pr3")) for n in (2, 4, 8)))
        for mode in modes
        for build, preset in ((arm, "minirl"), (without_clipping, "minirl"), (arm, "minirl_no_is"))
    ),
    seeds_in=COLLAPSES,
    remarks={"hot": "Some runs of seeds 0 to 4 were seen before 14 were asked for."},
)
