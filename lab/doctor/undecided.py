"""*Undecided*: the diagnosis of a trace that does not tell two causes, or more, apart.

On the models that set the thresholds (docs/doctor.md), a strongest cause below DECIDED was right in two of three
traces, above it in nine of ten; and where a logit is off by about a whole unit, a four-bit format looks like other
weights. Without both sides' experts routers look like rounding or like other weights, unless they err by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lab.doctor.causes import UNKNOWN, Cause
from lab.doctor.words import HARMLESS, Seen

DECIDED = 0.7
"""The least strength of a cause that is named alone, in [0, 1]."""
NAMED = 0.25
"""A second cause of at least this strength is named beside the first."""
LEAST_WHOLE, MOST_WHOLE = 0.7, 1.2
"""Range of NVFP4's deviation of a logit, in logit units, on the models that set the thresholds."""
OTHER_WEIGHTS = ("stale", "wrong_weights")
LIKE_ROUTERS = (*OTHER_WEIGHTS, "precision", "unknown")
"""The causes that routers look like where the experts of one side or both are missing."""


def lacks_routes(seen: Seen) -> bool:
    """Whether routers can be neither seen nor ruled out: no row has both sides' experts, and it may be an MoE."""
    return "router_disagreement" not in seen and not seen.get("is_dense")


def candidates(seen: Seen, strengths: Mapping[Cause, float]) -> list[Cause]:
    """The causes that cannot be told apart, the strongest first; none where the strongest is clear."""
    # Without a k3 some log-probability is not finite, which is the cause.
    if seen.get("k3_kl", 0.0) < HARMLESS:
        return []
    # A sure fault that explains no gap is named beside the candidates.
    first, second, *_ = (cause for cause in strengths if cause.explains or strengths[cause] < DECIDED)
    if lacks_routes(seen):
        return _or_routers(seen, strengths)
    if "flips_per_size" not in seen:
        return []
    if first.name in OTHER_WEIGHTS and LEAST_WHOLE <= seen.get("size", 0.0) < MOST_WHOLE:
        return [first, _named("precision", strengths)]
    return [first, second] if strengths[first] < DECIDED else []


def _or_routers(seen: Seen, strengths: Mapping[Cause, float]) -> list[Cause]:
    """Routers and the strongest causes that they look like; none where another cause, or routers, are clear."""
    first, routing = next(cause for cause in strengths if cause.explains), _named("routing", strengths)
    is_open = first.name in ("routing", "switched") and strengths[first] < DECIDED
    if first.name not in LIKE_ROUTERS and not is_open:
        return []
    like = [cause for cause in strengths if cause.name in LIKE_ROUTERS and cause.name != "unknown"]
    found = {first, routing, like[0], *(cause for cause in like if strengths[cause] >= NAMED)} - {UNKNOWN}
    if first.name in OTHER_WEIGHTS and LEAST_WHOLE <= seen.get("size", 0.0) < MOST_WHOLE:
        found.add(_named("precision", strengths))
    # Routers last among equals: without a clue they have no strength.
    return sorted(found, key=lambda cause: (-strengths[cause], cause is routing))


def _named(name: str, causes: Mapping[Cause, float]) -> Cause:
    return next(cause for cause in causes if cause.name == name)


MODEL = "--model FOLDER"
STEPS = "; dumps of several steps show it too (firstorder doctor FOLDER)"
CHECKS = {
    "routing": "Replay mu's experts in one scoring pass: if the gap shrinks, the routers cause it.",
    "precision": "Score the batch with bf16 weights in the engine: if the gap shrinks, the format causes it.",
    "stale": f"Read the version of the engine's weights{STEPS}.",
    "wrong_weights": "Compare a checksum of each tensor on both sides after a weight transfer.",
    "switched": "Score the responses sampled without a weight push separately.",
}
"""A test of the cause, where one is shorter than its fix."""
TRY = f" With the weights that old scored with, {MODEL} tries whether the gap comes through the routers."
ROUTES_FIRST = (
    f"{CHECKS['routing']} {MODEL} does so where the dump has mu's experts and FOLDER old's weights. Or dump the "
    "experts of both sides (columns experts_mu and experts_old). If the model is dense, --model with its folder rules "
    "routers out."
)
"""The test of routers without the experts of both sides."""
COARSE = (
    " Old or wrong weights and weights in formats coarser than FP8 with a scale per channel look alike at some sizes."
)


def either(causes: Sequence[Cause]) -> str:
    """The causes as one clause: A or B; A, B or C."""
    *others, last = (cause.title for cause in causes)
    return f"{', '.join(others)} or {last}" if others else last


def between(causes: Sequence[Cause], seen: Seen) -> Cause:
    """UNDECIDED with the words, the tests and the clues of these causes; replay may have been tried already."""
    names = {cause.name for cause in causes}
    *others, last = (cause.title for cause in causes)
    if lacks_routes(seen):
        told = f"Without the experts of both sides these numbers do not tell {', '.join(others)} and {last} apart."
    else:
        told = f"These numbers do not tell {', '.join(others)} from {last}."
    if names & {*OTHER_WEIGHTS} and "precision" in names:
        told += COARSE
    # Routers come last among the candidates, but their test decides first.
    is_bare = lacks_routes(seen)
    checks = [CHECKS.get(cause.name, cause.fix) for cause in causes if not (is_bare and cause.name == "routing")]
    trials = [ROUTES_FIRST, *checks] if is_bare else checks
    fix = " ".join(trials) + ("" if is_bare or "replay_removes" in seen else TRY)
    shows = tuple(dict.fromkeys(name for cause in causes for name in cause.shows))
    return replace(UNDECIDED, words=lambda seen: told, fix=fix, shows=shows)


def of_run(cause: Cause) -> Cause:
    """The cause with tests that suit a run's folder: `--model` with experts takes the file of one step alone."""
    return replace(cause, fix=cause.fix.replace(MODEL, f"firstorder doctor FILE {MODEL}").replace(STEPS, ""))


UNDECIDED = Cause(
    "undecided", "one of several causes that these numbers do not tell apart",
    rule=lambda seen: 0.0, words=lambda seen: "", fix="",
)  # fmt: skip
"""The diagnosis where there are candidates: no rule names it, and `between` gives it its words."""
