"""Early warning: whether a metric signals a collapse before it comes, over all rows of the ledger.

A window of a run is *before a collapse* if pi's accuracy collapses (course.py) within the next LEAD windows, and
*quiet* if the run continues for at least LEAD more windows without that; other windows are neither. A run's verdict has
no part in it, as its rules read some of the metrics that are judged here. The signal of a metric is the logarithm of
its mean over the window divided by its mean over the run's first two windows. A window is compared only with quiet ones
of the same regime at the same place in the run, as metrics drift in every run; it is left out if there are none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_matrix

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.claim import Row
from sandbox.ledger.course import collapse_step, collapsed

LEAD = 3
"""Windows ahead: 15% of a run's updates."""

SIGNALS: Mapping[str, int] = {
    "rollout_corr/k3_kl": 1, "rollout_corr/extreme_frac_tau2": 1, "staleness/k3_kl": 1, "actor/grad_norm": 1,
    "actor/entropy": -1, "reward/mean": -1, "rollout_corr/eff_sample_size": -1, "actor/pg_clipfrac": 1,
    "routing/router_disagreement": 1, "routing/zero_deviation": -1,
}  # fmt: skip
"""Metrics that may warn, with the direction that does: 1 up, -1 down."""

FALSE_ALARMS = 0.05
NUM_DRAWS = 1000


@dataclass(frozen=True)
class Signal:
    """A metric as a warning: the area under its ROC curve with a 95% interval, and its hits at 5% false alarms.

    auc: the mean, over windows before a collapse, of the share of their quiet windows that have a weaker signal (ties
    count half), in [0, 1]; 0.5 is chance. The interval is a percentile bootstrap over runs, whose windows stay
    together. by_lead: the same for windows 1, 2, ... LEAD before the collapse; nan if there are none. hits: the share
    of windows before a collapse above the 95% quantile of their quiet ones.
    """

    metric: str
    num_before: int
    num_collapsed: int
    auc: float
    low: float
    high: float
    by_lead: tuple[float, ...]
    hits: float


class Window(NamedTuple):
    """One window of a run: its place, its signal, and its number of windows before the collapse (0: quiet)."""

    place: int
    signal: float
    ahead: int


def warnings(rows: Sequence[Row]) -> list[Signal]:
    """A Signal for each metric of SIGNALS that has windows of both kinds, the largest area first.

    Runs too short for a verdict are left out, as a window of 40 updates compares with none of 400; so are those whose
    accuracy was not evaluated.
    """
    rows = [row for row in rows if row["verdict"] != "undecided" and not math.isnan(collapsed(row))]
    if not rows:
        return []
    # A bootstrap draw is the number of times that each run occurs in it.
    drawn = np.random.default_rng(0).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=NUM_DRAWS)
    weights = np.ascontiguousarray(drawn.T, dtype=np.float64)
    found = [one for name in SIGNALS if (one := _warning(name, rows, weights)) is not None]
    return sorted(found, key=lambda one: -one.auc)


def windows(row: Row, name: str) -> list[Window]:
    """The run's quiet windows and those before its collapse, if the metric is above 0 there."""
    series = row["series"].get(name, [])
    base = [value for value in series[:2] if value is not None and value > 0]
    if not base:
        return []
    first = collapse_step(row)
    # Windows that end before the collapse: the one in which it happens is no warning.
    end = NUM_WINDOWS if first is None else max(0, math.ceil(first) - 1) * NUM_WINDOWS // row["num_steps"]
    found = []
    for place, value in enumerate(series[2:end], start=2):
        ahead = end - place if end - place <= LEAD else 0
        # The last windows of a run without a collapse are neither kind: it ends before one could come.
        if value is None or value <= 0 or (first is None and ahead):
            continue
        found.append(Window(place, SIGNALS[name] * math.log(value / (sum(base) / len(base))), ahead))
    return found


def shares(
    signals: Float[np.ndarray, " before"], quiet: Float[np.ndarray, " runs"], weights: Float[np.ndarray, "runs draws"]
) -> Float[np.ndarray, "before draws"]:
    """The share of quiet windows with a weaker signal, for each window before a collapse at their place; ties count
    half. nan in a draw that has none of them.

    quiet: the signal of each run's quiet window there; nan without one. weights: how often each run counts. With
    weights of 1 the mean over windows is Mann and Whitney's U over the number of pairs.
    """
    runs = np.flatnonzero(~np.isnan(quiet))
    levels, own = np.unique(signals, return_inverse=True)
    # Bin 2k + 1 has the quiet windows that tie with level k, and bin 2k those between it and the level below.
    bins = np.searchsorted(levels, quiet[runs], "left") + np.searchsorted(levels, quiet[runs], "right")
    counted = csr_matrix((np.ones(len(runs)), (bins, runs)), shape=(2 * len(levels) + 1, len(quiet))) @ weights
    weaker, tied = counted.cumsum(0), counted[1::2]
    with np.errstate(invalid="ignore"):
        return ((weaker[:-1:2] + 0.5 * tied) / weaker[-1])[own]


def _warning(name: str, rows: Sequence[Row], drawn: np.ndarray) -> Signal | None:
    runs = [(row["regime"], windows(row, name)) for row in rows]
    quiet: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.full(len(runs), np.nan))
    for i, (regime, found) in enumerate(runs):
        for one in found:
            if not one.ahead:
                quiet[regime, one.place][i] = one.signal
    before: dict[tuple[str, int], list[tuple[int, Window]]] = {}
    for i, (regime, found) in enumerate(runs):
        for one in found:
            if one.ahead and (where := (regime, one.place)) in quiet:
                before.setdefault(where, []).append((i, one))
    if not before:
        return None
    each, own, above = [], [], []
    for where, windows_here in before.items():
        signals = np.array([one.signal for _, one in windows_here])
        own.append(shares(signals, quiet[where], np.ones((len(runs), 1)))[:, 0])
        each.append(shares(signals, quiet[where], drawn))
        above.append(signals > np.nanquantile(quiet[where], 1 - FALSE_ALARMS))
    owners, ahead = np.array([(i, one.ahead) for found in before.values() for i, one in found]).T
    own = np.concatenate(own)
    low, high = np.nanquantile(_areas(np.concatenate(each), drawn[owners]), [0.025, 0.975])
    return Signal(
        name, len(owners), len(set(owners.tolist())), float(own.mean()), float(low), float(high),
        tuple(float(own[ahead == k].mean()) if (ahead == k).any() else math.nan for k in range(1, LEAD + 1)),
        float(np.concatenate(above).mean()),
    )  # fmt: skip


def _areas(each: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The area in each draw of runs, over windows before a collapse with these weights; nan if a draw has no pair."""
    counts = weights * ~np.isnan(each)
    with np.errstate(invalid="ignore"):
        return (counts * np.nan_to_num(each)).sum(0) / counts.sum(0)


__all__ = ["LEAD", "SIGNALS", "Signal", "Window", "shares", "warnings", "windows"]
