"""The doctor's words on many steps: the verdict, the first thing to do, the evidence, and a summary of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

from lab.doctor.change_point import FEWEST
from lab.doctor.diagnosis import TRIED_ON
from lab.doctor.steps.arrival import FEWEST_DRAWS
from lab.doctor.steps.course import FIGURES, Course, StepRecord, pooled
from lab.doctor.undecided import UNDECIDED
from lab.doctor.words import plain
from lab.report.style import number

MOST_LINES = 12
"""Most listed spans of steps; the page and `--json` have every step."""


def verdict(course: Course) -> str:
    """The course of the KL and its likely cause, in one sentence."""
    lead = "it looks like" if course.fault else "nothing to fix; it looks like"
    lead = f"undecided: {lead}" if course.named.name == UNDECIDED.name else lead
    return f"{went(course, 'k3_kl')}; {lead} {looks(course)}."


def looks(course: Course) -> str:
    """The named cause, with the step at which it began where known."""
    cause = course.named
    if cause.name == "stopped":
        return f"{cause.title}, since step {course.seen['stopped_since']:.0f}"
    if cause.name == "behind":
        return f"weights that are {course.seen['steps_behind']:.0f} steps old".replace(" 1 steps", " 1 step")
    title = course.joint.strength_words if cause.name == UNDECIDED.name else cause.title
    if course.early and not course.spanning and (before := course.before).name != cause.name:
        return f"{title} (before: {before.title})"
    return title


def went(course: Course, name: str) -> str:
    """The course of a figure, as a clause."""
    title, values = FIGURES[name], [value for _, value in course.series(name)]
    if not values:
        return f"{title} is missing at every step"
    found, since = course.growths[name], course.since(name)
    low, high = number(min(values)), number(max(values))
    if found is None:
        if len(values) == 1:
            return f"{title} is {low} at the only step; a change needs {FEWEST}"
        span = f"{low} at all" if low == high else f"between {low} and {high} over"
        why = "no clear change" if len(values) >= FEWEST else f"fewer than the {FEWEST} needed to see a change"
        return f"{title} is {span} {len(values)} steps, {why}"
    verb = "grew" if found.is_rising else "fell"
    when = "over the run" if found.kind == "line" else f"{'at' if found.kind == 'jump' else 'since'} step {since}"
    return f"{title} {verb} from {number(found.before)} to {number(found.after)} {when}"


def lines(course: Course, num_shared: int) -> list[str]:
    """The verdict, the first thing to do, the evidence, and a summary of the steps."""
    said = [f"  {line}" for line in evidence(course, num_shared)]
    return [verdict(course), f"Do first: {course.named.fix}", *said, *spans(course.steps)]


def evidence(course: Course, num_shared: int) -> list[str]:
    """The faults that span steps, or the cause as a late step shows it; the figures' courses; the open questions."""
    out = [cause.words(course.seen) for cause in course.spanning]
    if not course.spanning:
        # Pooled clues named the cause: a step that gives it no strength may lack the clues that its words need. Of
        # *undecided*, which has no strength, the words are those of all steps.
        shown = (step for step in reversed(course.late) if step.diagnosis.strengths.get(course.named, 0.0) > 0)
        last = next(shown, None)
        where = "All steps together" if last is None else f"Step {last.number}"
        out.append(f"{where}: {course.named.words(pooled(course.late) if last is None else last.diagnosis.seen)}")
    said = [went(course, name) for name in FIGURES if name != "k3_kl" and course.series(name)]
    out += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in said]
    if endless := [step.number for step in course.steps if step.is_endless]:
        first = f"step {endless[0]}" if len(endless) == 1 else f"{len(endless)} steps, first step {endless[0]},"
        out.append(
            f"The k3 KL of {first} is infinite and left out: a ratio old / mu is beyond float64, as where log mu has a "
            "filler such as -1e4."
        )
    out += [f"The KL is on {found.title}: {found.times:.3g} times that of the others." for found in course.places]
    if not course.spanning and num_shared < FEWEST_DRAWS:
        out.append(
            f"These steps cannot show whether weights arrive: they share {num_shared} draws (one token after one "
            f"context) of the {FEWEST_DRAWS} needed. Repeat a few prompts every few steps to find out."
        )
    few = median(step.diagnosis.seen["num_tokens"] for step in course.steps)
    if few < TRIED_ON:
        out.append(f"{few:,.0f} tokens per step are few: the rules for one step were tested on {TRIED_ON:,} or more.")
    return out


def spans(steps: Sequence[StepRecord]) -> list[str]:
    """A line per run of steps with one cause, with the range of their KL."""
    found = [list(group) for _, group in groupby(steps, key=lambda step: step.diagnosis.named[0].name)]
    shown = [_span(group) for group in found[:MOST_LINES]]
    left = len(found) - len(shown)
    return [*shown, f"  and {left} more changes of cause: --json and --out have every step."] if left else shown


def _span(steps: Sequence[StepRecord]) -> str:
    first, last = steps[0].number, steps[-1].number
    values = [value for step in steps if (value := step.figure("k3_kl")) is not None]
    ends = dict.fromkeys(number(value) for value in (min(values), max(values))) if values else ()
    kl = f", k3 KL {' to '.join(ends)}" if ends else ""
    where = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"  {where}: {steps[0].diagnosis.named[0].title}{kl}"


def as_object(course: Course, num_shared: int) -> dict[str, Any]:
    """The report for a program, with every step; null for a number that is not finite."""
    changes = {
        name: None
        if (found := course.growths[name]) is None
        else {
            "since": course.since(name), "kind": found.kind, "before": found.before, "after": found.after,
            "p": found.tests.p, "trend_p": found.tests.trend_p,
        }
        for name in FIGURES
        if course.series(name)
    }  # fmt: skip
    told = {
        "verdict": verdict(course),
        "do_first": course.named.fix,
        "fault": None if course.fault is None else course.fault.name,
        "candidates": [] if course.spanning else [cause.name for cause in course.joint.candidates],
        "changes": changes,
        "over_steps": {name: value for name, value in course.seen.items() if name != "other_weights"},
        "places": [{"group": found.title, "times": found.times, "p": found.p} for found in course.places],
        "num_shared_draws": num_shared,
        "steps": [
            {"step": step.number, "num_responses": step.num_responses, "cause": step.diagnosis.named[0].name}
            | {name: step.figure(name) for name in FIGURES}
            | {"strengths": {cause.name: s for cause, s in step.diagnosis.strengths.items()}}
            for step in course.steps
        ],
    }
    return plain(told)
