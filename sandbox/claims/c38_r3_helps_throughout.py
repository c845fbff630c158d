"""Where the engine gap is large, R3 helps GRPO with four or more updates per rollout and costs nothing with fewer."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

CLAIM = BorderClaim(
    number=38,
    name="r3_helps_throughout",
    sentence="Where the engine gap is large, R3 helps GRPO from N = 4 on and costs nothing at N = 1 and 2.",
    source="here; R3 (arXiv 2510.11370) sec. 5.2",
    exact=(Link("d3", "The claim says that R3 ends higher from N = 4 on.", is_opposite=True),),
    predictions=(
        *(
            Prediction(
                words=f"N = {n}: R3 costs at most 0.1",
                treatment=at("r0.5", "none", n),
                control=at("r0.5", "R3", n),
                measure=AREA,
                expected="at_most",
                margin=0.1,
            )
            for n in (1, 2)
        ),
        *(
            Prediction(
                words=f"N = {n}: R3 raises accuracy" + (f" by {margin}" if margin else ""),
                treatment=at("r0.5", "R3", n),
                control=at("r0.5", "none", n),
                measure=AREA,
                expected="more",
                margin=margin,
                planned=planned,
            )
            # The sign alone at N = 16, where R3 was at 0.14 on exploratory seeds (docs/decisions/0008).
            for n, margin, planned in ((4, 0.05, 0.15), (8, 0.05, 0.15), (16, 0.0, 0.1))
        ),
    ),
    num_seeds=15,
)
