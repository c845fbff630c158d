"""*Undecided*: the diagnosis of a trace that does not tell two causes apart.

On the models that set the thresholds (docs/doctor.md), a strongest cause below DECIDED was right in two of three
traces, above it in nine of ten; and where a logit is off by about a whole unit, a four-bit format looks like other
weights. Traces without both sides' experts are never undecided, as no strength was counted on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lab.doctor.causes import Cause
from lab.doctor.words import HARMLESS, Seen

DECIDED = 0.7
"""The least strength of a cause that is named alone, in [0, 1]."""
LEAST_WHOLE, MOST_WHOLE = 0.7, 1.2
"""Range of NVFP4's deviation of a logit, in logit units, on the models that set the thresholds."""
OTHER_WEIGHTS = ("stale", "wrong_weights")


def candidates(seen: Seen, strengths: Mapping[Cause, float]) -> list[Cause]:
    """The two causes that cannot be told apart, the strongest first; none where the strongest is clear."""
    if "flips_per_size" not in seen or seen["k3_kl"] < HARMLESS:
        return []
    first, second, *_ = strengths
    if first.name in OTHER_WEIGHTS and LEAST_WHOLE <= seen.get("size", 0.0) < MOST_WHOLE:
        return [first, next(cause for cause in strengths if cause.name == "precision")]
    return [first, second] if strengths[first] < DECIDED else []


CHECKS = {
    "routing": "Replay mu's experts in one scoring pass: if the gap shrinks, the routers cause it.",
    "precision": "Score the batch with bf16 weights in the engine: if the gap shrinks, the format causes it.",
    "stale": "Read the version of the engine's weights; dumps of several steps show it too (firstorder doctor FOLDER).",
    "wrong_weights": "Compare a checksum of each tensor on both sides after a weight transfer.",
    "switched": "Score the responses sampled without a weight push separately.",
}
"""A test of the cause, where one is shorter than its fix."""
TRY = " With the weights that old scored with, --model FOLDER tries whether the gap comes through the routers."
COARSE = (
    " Old or wrong weights and weights in formats coarser than FP8 with a scale per channel look alike at some sizes."
)


def between(first: Cause, second: Cause, is_tried: bool = False) -> Cause:
    """UNDECIDED with the words, the tests and the clues of these two causes; `is_tried`: replay was tried already."""
    told = f"One step's numbers do not tell {first.title} from {second.title}."
    if {first.name, second.name} & {*OTHER_WEIGHTS} and "precision" in (first.name, second.name):
        told += COARSE
    trials = " ".join(CHECKS.get(cause.name, cause.fix) for cause in (first, second))
    trials += "" if is_tried else TRY
    shows = tuple(dict.fromkeys((*first.shows, *second.shows)))
    return replace(UNDECIDED, words=lambda seen: told, fix=trials, shows=shows)


UNDECIDED = Cause(
    "undecided", "one of two causes that this step cannot tell apart", lambda seen: 0.0,
    lambda seen: "One step's numbers do not tell two causes apart.",
    "Diagnose one of these steps alone (firstorder doctor FILE): it names the two causes and a test of each.", (),
)  # fmt: skip
"""The diagnosis where there are two candidates; it has no rule."""
