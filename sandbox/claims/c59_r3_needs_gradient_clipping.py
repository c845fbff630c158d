"""The finding of claim 58 on fresh seeds: R3 stands at the border by gradient clipping, the weight needs it less."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, with_free_norm
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = BorderClaim(
    number=59,
    name="r3_needs_gradient_clipping",
    sentence="At N = 8 and a large engine gap R3 collapses more often where gradients are never clipped, and then more "
    "often than Token-TIS.",
    source="here, after claim 58's runs",
    predictions=tuple(
        Prediction(words, with_free_norm(at("r0.5", "R3", 8)), control, COLLAPSED, "more", planned=planned)
        for words, control, planned in (
            ("R3: more runs collapse without clipping than with it", at("r0.5", "R3", 8), 0.6),
            ("gradients never clipped: more runs collapse with R3 than with Token-TIS",
             with_free_norm(at("r0.5", "tis", 8)), 0.55),
        )
    ),
    first_seed=300,
    # 94% power at shares of 0.75 and 0.2, those of claim 58.
    num_seeds=28,
)  # fmt: skip
