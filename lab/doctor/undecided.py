"""The traces of which one step does not tell one cause from another, as a diagnosis of its own.

A strongest cause below DECIDED was right in two of three traces of the models of the thresholds (docs/doctor.md), those
above in nine of ten; and where a logit is off by about a whole unit, a format of four bits looks like other weights.
Traces without both sides' experts are left out, as no strength was counted on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


CHECKS = {
    "routing": "Replay mu's experts in one scoring pass: a gap that falls is the routers'.",
    "precision": "Score the batch with bf16 weights in the engine: a gap that falls is the format's.",
    "stale": "Read the version of its weights off the engine; dumps of several steps show it, too (firstorder doctor).",
    "wrong_weights": "Compare a checksum of each tensor on both sides after a hand-over.",
    "switched": "Score apart the responses during which no weights were pushed.",
}
"""The trial that shows whether it is this cause, of causes that have one shorter than their fix."""
COARSE = (
    " Old or wrong weights, and weights in formats coarser than FP8 with a scale per channel, look alike at some sizes."
)


def between(first: Cause, second: Cause) -> Cause:
    """UNDECIDED with the words, the trials and the clues of these two causes."""
    told = f"One step's numbers do not tell {first.title} from {second.title}."
    if {first.name, second.name} & {*OTHER_WEIGHTS} and "precision" in (first.name, second.name):
        told += COARSE
    trials = " ".join(CHECKS.get(cause.name, cause.fix) for cause in (first, second))
    shows = tuple(dict.fromkeys((*first.shows, *second.shows)))
    return replace(UNDECIDED, words=lambda seen: told, fix=trials, shows=shows)


UNDECIDED = Cause(
    "undecided", "one of two causes that this step does not tell apart", lambda seen: 0.0,
    lambda seen: "One step's numbers do not tell two causes apart.",
    "Diagnose one of these steps alone (firstorder doctor FILE): it names the two causes and a trial of each.", (),
)  # fmt: skip
"""The diagnosis where there are candidates; it has no rule of its own."""
