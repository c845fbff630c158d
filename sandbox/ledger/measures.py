"""The measures of claims: each is one number of a finished cell, from its row. Fractions are of planned steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.claim import Measure, Row


def between(metric: str, start: float, stop: float, words: str, unit: str) -> Measure:
    """The metric's mean over the windows between the fractions `start` and `stop` of the planned steps.

    Windows without a value are left out; if none has one, the last value before them is used: a stopped run keeps its
    last value. nan if the run has no such metric.
    """
    first, last = round(start * NUM_WINDOWS), round(stop * NUM_WINDOWS)
    if not 0 <= first < last <= NUM_WINDOWS:
        raise ValueError(f"start, stop: expected 0 <= start < stop <= 1, a window apart, got {start}, {stop}")

    def of(row: Row) -> float:
        series: Sequence[float | None] = row["series"].get(metric, [])
        inside = [value for value in series[first:last] if value is not None]
        before = [value for value in series[:last] if value is not None]
        return fmean(inside) if inside else before[-1] if before else math.nan

    return Measure(f"{metric}@{start:g}-{stop:g}", words, unit, of)


def _survival(row: Row) -> float:
    if row["first_step"] is None:
        return 1.0
    return max(0, row["first_step"] - 1) / row["num_steps"]


def _kl_rise(row: Row) -> float:
    early = EARLY_KL.of(row)
    values = [value for value in row["series"].get("rollout_corr/k3_kl", []) if value is not None]
    return max(values) / early if values and early > 0 else math.nan


def _entropy_spread(row: Row) -> float:
    values = [value for value in row["series"].get("actor/entropy", []) if value is not None]
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    return fmean(steps) if steps else math.nan


def _step_time(row: Row) -> float:
    # None for a resumed run, of which only the last process would have been timed (queue.py).
    seconds = row.get("cpu_seconds")
    return math.nan if seconds is None or row["last_step"] == 0 else seconds / row["last_step"]


SURVIVAL = Measure(
    "survival", "fraction of the run before a rule of its verdict fired; 1: none did", "1", _survival, kind="time"
)
FINAL_ENTROPY = between("actor/entropy", 0.75, 1.0, "entropy over the last quarter", "nats/token")
EARLY_KL = between("rollout_corr/k3_kl", 0.0, 0.1, "k3 KL(mu || old) over the first tenth", "nats/token")
FINAL_KL = between("rollout_corr/k3_kl", 0.75, 1.0, "k3 KL(mu || old) over the last quarter", "nats/token")
KL = between("rollout_corr/k3_kl", 0.0, 1.0, "k3 KL(mu || old) over the run", "nats/token")
EXTREME = between("rollout_corr/extreme_frac_tau2", 0.0, 1.0, "F(2) over the run", "fraction")
KL_RISE = Measure("k3 rise", "largest window mean of k3 KL(mu || old) over that of the first tenth", "1", _kl_rise)
ENTROPY_SPREAD = Measure("entropy steps", "mean change of entropy from window to window", "nats/token", _entropy_spread)
STEP_SECONDS = Measure(
    "CPU time",
    "processor time of a run over its steps, evaluation included; on one kind of machine, with one kind of kernels",
    "s",
    _step_time,
    same=("machine", "torch", "compiled"),
)
GRAD_NORM = between("actor/grad_norm", 0.0, 1.0, "gradient norm before clipping, over the run", "1")
CLIP_FRACTION = between("actor/pg_clipfrac", 0.0, 1.0, "clip fraction over the run", "fraction")
AGREEMENT = between("routing/topk_agreement", 0.0, 1.0, "top-k agreement of cached and live routes", "fraction")
ZERO_DEVIATION = between("routing/zero_deviation", 0.0, 1.0, "rows whose cached route is the live one", "fraction")
ROUTE_KL = between("routing/route_kl", 0.0, 1.0, "KL of cached and live router distributions, over the run", "nats")
"""Measures shared by several claims, `SURVIVAL` to this one."""


def probe(name: str, words: str, unit: str) -> Measure:
    """The value of the probe of that name (see `probes.py`) in a row; nan if there is none."""

    def of(row: Row) -> float:
        value = row["probes"].get(name)
        return math.nan if value is None else value

    return Measure(name, words, unit, of)
