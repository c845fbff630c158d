"""Off-policy, leaving out clipping or routing replay makes training collapse early."""

from __future__ import annotations

from sandbox.claims.arms import COLLAPSES, arm, without_clipping
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import LASTING
from sandbox.ledger.exact import Link

CLAIM = Claim(
    number=5,
    name="off_policy_needs_clipping_and_replay",
    sentence="Off-policy, leaving out clipping or routing replay makes training collapse early.",
    source="MiniRL (arXiv 2512.01374) sec. 4.4, Fig. 2 to 4",
    home="border",
    fresh_seeds=36,
    exact=(
        Link("c3", "The claim's clipping, by bias alone."),
        Link("d3", "The claim says that training without R3 does worse.", is_opposite=True),
    ),
    predictions=tuple(
        Prediction(
            words=f"N = {n}: without {words} it collapses earlier",
            treatment=treatment,
            control=arm("minirl", replay, n),
            measure=LASTING,
            expected="less",
        )
        for n, replay in ((2, "R2"), (4, "R3"), (8, "R3"))
        for words, treatment in (
            ("clipping", without_clipping("minirl", replay, n)),
            ("replay", arm("minirl", "none", n)),
        )
    ),
    seeds_in=COLLAPSES,
    remarks={
        "hot": "Seeds 0 to 4 were seen before 14 were asked for. Tried: N = 2, 4 and 8 at a KL from 1.9e-3 to "
        "2.6e-2. Likely reason: within a step routers move by a KL of 1e-3 to 5e-3 here, too little for "
        "replay to matter; of trust regions only the one that N = 8 lacks is reached.",
    },
)
