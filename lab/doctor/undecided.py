"""The band in which one step does not tell other weights from a coarse format, as a diagnosis of its own.

Old weights move logits as UE8M0 or MXFP8 rounding does where both rules weigh, and wrong ones as NVFP4 does where a
logit is off by about a whole unit. The band is from the models of the thresholds (docs/doctor.md); traces without both
sides' experts are outside it, as its rules need them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.doctor.causes import Cause
from lab.doctor.words import HARMLESS, Seen

NEAR = 0.25
"""Old weights and precision are both of at least this strength, and one of them is the strongest."""
LEAST_WHOLE, MOST_WHOLE = 0.7, 1.2
"""Deviations of a logit, in logit units, from the first up to the second: NVFP4's on the models of the thresholds."""
OTHER_WEIGHTS = ("stale", "wrong_weights")


def candidates(seen: Seen, strengths: Mapping[Cause, float]) -> list[Cause]:
    """The causes that are not told apart, the strongest first; none where the strongest stands alone."""
    if "flips_per_size" not in seen or seen["k3_kl"] < HARMLESS:
        return []
    of = {cause.name: cause for cause in strengths}
    first = next(iter(strengths))
    old, coarse = of["stale"], of["precision"]
    if first in (old, coarse) and min(strengths[old], strengths[coarse]) >= NEAR:
        return [first, coarse if first is old else old]
    is_whole = LEAST_WHOLE <= seen.get("size", 0.0) < MOST_WHOLE
    return [first, coarse] if first.name in OTHER_WEIGHTS and is_whole else []


def _words(seen: Seen) -> str:
    return (
        f"A logit is off by {seen['size']:.2g} as a rule. At this size other weights, and the same weights in a format "
        "coarser than FP8 with a scale per channel (UE8M0 scales, MXFP8, NVFP4, INT4), leave the same traces."
    )


UNDECIDED = Cause(
    "undecided", "other weights or a coarse format, which one step does not tell apart", lambda seen: 0.0, _words,
    "Read the version of its weights off the engine, or score the batch with bf16 weights: a gap that falls is the "
    "format's. Dumps of some steps tell it, too (firstorder doctor FOLDER): old weights are those of an earlier step.",
    ("size", "sure_ratio", "kl_per_flip", "flips_per_size", "noise_share"),
)  # fmt: skip
"""The diagnosis where there are candidates; it has no rule of its own."""
