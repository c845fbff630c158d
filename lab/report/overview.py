"""The large picture at the top of the report: the reward of every run over its steps, with its collapse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.levels import Series
from lab.report.figures import (
    Figure,
    caption,
    collapse_cross,
    dash,
    end_labels,
    over_steps,
    run_lines,
    smoothed,
    smoothing_note,
    smoothing_window,
    treatment_ends,
)
from lab.report.runs import ReportRun
from lab.report.scale import MARGIN, Scale
from lab.report.story import first_step
from lab.report.style import DASHES, listed
from lab.verdict import REWARD

REWARD_TITLE = "Reward in training"
HEIGHT = 440
LABEL_SIZE = 14
"""Font size of the labels at the ends of lines, pixels."""

DASH_WORDS = dict(zip(DASHES, ("solid", "dashed", "dotted", "dash-dotted"), strict=True))
MANY = 8
"""Most runs that a note names one by one."""


def reward_picture(runs: Sequence[ReportRun]) -> Figure | None:
    """The reward of all runs, with a cross on each curve where its first rule began to hold; None without a reward."""
    found = [(run, values) for run in runs if (values := run.series(REWARD))]
    if not found:
        return None
    window = _window([run for run, _ in found], max(len(values) for _, values in found))
    scale = Scale.of([value for _, values in found for _, value in values], "linear")
    smooth = [(run, smoothed(values, window, scale)) for run, values in found]
    data = run_lines(found, window, scale)
    for trace in data:
        trace["line"] |= {"width": 1 if trace["meta"]["role"] == "raw" else 2.5}
    data += [cross for run, values in smooth if (cross := collapse_cross(run, values, scale)) is not None]
    layout = over_steps([values for _, values in found], scale)
    if len(runs) > 1:
        layout["annotations"] = _labels(smooth, scale)
    note = smoothing_note(window, scale)
    if any(trace["meta"]["role"] == "collapse" for trace in data):
        note += "A cross marks the step from which the first rule of the verdict held; hovering shows the rule. "
    if any(run.replicate for run in runs):
        note += f"Runs of one treatment share a colour; dashes tell them apart{_dashes(runs)}."
    return Figure("reward", REWARD_TITLE, caption(REWARD), data, layout, note.rstrip(), HEIGHT)


def _dashes(runs: Sequence[ReportRun]) -> str:
    # By seed where each dash is one seed of every treatment, and no other dash is that seed; else by run. Hovering
    # names the runs that are too many.
    found: dict[str, list[ReportRun]] = {}
    for run in runs:
        found.setdefault(dash(run.index, run.replicate), []).append(run)
    seeds = {line: {run.setting("seed") for run in some} for line, some in found.items()}
    distinct = set.union(*seeds.values())
    if None not in distinct and sum(map(len, seeds.values())) == len(distinct) == len(seeds):
        names = {line: f"seed {some.pop()}" for line, some in seeds.items()}
    elif len(runs) <= MANY:
        names = {line: listed(run.label for run in some) for line, some in found.items()}
    else:
        return ", and hovering names them"
    return f" ({'; '.join(f'{DASH_WORDS[line]}: {names[line]}' for line in DASH_WORDS if line in names)})"


def _window(runs: Sequence[ReportRun], num_values: int) -> int:
    """The window of the verdicts' rule, if all runs share it and are at least three times as long; else the default."""
    windows = {(run.verdict or {}).get("thresholds", {}).get("window") for run in runs}
    window = windows.pop() if len(windows) == 1 else None
    return window if window is not None and 3 * window <= num_values else smoothing_window(num_values)


def _labels(smooth: Sequence[tuple[ReportRun, Series]], scale: Scale) -> list[dict[str, Any]]:
    """Names at the ends of the curves, on a wide page with the step or number of collapses, on a phone with a cross."""
    ends = treatment_ends(smooth)
    steps = [[first_step(run) for run, _ in smooth if run.index == label.index] for label, _, _ in ends]
    wide = [_suffix(some) for some in steps]
    narrow = [" ✕" if suffix else "" for suffix in wide]
    plot_height = float(HEIGHT - MARGIN["t"] - MARGIN["b"])
    return [
        *end_labels(ends, scale, suffixes=wide, height=plot_height, size=LABEL_SIZE),
        *end_labels(ends, scale, suffixes=narrow, where=" narrow", height=plot_height, size=LABEL_SIZE),
    ]


def _suffix(steps: Sequence[int | None]) -> str:
    """A cross with the step of a collapse, or with the number of runs that collapsed; empty if none did."""
    fallen = [step for step in steps if step is not None]
    if not fallen:
        return ""
    return f" ✕ step {fallen[0]}" if len(steps) == 1 else f" ✕ {len(fallen)} of {len(steps)}"
