"""The finding of claim 58 on fresh seeds: R3 stands at the border by gradient clipping, the weight needs it less."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, most_collapse, with_free_norm
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = BorderClaim(
    number=59,
    name="r3_needs_gradient_clipping",
    sentence="At N = 8 and a large engine gap R3 stands only while gradients are clipped; Token-TIS needs it less.",
    source="here, after claim 58's runs",
    predictions=(
        most_collapse("R3, gradients never clipped", with_free_norm(at("r0.5", "R3", 8)), planned=0.35),
        Prediction(
            words="R3, gradients clipped: fewer than half of the runs collapse",
            treatment=at("r0.5", "R3", 8),
            control=0.5,
            measure=COLLAPSED,
            expected="less",
            planned=-0.43,
        ),
        Prediction(
            words="gradients never clipped: more runs collapse with R3 than with Token-TIS",
            treatment=with_free_norm(at("r0.5", "R3", 8)),
            control=with_free_norm(at("r0.5", "tis", 8)),
            measure=COLLAPSED,
            expected="more",
            planned=0.5,
        ),
    ),
    first_seed=300,
    num_seeds=36,
)
