"""The traces of which one step does not tell one cause from another, as a diagnosis of its own.

A strongest cause below DECIDED was right in two of three traces of the models of the thresholds (docs/doctor.md), those
above in nine of ten; and where a logit is off by about a whole unit, a format of four bits looks like other weights.
Traces without both sides' experts are left out, as no strength was counted on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.doctor.causes import Cause
from lab.doctor.words import HARMLESS, Seen

DECIDED = 0.7
"""The least strength of a cause that is named alone, in [0, 1]."""
LEAST_WHOLE, MOST_WHOLE = 0.7, 1.2
"""Deviations of a logit, in logit units, from the first up to the second: NVFP4's on the models of the thresholds."""
OTHER_WEIGHTS = ("stale", "wrong_weights")


def candidates(seen: Seen, strengths: Mapping[Cause, float]) -> list[Cause]:
    """The two causes that are not told apart, the strongest first; none where the strongest stands alone."""
    if "flips_per_size" not in seen or seen["k3_kl"] < HARMLESS:
        return []
    first, second, *_ = strengths
    if first.name in OTHER_WEIGHTS and LEAST_WHOLE <= seen.get("size", 0.0) < MOST_WHOLE:
        return [first, next(cause for cause in strengths if cause.name == "precision")]
    return [first, second] if strengths[first] < DECIDED else []


def _words(seen: Seen) -> str:
    return (
        f"A logit is off by {seen['size']:.2g} as a rule. One step's numbers do not tell the two apart: so old weights "
        "and weights in a format coarser than FP8 with a scale per channel (UE8M0 scales, MXFP8, NVFP4, INT4) leave "
        "the same traces at some sizes."
    )


UNDECIDED = Cause(
    "undecided", "one of two causes that this step does not tell apart", lambda seen: 0.0, _words,
    "Read the version of its weights off the engine, and score the batch with bf16 weights: a gap that falls is the "
    "format's. Dumps of some steps tell it, too (firstorder doctor FOLDER): old weights are those of an earlier step.",
    ("size", "sure_ratio", "kl_per_flip", "flips_per_size", "noise_share", "jump"),
)  # fmt: skip
"""The diagnosis where there are candidates; it has no rule of its own."""
