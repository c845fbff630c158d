"""Faults that one step cannot show: weights that do not arrive, one engine or place in the batch that is off.

Each is a Cause as causes.py has them, over clues of its own; the rules are asked in this order, and the first that
weighs 1/2 or more is the run's.
"""

from __future__ import annotations

from lab.doctor.causes import Cause
from lab.doctor.words import Seen, share
from lab.report.style import number

WHOLE = 0.7
"""A slope below this by two standard errors is of weights that do not arrive whole.

Rounding is a staircase: updates that are small against its steps reach the engine late, and leave a slope of 0.7 to 1.
"""
GROWN = 1.5
"""The least growth of the gap on the same draws that counts, a factor."""


def _stopped(seen: Seen) -> float:
    return float("stopped_since" in seen)


def _behind(seen: Seen) -> float:
    return float("steps_behind" in seen)


def _partly(seen: Seen) -> float:
    """Of other weights by the steps' own clues, too: a cut or a temperature leaves the slope below 1 as well."""
    if "version_left" in seen:
        return 0.0
    is_less = seen.get("slope", 1.0) + 2 * seen.get("slope_error", 0.0) < WHOLE
    return float(is_less and _grown(seen) > GROWN) * seen.get("other_weights", 0.0)


def _grown(seen: Seen) -> float:
    """The growth factor of the gap: on the same draws, or the KL by steps where it changes."""
    return max(seen.get("gap_grown", 0.0), seen.get("kl_grown", 0.0))


def _stopped_words(seen: Seen) -> str:
    return (
        f"On {seen['version_draws']:.0f} draws that steps share, log mu is closest to log old of step "
        f"{seen['stopped_since']:.0f}, however far old has moved since: {share(seen['version_left'])} of the gap is "
        "left. The engine has sampled from the weights of that step ever since."
    )


def _behind_words(seen: Seen) -> str:
    k = seen["steps_behind"]
    return (
        f"On {seen['version_draws']:.0f} draws that steps share, log mu of a step is closest to log old of {k:.0f} "
        f"step{'s' if k > 1 else ''} earlier: {share(seen['version_left'])} of the gap is left."
    )


def _partly_words(seen: Seen) -> str:
    return (
        f"On {seen['slope_draws']:.0f} draws that steps share, log mu moves by {seen['slope']:.2f} ± "
        f"{seen['slope_error']:.2f} where log old moves by 1, and the gap has grown {number(min(_grown(seen), 1000))} "
        "times or more; no earlier version of the weights explains it: some tensors arrive, others stay behind."
    )


def _engine_words(seen: Seen) -> str:
    return (
        f"Engine (or rank) {seen['engine_group']:.0f} has {seen['engine_times']:.3g} times the KL of the others, step "
        f"after step (p = {seen['engine_p']:.1g})."
    )


def _slot_words(seen: Seen) -> str:
    return (
        f"Response {seen['slot_group']:.0f} of the batch has {seen['slot_times']:.3g} times the KL of the others, step "
        f"after step, whatever its prompt (p = {seen['slot_p']:.1g})."
    )


STEPS_CAUSES: tuple[Cause, ...] = (
    Cause(
        "stopped", "weights that no longer arrive", _stopped, _stopped_words,
        "Look at the hand-over of that step: an error that was swallowed, an engine that restarted from a checkpoint, "
        "adapters that are never merged. Push once by hand, score the same batch again, and see the gap vanish.",
        (),
    ),
    Cause(
        "behind", "weights that are some steps old", _behind, _behind_words,
        "Where the lag is meant (asynchronous training), correct it by importance weights and log the lag; else see "
        "that sampling waits for the hand-over.",
        (),
    ),
    Cause(
        "one_engine", "one engine among several that is off", lambda seen: float("engine_group" in seen), _engine_words,
        "Take that engine (or rank) out or restart it: compare its weights, its version and its device with another's.",
        (),
    ),
    Cause(
        "one_slot", "one place of the batch that is off", lambda seen: float("slot_group" in seen), _slot_words,
        "Look at what the engine does there alone: a cached prefix that is not its own, padding, a block that is "
        "written twice. Sample the batch in another order and see whether the place or the prompt has the gap.",
        (),
    ),
    Cause(
        "partly", "weights that arrive in part", _partly, _partly_words,
        "Compare the engine's tensors with the trainer's one by one after a hand-over, and list those that are equal "
        "to the first checkpoint's: a group is left out by name, by sharding, or as frozen.",
        (),
    ),
)  # fmt: skip
"""Every fault over steps, in the order in which they are asked."""
