"""A control: the outcomes at the border are those of the engine gap, not of clipped gradients.

The threshold binds in most updates without a remedy and seldom under R3 or the weight, so the study's arms differ in
clipping, too (docs/border.md).
"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, most_collapse, with_free_norm
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = BorderClaim(
    number=58,
    name="gradient_clipping_decides_nothing",
    sentence="Without gradient clipping GRPO at N = 8 and a large engine gap ends as with it: it collapses without a "
    "remedy and with R2, and stands with R3 and with Token-TIS.",
    source="here",
    predictions=(
        *(
            most_collapse(f"{words}, gradients never clipped", with_free_norm(at("r0.5", remedy, 8)), planned=planned)
            for words, remedy, planned in (("no remedy", "none", 0.45), ("R2", "R2", 0.5))
        ),
        *(
            Prediction(
                words=f"{words}, gradients never clipped: fewer than half of the runs collapse",
                treatment=with_free_norm(at("r0.5", remedy, 8)),
                control=0.5,
                measure=COLLAPSED,
                expected="less",
                planned=planned,
            )
            for words, remedy, planned in (("R3", "R3", -0.43), ("Token-TIS", "tis", -0.46))
        ),
    ),
    # 80% power for the least certain prediction (R3, of which 7% collapsed with clipping) needs 19.
    num_seeds=20,
    # Whether training needs clipping even without a gap.
    also=(with_free_norm(at("exact", "none", 8)),),
)
