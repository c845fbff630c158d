"""The course of a run: pi's held-out accuracy from before training to the end.

Accuracy is avg@k on the held-out problems, sampled by an exact engine, so that engines are compared by the policy that
they produce and not by their own rewards. A level is a trailing mean over SMOOTHED evaluations (fewer at the start), so
that one unlucky evaluation is neither a peak nor a fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from sandbox.ledger.claim import Measure, Row

SMOOTHED = 3
"""Evaluations per level: some 50 updates, 768 sampled responses, a standard error of 0.016 at an accuracy of 0.3."""

FALL = 0.5
"""A level has fallen if it is below this share of the highest level so far, the one before training included."""


def evaluations(row: Row) -> list[tuple[float, float]]:
    """Global step and accuracy of every evaluation; step 0 is before training.

    Older rows have only means over windows; they equal the evaluations if no window has two: the first is then that of
    step 0, and each other one that of its window's last step.
    """
    if "evaluations" in row:
        return [(float(step), float(value)) for step, value in row["evaluations"]]
    found: Sequence[float | None] = row["series"].get("eval/accuracy", [])
    steps = [(i + 1) * row["num_steps"] / len(found) if i else 0.0 for i in range(len(found))]
    return [(step, value) for step, value in zip(steps, found, strict=True) if value is not None]


def area(row: Row) -> float:
    """The mean of the evaluations after step 0, in [0, 1]: the area under the accuracy, per update.

    An early-stopped run keeps its last value to the planned end. nan without an evaluation after step 0.
    """
    after = [(step, value) for step, value in evaluations(row) if step > 0]
    if not after:
        return math.nan
    # Evaluations are evenly spaced from step 0 on.
    every = after[0][0]
    # The number of evaluations that an early stop left out.
    lost = max(0, int((row["num_steps"] - after[-1][0]) // every))
    return fmean([value for _, value in after] + [after[-1][1]] * lost)


def initial(row: Row) -> float:
    """The accuracy before training, in [0, 1]; nan if it was not evaluated."""
    return next((value for step, value in evaluations(row) if step == 0), math.nan)


def final(row: Row) -> float:
    """The mean accuracy in the last quarter of the planned steps, or the last one if that has no evaluation."""
    found = evaluations(row)
    late = [value for step, value in found if step > 0.75 * row["num_steps"]]
    return fmean(late) if late else found[-1][1] if found else math.nan


def peak(row: Row) -> float:
    """The highest level of the run, the one before training included, in [0, 1]."""
    return max((level for _, level in _levels(row)), default=math.nan)


def drawdown(row: Row) -> float:
    """1 - final / peak, at most 1: the share of its highest level that a run has lost by its end; nan for a peak of 0.

    It is slightly below 0 if the mean of the last quarter exceeds every level.
    """
    top = peak(row)
    return 1.0 - final(row) / top if top > 0 else math.nan


def collapsed(row: Row) -> float:
    """1 if a run ends below FALL times its highest level, else 0; a run that fell and recovered did not collapse.

    A run that ended early because a metric was not finite has collapsed, at any level.
    """
    if died(row):
        return 1.0
    lost = drawdown(row)
    return lost if math.isnan(lost) else float(lost > 1.0 - FALL)


def died(row: Row) -> bool:
    """Whether a metric that was not finite ended the run."""
    return "non_finite" in row.get("rules", ()) and row["last_step"] < row["num_steps"]


def collapse_step(row: Row) -> float | None:
    """The global step from which the level of a collapsed run stays below FALL times the highest so far; else None.

    If the last quarter is low on average but the last level is not, it is the first step of that quarter. A run that
    ended early at a high level has its last step.
    """
    if collapsed(row) != 1.0:
        return None
    highest, start = -math.inf, None
    for step, level in _levels(row):
        highest = max(highest, level)
        # A recovery resets it: only a fall that lasts to the end counts.
        start = (step if start is None else start) if level < FALL * highest else None
    if start is not None:
        return start
    return float(row["last_step"] if died(row) else math.ceil(0.75 * row["num_steps"]))


def fall_step(row: Row) -> float | None:
    """The global step of the first evaluation of the fall that ends in the collapse; None without one.

    A level is a mean over SMOOTHED evaluations, so `collapse_step` comes up to SMOOTHED - 1 evaluations after the first
    low one. This is the first of the unbroken evaluations up to it that are below FALL times the highest level before.
    """
    end = collapse_step(row)
    if end is None:
        return None
    highest, start = -math.inf, None
    for (step, value), (_, level) in zip(evaluations(row), _levels(row), strict=True):
        if step > end:
            break
        start = (step if start is None else start) if value < FALL * highest else None
        highest = max(highest, level)
    return end if start is None else start


def lasting(row: Row) -> float:
    """The share of the planned steps before the collapse, in [0, 1]; 1 without one, nan if unknown."""
    if math.isnan(collapsed(row)):
        return math.nan
    step = collapse_step(row)
    # Below 1, which means that the run lasted to its end.
    return 1.0 if step is None else min(step / row["num_steps"], math.nextafter(1.0, 0.0))


def spacing(row: Row) -> float:
    """The share of the planned steps from one evaluation to the next, in (0, 1]; nan without one after step 0."""
    return next((step / row["num_steps"] for step, _ in evaluations(row) if step > 0), math.nan)


def _levels(row: Row) -> list[tuple[float, float]]:
    found = evaluations(row)
    values = [value for _, value in found]
    # As `fmean`, at half the time: pages ask for the levels of all rows dozens of times.
    parts = (values[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(values)))
    return [(step, math.fsum(part) / len(part)) for (step, _), part in zip(found, parts, strict=True)]


AREA = Measure("area", "mean held-out accuracy of pi over the run, sampled by an exact engine", "accuracy", area)
COLLAPSED = Measure(
    "collapsed",
    "1 where the last quarter's accuracy is below half of the run's highest level",
    "1",
    collapsed,
    kind="event",
)
LASTING = Measure(
    "lasting",
    "share of the run before its accuracy collapsed; 1: it did not",
    "1",
    lasting,
    kind="time",
    spacing=spacing,
)

__all__ = [
    "AREA", "COLLAPSED", "FALL", "LASTING", "SMOOTHED", "area", "collapse_step", "collapsed", "died", "drawdown",
    "evaluations", "fall_step", "final", "initial", "lasting", "peak", "spacing",
]  # fmt: skip
