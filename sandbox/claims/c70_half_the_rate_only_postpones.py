"""Does half the learning rate prevent a collapse, or only postpone it? Ten times the study's updates."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, longer, slower
from sandbox.ledger.claim import Arm, Prediction
from sandbox.ledger.course import COLLAPSED

UPDATES = 4000


def _long(gap: str, remedy: str) -> Arm:
    return longer(slower(at(gap, remedy, 8)), UPDATES)


NONE, R3, TIS, EXACT = _long("r0.5", "none"), _long("r0.5", "R3"), _long("r0.5", "tis"), _long("exact", "none")

CLAIM = BorderClaim(
    number=70,
    name="half_the_rate_only_postpones",
    sentence="At half the learning rate, N = 8 and a large engine gap, GRPO without a remedy collapses within 4,000 "
    "updates more often than with an exact engine, than with R3 and than with Token-TIS.",
    source="here, after claim 45",
    predictions=tuple(
        Prediction(
            words=f"half the rate, 4,000 updates: fewer runs collapse {words} than without a remedy",
            treatment=treatment,
            control=NONE,
            measure=COLLAPSED,
            expected="less",
            planned=-0.85,
        )
        for words, treatment in (("with an exact engine", EXACT), ("with R3", R3), ("with Token-TIS", TIS))
    ),
    first_seed=606,
    # A power of 91% at Holm's first step. A run takes ten times as long as the study's others.
    num_seeds=12,
)
