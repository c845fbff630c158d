"""Faults that one step cannot show: weights that do not arrive, one faulty engine or place in the batch.

Each is a Cause as in causes.py, over its own clues; rules run in this order, and the first with a weight of at least
1/2 is the run's fault.
"""

from __future__ import annotations

from lab.doctor.causes import Cause
from lab.doctor.words import Seen, share
from lab.report.style import number

WHOLE = 0.7
"""Slope below which, by two standard errors, weights arrive only in part.

Rounding is a staircase: updates smaller than its steps reach the engine late, and leave a slope of 0.7 to 1.
"""
GROWN = 1.5
"""Smallest growth factor of the gap on the same draws that counts as growth."""


def _partly(seen: Seen) -> float:
    """Requires that most steps alone look like other weights: routers, truncation and a temperature lower the slope."""
    if "version_left" in seen:
        return 0.0
    is_less = seen.get("slope", 1.0) + 2 * seen.get("slope_error", 0.0) < WHOLE
    return float(is_less and _grown(seen) > GROWN and seen.get("other_weights", 0.0) > 0.5)


def _grown(seen: Seen) -> float:
    """The growth factor of the gap: on the same draws, or of the KL where it changes."""
    return max(seen.get("gap_grown", 0.0), seen.get("kl_grown", 0.0))


def _stopped_words(seen: Seen) -> str:
    return (
        f"On {seen['version_draws']:.0f} draws that steps share, log mu is closest to log old of step "
        f"{seen['stopped_since']:.0f}, however far old has moved since: {share(seen['version_left'])} of the gap "
        "remains. The engine has sampled from the weights of that step ever since."
    )


def _behind_words(seen: Seen) -> str:
    k = seen["steps_behind"]
    return (
        f"On {seen['version_draws']:.0f} draws that steps share, log mu of a step is closest to log old of {k:.0f} "
        f"step{'s' if k > 1 else ''} earlier: {share(seen['version_left'])} of the gap remains."
    )


def _partly_words(seen: Seen) -> str:
    return (
        f"On {seen['slope_draws']:.0f} draws that steps share, log mu moves by {seen['slope']:.2f} ± "
        f"{seen['slope_error']:.2f} where log old moves by 1, and the gap has grown at least "
        f"{number(min(_grown(seen), 1000))} times; no earlier version of the weights explains it: some tensors arrive, "
        "others do not."
    )


def _engine_words(seen: Seen) -> str:
    return (
        f"Engine (or rank) {seen['engine_group']:.0f} has {seen['engine_times']:.3g} times the KL of the others at "
        f"step after step (p = {seen['engine_p']:.1g})."
    )


def _slot_words(seen: Seen) -> str:
    return (
        f"Response {seen['slot_group']:.0f} of the batch has {seen['slot_times']:.3g} times the KL of the others at "
        f"step after step, whatever its prompt (p = {seen['slot_p']:.1g})."
    )


STEPS_CAUSES: tuple[Cause, ...] = (
    Cause(
        "stopped", "weights that no longer arrive", lambda seen: float("stopped_since" in seen), _stopped_words,
        "Check the weight transfer of that step: a swallowed error, an engine restarted from a checkpoint, adapters "
        "that are never merged. Push once by hand, score the same batch again, and check that the gap vanishes.",
    ),
    Cause(
        "behind", "weights that are some steps old", lambda seen: float("steps_behind" in seen), _behind_words,
        "If the lag is intended (asynchronous training), correct it by importance weights and log it; otherwise make "
        "sampling wait for the weight transfer.",
    ),
    Cause(
        "one_engine", "one faulty engine among several", lambda seen: float("engine_group" in seen), _engine_words,
        "Compare that engine's (or rank's) weights, version and device with another's; restart it or take it out.",
    ),
    Cause(
        "one_slot", "one faulty place in the batch", lambda seen: float("slot_group" in seen), _slot_words,
        "Check the engine at that place: a cached prefix of another request, padding, a block that is written twice. "
        "Sample the batch in another order and see whether the gap follows the place or the prompt.",
    ),
    Cause(
        "partly", "weights that arrive in part", _partly, _partly_words,
        "Compare the engine's tensors with the trainer's one by one after a weight transfer, and list those still "
        "equal to the first checkpoint's: a group is skipped by name, by sharding, or as frozen.",
    ),
)  # fmt: skip
"""Every fault over steps, in the order in which their rules run."""
