"""The dataframe of a flow: its columns, the ends of its runs, means over problems with their intervals, and tables.

The unit is the problem: an interval is a 95% interval of a mean over problems, a percentile bootstrap's, or Student's
where problems are FEW; one problem has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table
from scipy import stats

from lab.audit.table import bootstrapped, distinct, numbers, parts, tidy, where
from lab.report.style import number
from theory.exact import trajectory

COLUMNS: dict[str, str] = {
    "length": "longest response T, tokens that the policy generates",
    "problem": "number of the problem: a first policy, rewards and an error draw of its own",
    "error": "engine error and its dial",
    "kind": "kind of engine error",
    "level": "its dial: KL(mu || pi) of the first policy in nats per token, or the scale",
    "objective": "label of the objective",
    "N": "updates per rollout",
    "B": "responses whose noise an update has; inf for none",
    "update": "updates made before this row",
    "optimum": "the largest J of any policy",
    **trajectory.COLUMNS,
    "entropy_lost": "entropy where no response pays, nats per token; last row of a run",
}
"""Name to meaning of every column."""

CELL = ("error", "kind", "level", "objective", "N", "B")
"""The columns that identify a cell, over whose problems means are taken."""


FEW = 30
"""With fewer problems the bootstrap's intervals are too narrow: of two it leaves out the true mean half of the time."""


@dataclass(frozen=True)
class MeanInterval:
    """A mean over problems with its 95% interval; of one problem the mean alone, which is both ends."""

    mean: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        span = f" [{number(tidy(self.low))}, {number(tidy(self.high))}]" if self.num > 1 else ""
        return f"{number(tidy(self.mean))}{span}"

    @property
    def leaves_out_0(self) -> bool:
        """Whether 0 lies outside the interval; not where there is none."""
        return self.num > 1 and (tidy(self.low) > 0 or tidy(self.high) < 0)


def interval(values: NDArray[np.float64], *names: str | int, among: int = 1) -> MeanInterval:
    """The mean of the values, one per problem, and its interval; `names` is the stream of the resampling.

    Where the values were picked `among` several, the interval is Student's, with Bonferroni's correction. Equal values
    are their own interval. Raises ValueError for no values, and for values that are not finite.
    """
    if (among == 1 and len(values) >= FEW) or len(values) < 2 or not np.isfinite(values).all():
        return MeanInterval(*bootstrapped(values, np.mean, "flow", "problem", names), len(values))
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    half = error * float(stats.t.ppf(1 - 0.025 / among, len(values) - 1))
    return MeanInterval(mean, mean - half, mean + half, len(values))


def ends(frame: pd.DataFrame) -> pd.DataFrame:
    """The last row of every run."""
    # One maximum for all: `train` observes every run at the config's number of updates.
    return where(frame, frame["update"] == frame["update"].max())


def difference(frame: pd.DataFrame, name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> MeanInterval:
    """The interval over problems of a column at the end in the cells `first`, less that in `second`.

    Both map columns to wanted values; the runs of one problem are paired. Raises ValueError where their numbers differ.
    """
    pair = []
    for wanted in (first, second):
        # The same order in both, so that subtraction pairs the runs.
        pair.append(of_cell(ends(frame), **wanted).sort_values(["problem", *CELL]))
    if len(pair[0]) != len(pair[1]) or pair[0].empty:
        raise ValueError(f"expected as many runs of both, got {len(pair[0])} and {len(pair[1])}")
    gaps = pd.DataFrame(
        {"problem": pair[0]["problem"].to_numpy(), "gap": numbers(pair[0], name) - numbers(pair[1], name)}
    )
    # Problems are the independent units: average each one's runs before the bootstrap.
    means = pd.DataFrame({"gap": gaps.groupby("problem")["gap"].mean()})
    return interval(numbers(means, "gap"), name, *map(str, [*first.values(), *second.values()]))


def of_cell(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows whose columns have these values."""
    for name, value in wanted.items():
        frame = where(frame, frame[name] == value)
    return frame


def has_intervals(frame: pd.DataFrame) -> bool:
    """Whether there are problems to take intervals over: more than one."""
    return len(distinct(frame, "problem")) > 1


def focus(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at the least N and the largest B: the bias of the engine error alone, as far as the config has it."""
    least, largest = min(distinct(frame, "N")), max(distinct(frame, "B"))
    return where(frame, (frame["N"] == least) & (frame["B"] == largest))


TEXT = {"reward": "reward", "entropy": "entropy", "kl_mu_pi": "KL mu, pi", "bias": "bias", "cosine": "cosine"}
"""Column to heading, for the tables of the terminal and the page."""


def table_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per cell: its names, and the means at the end as text, with intervals of reward and entropy."""
    rows = []
    for place, part in parts(ends(frame), CELL):
        cells = []
        for name in TEXT:
            values = numbers(part, name)
            whole = name in ("reward", "entropy")
            names = [name, *map(str, place.values())]
            cells.append(str(interval(values, *names)) if whole else number(_mean(values)))
        rows.append(place | {"cells": cells})
    return rows


def _mean(values: NDArray[np.float64]) -> float:
    """The mean without nan, as a gradient of 0 has no direction, and its cosine is nan; nan for nothing else."""
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


def terminal_tables(frame: pd.DataFrame) -> Iterator[Table]:
    """One rich table per engine error: a line for each objective, N and B."""
    num = len(distinct(frame, "problem"))
    means = f"ends of runs, means over {num} problems" if has_intervals(frame) else "ends of runs on 1 problem"
    for key, part in parts(frame, ["error"]):
        title = f"{key['error']}; {means}"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
        table.add_column("objective", no_wrap=True)
        for head in ("N", "B", *TEXT.values()):
            table.add_column(head, justify="right", no_wrap=True)
        for row in table_rows(part):
            table.add_row(row["objective"], number(row["N"]), number(row["B"]), *row["cells"])
        yield table
