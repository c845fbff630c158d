"""The panel of time: parts of a global step, tokens per second, shares of the machines, payloads, interruptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.levels import Series
from lab.report.figures import Caption, Figure, Lines, bar_layout, bar_trace
from lab.report.runs import ReportRun
from lab.report.style import number

STEP = "timing_s/step"

TIME_PARTS = {
    "sampling": "timing_s/gen",
    "old pass": "timing_s/old_log_prob",
    "reference<br>pass": "timing_s/ref",
    "updates": "timing_s/update_actor",
    "handing<br>weights over": "timing_s/push",
    "handing<br>GPUs over": "timing_s/turn",
}

SAVE = "timing_s/save_checkpoint"

TRAINING = ("timing_s/old_log_prob", "timing_s/ref", "timing_s/update_actor")
"""The parts of a step in which the trainer works."""


def time_parts(runs: Sequence[ReportRun]) -> Figure | None:
    """Bars of the mean seconds in each part of a global step; None if no run recorded any."""
    found = [
        {words: run.mean(name) for words, name in TIME_PARTS.items()} | {"waiting for<br>checkpoints": _saves(run)}
        for run in runs
    ]
    caption = Caption("mean over steps of the time in each part of a global step", "s", "verl")
    note = (
        "Parts may overlap where sampling and training run at the same time; the rest goes to rewards and metrics. A "
        "run waits for its checkpoints between steps: that time counts in no step, and its mean is over all steps."
    )
    return _bars(runs, found, Figure("time-parts", "Time by part of a step", caption, [], {}, note), "seconds", " s")


def _saves(run: ReportRun) -> float | None:
    """Seconds per step in which the run waited for checkpoints; None where it recorded no step's time, or no wait."""
    num_steps, waits = len(run.series(STEP)), run.series(SAVE)
    # Only steps after a save have a wait: their own mean would be that of a save.
    return sum(seconds for _, seconds in waits) / num_steps if waits and num_steps else None


@dataclass(frozen=True)
class Throughput(Lines):
    """Response tokens per second of a global step."""

    def series(self, run: ReportRun) -> Series:
        """Tokens per second of each step that recorded both and took more than 0 seconds."""
        seconds = dict(run.series(STEP))
        rates = [(step, tokens / seconds[step]) for step, tokens in run.series(self.name) if seconds.get(step)]
        return [(step, rate) for step, rate in rates if math.isfinite(rate)]

    @property
    def caption(self) -> Caption:
        """The ratio's formula and unit."""
        return Caption("response tokens that the global step trains on / its wall-clock time", "tokens/s", "here")


def shares(runs: Sequence[ReportRun]) -> Figure | None:
    """Bars of the mean shares of a step's time in which engines and trainer work, and processors are busy.

    None if no run recorded times.
    """
    found = [_shares(run) for run in runs]
    caption = Caption(
        "mean over steps of (time in the engines, or in old, reference and gradient passes) / time of the step; "
        "of (processor time of the engines, or ranks) / (processes x time of the step)",
        "1",
        "here",
    )
    note = "One processor that is busy through the whole step is 1; a process with several threads can have more."
    return _bars(runs, found, Figure("shares", "How busy the machines are", caption, [], {}, note), "share", "")


def _shares(run: ReportRun) -> dict[str, float | None]:
    engines, ranks = run.setting("rollout", "num_engines"), run.setting("training", "num_ranks")
    return {
        "engines<br>at work": _share(run, (TIME_PARTS["sampling"],), 1),
        "trainer<br>at work": _share(run, TRAINING, 1),
        "engines'<br>processors": _share(run, ("timing_s/cpu_engines",), engines or 1),
        "trainer's<br>processors": _share(run, ("timing_s/cpu_ranks",), ranks or 1),
    }


def _share(run: ReportRun, names: Sequence[str], processes: int) -> float | None:
    """The mean over steps of (sum of these times) / (the step's time x processes)."""
    seconds = dict(run.series(STEP))
    sums: dict[int, float] = {}
    for name in names:
        for step, value in run.series(name):
            sums[step] = sums.get(step, 0.0) + value
    found = [value / seconds[step] / processes for step, value in sums.items() if seconds.get(step)]
    mean = sum(found) / len(found) if found else math.nan
    # Not finite where no step has both, and where an edited file's times have a ratio beyond float64.
    return mean if math.isfinite(mean) else None


def _bars(
    runs: Sequence[ReportRun], found: Sequence[Mapping[str, float | None]], empty: Figure, title: str, unit: str
) -> Figure | None:
    """Fills `empty` with a bar per run and part, without the parts that no run has; None if none is left."""
    shown = [word for word in found[0] if any(values[word] is not None for values in found)] if found else []
    if not shown:
        return None
    for run, parts in zip(runs, found, strict=True):
        values = [parts[word] for word in shown]
        if any(value is not None for value in values):
            empty.data.append(bar_trace(run, shown, values, (f"{number(value)}{unit}" for value in values)))
    axes = {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": title}, "rangemode": "tozero"}}
    empty.layout.update(axes | bar_layout(empty.data))
    return empty


@dataclass(frozen=True)
class TimingRow:
    """A row of a table, in the colour of its run."""

    run: ReportRun
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table under a section's figures; `is_number` marks the columns of numbers, after the run's own column."""

    id: str
    title: str
    columns: tuple[str, ...]
    is_number: tuple[bool, ...]
    rows: tuple[TimingRow, ...]
    note: str = ""


TableFunction = Callable[[Sequence[ReportRun]], Table | None]

PAYLOADS = {
    "weights, one push": "transfer/weights_bytes",
    "mu's routing records": "transfer/routes_bytes",
    "mu's router features": "transfer/features_bytes",
    "mu's likeliest tokens": "rollout/top_tokens_bytes",
    "all from the engines": "transfer/rollout_bytes",
}


def payloads(runs: Sequence[ReportRun]) -> Table | None:
    """A table of each payload's mean megabytes per step beside the plan's count; None if no run recorded any."""
    rows = []
    for run in runs:
        planned = run.manifest.get("planned_bytes", {})
        for words, name in PAYLOADS.items():
            mean = run.mean(name)
            if mean is not None:
                plan = planned.get(name)
                share = mean / plan if plan else None
                cells = (words, _megabytes(mean), _megabytes(plan), number(share, decimals=3))
                rows.append(TimingRow(run, cells))
    if not rows:
        return None
    note = (
        "Means over the steps, in units of 1e6 bytes. firstorder plan counts responses of full length, an upper "
        "bound; bytes from the engines also hold tokens and log-probabilities."
    )
    columns = ("payload", "MB per step", "MB planned", "share")
    return Table("payloads", "Payloads", columns, (False, True, True, True), tuple(rows), note)


def _megabytes(num_bytes: float | int | None) -> str:
    return number(None if num_bytes is None else num_bytes / 1e6)


def interruptions(runs: Sequence[ReportRun]) -> Table | None:
    """A table of the ranks, engines and runs that ended and were continued; None if none did."""
    rows = []
    for run in runs:
        for event in run.events:
            who = f"the {event.process}" if event.index is None else f"{event.process} {event.index}"
            again = max(event.step - event.resumed, 0)
            cells = (who, str(event.step), str(again), number(event.seconds), event.reason)
            rows.append(TimingRow(run, cells))
    if not rows:
        return None
    note = (
        "Steps done are those before the loss; those after the last checkpoint are computed again. Seconds count from "
        "the loss, or from the new start of a run, until the run continued."
    )
    columns = ("ended", "steps done", "steps again", "seconds", "reason")
    return Table("interruptions", "Interruptions", columns, (False, True, True, True, False), tuple(rows), note)
