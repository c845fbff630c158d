"""Does a metric warn of a collapse before it comes? Over all rows of the ledger, whatever their arms.

A run is cut into its windows. A window is *before a collapse* if the first rule of the run's verdict fires within the
next LEAD windows, and *quiet* if the run goes on for at least LEAD windows more without one; others count as neither.
The signal of a metric is the logarithm of its mean over the window by its mean over the run's first two windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.claim import Row

LEAD = 3
"""Windows ahead: 15% of a run's updates."""

SIGNALS: Mapping[str, int] = {
    "rollout_corr/k3_kl": 1, "rollout_corr/extreme_frac_tau2": 1, "staleness/k3_kl": 1, "actor/grad_norm": 1,
    "actor/entropy": -1, "reward/mean": -1, "rollout_corr/eff_sample_size": -1, "actor/pg_clipfrac": 1,
    "routing/router_disagreement": 1, "routing/zero_deviation": -1,
}  # fmt: skip
"""Metrics that may warn, with the direction that is feared: 1 up, -1 down."""

FALSE_ALARMS = 0.05
NUM_DRAWS = 1000


@dataclass(frozen=True)
class Signal:
    """How well a metric warns: the area under its ROC curve with a 95% interval, and its hits at 5% false alarms.

    auc: probability that a window before a collapse has a stronger signal than a quiet one, ties half, in [0, 1]; 0.5
    knows nothing. The interval is a percentile bootstrap over runs, whose windows stay together.
    """

    metric: str
    num_before: int
    num_quiet: int
    auc: float
    low: float
    high: float
    hits: float


def warnings(rows: Sequence[Row], seed: int = 0) -> list[Signal]:
    """A Signal for each signal that has windows of both kinds, the largest area first."""
    found = [one for name in SIGNALS if (one := _warning(name, rows, seed)) is not None]
    return sorted(found, key=lambda one: -one.auc)


def _warning(name: str, rows: Sequence[Row], seed: int) -> Signal | None:
    runs = [run for run in (signals(row, name) for row in rows) if len(run[0]) or len(run[1])]
    before, quiet = (np.concatenate([run[side] for run in runs] or [np.zeros(0)]) for side in (0, 1))
    if not len(before) or not len(quiet):
        return None
    draws = np.random.default_rng(seed)
    areas = []
    for _ in range(NUM_DRAWS):
        drawn = [runs[i] for i in draws.integers(len(runs), size=len(runs))]
        sides = [np.concatenate([run[side] for run in drawn]) for side in (0, 1)]
        if len(sides[0]) and len(sides[1]):
            areas.append(area(*sides))
    low, high = np.quantile(areas, [0.025, 0.975])
    threshold = np.quantile(quiet, 1 - FALSE_ALARMS)
    hits = float((before > threshold).mean())
    return Signal(name, len(before), len(quiet), area(before, quiet), float(low), float(high), hits)


def signals(row: Row, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The metric's signals in the run's windows before its collapse, and in its quiet ones."""
    series = row["series"].get(name, [])
    base = [value for value in series[:2] if value is not None and value > 0]
    if not base:
        return np.zeros(0), np.zeros(0)
    first = row["first_step"]
    end = NUM_WINDOWS if first is None else max(0, first - 1) * NUM_WINDOWS // row["num_steps"]
    before, quiet = [], []
    for window, value in enumerate(series[2:end], start=2):
        if value is None or value <= 0:
            continue
        signal = SIGNALS[name] * math.log(value / (sum(base) / len(base)))
        if first is not None and window >= end - LEAD:
            before.append(signal)
        elif window < end - LEAD:
            quiet.append(signal)
    return np.asarray(before), np.asarray(quiet)


def area(before: np.ndarray, quiet: np.ndarray) -> float:
    """P(before > quiet) + P(before = quiet) / 2 over all pairs: Mann and Whitney's U by the number of pairs."""
    ordered = np.sort(quiet)
    below, up_to = np.searchsorted(ordered, before, "left"), np.searchsorted(ordered, before, "right")
    return float((below + up_to).sum() / 2 / (len(before) * len(quiet)))


__all__ = ["LEAD", "SIGNALS", "Signal", "area", "signals", "warnings"]
