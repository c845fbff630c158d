"""Partial rollouts age the tokens of an exact engine's batch: does the age alone end training, and what prevents it?

A first look at one to three seeds below 104 (docs/how-to/study-partial-rollouts.md) led to this claim: with 128 extra
prompts 3 of 3 runs collapsed, 0 of 2 with Token-TIS. R3 had no run there, and a dropped tail (64 extra prompts) one.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox.claims.border_arms import BorderClaim, at, most_collapse
from sandbox.ledger.claim import Arm, Prediction
from sandbox.ledger.course import AREA, COLLAPSED


def oversampled(arm: Arm, unfinished: str) -> Arm:
    """The arm with three times the prompts in progress, the tail kept (up to 4 versions old) or dropped."""
    block = f"{{extra_prompts: 128, unfinished: {unfinished}, max_staleness: 4}}"
    return replace(arm, name=f"{arm.name}-{unfinished}", changes=(*arm.changes, ("algorithm.oversampling", block)))


NONE, TIS, R3 = (oversampled(at("exact", remedy, 8), "keep") for remedy in ("none", "tis", "R3"))
DROP = oversampled(at("exact", "none", 8), "drop")

CLAIM = BorderClaim(
    number=50,
    name="partial_rollouts_do_harm_too",
    sentence=(
        "At N = 8 an exact engine that keeps partial rollouts (64 prompts per step, 128 more in progress) ends GRPO's "
        "training, R3 does not prevent it, Token-TIS raises accuracy, and training goes on where the tail is dropped."
    ),
    source="here; partial rollouts as in AReaL (arXiv 2505.24298) sec. 4",
    predictions=(
        most_collapse("partial rollouts, no remedy", NONE, planned=0.49),
        most_collapse("partial rollouts, R3", R3, planned=0.49),
        Prediction(
            words="partial rollouts: truncated importance sampling raises accuracy by 0.02",
            treatment=TIS,
            control=NONE,
            measure=AREA,
            expected="more",
            margin=0.02,
            planned=0.2,
        ),
        Prediction(
            words="the tail dropped, no remedy: fewer than half of the runs collapse",
            treatment=DROP,
            control=0.5,
            measure=COLLAPSED,
            expected="less",
            planned=-0.49,
        ),
    ),
    num_seeds=16,
)
