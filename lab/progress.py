"""The progress of a run on the terminal: one line every few steps, or a live bar; the same in both worlds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ProgressKind = Literal["bar", "lines", "none"]
EVERY = 10
"""Steps between two lines."""


class ProgressLines:
    """One line every EVERY steps: for logs, and for runs side by side. `unit` is the word for a step."""

    def __init__(self, name: str, num_steps: int, unit: str = "step"):
        self.name, self.num_steps, self.unit = name, num_steps, unit
        self.started = time.monotonic()

    def show(self, number: int, row: Mapping[str, float] | str) -> None:
        """Prints a line after `number` steps, where one is due: the metrics of the last step, or the given words."""
        if number % EVERY == 0 or number == self.num_steps:
            seconds = time.monotonic() - self.started
            place = f"{self.unit} {number:>4}/{self.num_steps}"
            print(f"{self.name:<22} {place}  {seconds:>5.0f} s  {summary(row)}", flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was, also after a run that did not finish."""


class ProgressBar(ProgressLines):
    """A live bar with reward, KL, F(2) and entropy."""

    def __init__(self, name: str, num_steps: int, done: int = 0):
        super().__init__(name, num_steps)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[summary]}"))
        self.task = self.bar.add_task(name, total=num_steps, completed=done, summary="")
        self.bar.start()

    def show(self, number: int, row: Mapping[str, float] | str) -> None:
        self.bar.update(self.task, completed=number, summary=summary(row))
        if number == self.num_steps:
            self.close()

    def close(self) -> None:
        self.bar.stop()


def progress_of(kind: ProgressKind, name: str, num_steps: int, done: int, unit: str = "step") -> ProgressLines | None:
    """The progress display of this kind, None for `none`; `done` steps have been taken already."""
    if kind == "bar":
        return ProgressBar(name, num_steps, done)
    return ProgressLines(name, num_steps, unit=unit) if kind == "lines" else None


def summary(row: Mapping[str, float] | str) -> str:
    """Reward, discrepancy and entropy of a step in a line; words as they are."""
    if isinstance(row, str):
        return row
    parts = [
        f"reward {row['reward/mean']:.3f}",
        f"k3 {row['rollout_corr/k3_kl']:.1e}",
        f"F(2) {row['rollout_corr/extreme_frac_tau2']:.1e}",
        f"entropy {row['actor/entropy']:.3f}",
    ]
    if "eval/accuracy" in row:
        parts.append(f"held-out {row['eval/accuracy']:.3f}")
    return "  ".join(parts)
