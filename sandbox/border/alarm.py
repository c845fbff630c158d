"""An alarm that a person can set: one metric and one limit, chosen on some runs and tried on others.

A row holds each metric's means over windows of a run. The alarm of a rule goes off at the last step of the first window
whose mean is beyond the limit. If the rule is `relative`, it is the ratio to the mean of the run's first two windows
that counts, and the alarm goes off after these at the earliest. It is *in time* for a run that collapses if it goes off
before the collapse (see `ledger/course.py`), and *false* in a run that does not collapse.

The rule is chosen by its score: the share of collapsing runs in which it is in time minus the share of others in which
it is false, averaged over N, the updates per rollout: a metric may separate values of N rather than runs that collapse.
Its limit is a quantile of the values in the runs on which it is chosen. Its score on those is too optimistic; the score
on other runs counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from jaxtyping import Float
from scipy import stats

from sandbox.ledger.cells import last_step
from sandbox.ledger.claim import Row
from sandbox.ledger.course import collapse_step, collapsed

WATCHED: Mapping[str, int] = {
    "rollout_corr/k3_kl": 1, "rollout_corr/extreme_frac_tau2": 1, "rollout_corr/chi2_token": 1,
    "rollout_corr/eff_sample_size": -1, "staleness/k3_kl": 1, "staleness/extreme_frac_tau2": 1, "actor/grad_norm": 1,
    "actor/entropy": -1, "actor/pg_clipfrac": 1, "reward/mean": -1, "response_length/mean": -1,
}  # fmt: skip
"""Metrics that a trainer logs, with the direction of harm: 1 up, -1 down."""

BASE = 2
"""Number of initial windows with which a relative rule compares; its alarm does not go off within them."""

Date = Callable[[Row], float | None]
"""The global step of a run's collapse, None without one: `course.collapse_step` or `course.fall_step`."""

GRID = 60
"""Number of limits tried per metric: quantiles of the observed values."""


@dataclass(frozen=True)
class AlarmRule:
    """An alarm: `metric`, or its ratio to the run's first windows if `relative`, is beyond `limit` on the bad side."""

    metric: str
    relative: bool
    limit: float

    @property
    def words(self) -> str:
        """The rule as a person would set it."""
        side = "above" if WATCHED[self.metric] > 0 else "below"
        of = " times its mean over the first tenth of the run" if self.relative else ""
        return f"`{self.metric}` {side} {self.limit:.3g}{of}"


@dataclass(frozen=True)
class Trial:
    """The counts of a rule on some runs.

    in_time out of num_collapsed, and false out of num_others. lead: median share of the run between an alarm in time
    and its collapse, in [0, 1]; nan without one.
    """

    num_collapsed: int
    in_time: int
    num_others: int
    false: int
    lead: float

    @property
    def score(self) -> float:
        """The share of alarms in time minus that of false alarms, in [-1, 1]; nan without runs of both kinds."""
        if not self.num_collapsed or not self.num_others:
            return math.nan
        return self.in_time / self.num_collapsed - self.false / self.num_others


def alarm_at(rule: AlarmRule, row: Row) -> float | None:
    """The share of a run after which the rule's alarm goes off, at a window's last step; None if it stays silent."""
    return _first_beyond(_signal(row, rule.metric, rule.relative), row["num_steps"], rule)


def _first_beyond(signal: Float[np.ndarray, " windows"], num_steps: int, rule: AlarmRule) -> float | None:
    # False for nan: windows without a value, and the first ones of a relative rule.
    beyond = signal > WATCHED[rule.metric] * rule.limit
    return last_step(int(beyond.argmax()), num_steps, len(signal)) / num_steps if beyond.any() else None


def tried(rule: AlarmRule, rows: Sequence[Row]) -> Trial:
    """The trial of the rule on the rows with a known end."""
    known, ends = _ends(rows)
    return _trial(rule, [_signal(row, rule.metric, rule.relative) for row in known], _lengths(known), ends)


def _ends(rows: Sequence[Row], date: Date = collapse_step) -> tuple[list[Row], list[float | None]]:
    """The rows with a known end, and the share of each run before its collapse (None without one)."""
    known = [row for row in rows if not math.isnan(collapsed(row))]
    return known, [None if (step := date(row)) is None else step / row["num_steps"] for row in known]


def _lengths(rows: Sequence[Row]) -> list[int]:
    return [row["num_steps"] for row in rows]


def _trial(
    rule: AlarmRule,
    signals: Sequence[Float[np.ndarray, " windows"]],
    lengths: Sequence[int],
    ends: Sequence[float | None],
) -> Trial:
    false, others, leads = 0, 0, []
    for signal, num_steps, end in zip(signals, lengths, ends, strict=True):
        alarm = _first_beyond(signal, num_steps, rule)
        if end is None:
            others, false = others + 1, false + (alarm is not None)
        elif alarm is not None and alarm < end:
            leads.append(end - alarm)
    return Trial(len(ends) - others, len(leads), others, false, float(np.median(leads)) if leads else math.nan)


def choose(rows: Sequence[Row], metrics: Sequence[str] = tuple(WATCHED)) -> list[tuple[AlarmRule, float]]:
    """The best rule of each metric, relative or not, with its score on these rows; the largest score first."""
    found = []
    strata = [_ends(own) for own in by_updates(rows).values()]
    for metric in metrics:
        pairs = []
        for relative in (False, True):
            # Shared by all GRID rules.
            signals = [
                ([_signal(row, metric, relative) for row in known], _lengths(known), ends) for known, ends in strata
            ]
            for rule in _candidates(metric, relative, rows):
                score = mean_score([_trial(rule, *own) for own in signals])
                if not math.isnan(score):
                    pairs.append((rule, score))
        if pairs:
            found.append(max(pairs, key=lambda pair: pair[1]))
    return sorted(found, key=lambda pair: -pair[1])


def mean_score(trials: Sequence[Trial]) -> float:
    """The mean score of the trials that have one, in [-1, 1]; nan if none has."""
    scores = [trial.score for trial in trials if not math.isnan(trial.score)]
    return fmean(scores) if scores else math.nan


def by_updates(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows by N, ascending; N is in the name of their arm."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(int(re.findall(r"-N(\d+)", row["arm"])[0]), []).append(row)
    return dict(sorted(found.items()))


def shares(rule: AlarmRule, rows: Sequence[Row], date: Date = collapse_step) -> tuple[str, str]:
    """The alarms in time among the runs that collapse, and the false ones among the others, by `share_text`."""
    known, ends = _ends(rows, date)
    told, false = [], []
    for row, end in zip(known, ends, strict=True):
        alarm = alarm_at(rule, row)
        if end is None:
            false.append((row["seed"], alarm is not None))
        else:
            told.append((row["seed"], alarm is not None and alarm < end))
    return share_text(told), share_text(false)


def share_text(outcomes: Sequence[tuple[int, bool]]) -> str:
    """The runs with an alarm, of all, and the share's 95% interval; `outcomes` has each run's seed and whether.

    The runs of a seed share an initial model, so that n of them say less than n independent ones. Clopper and Pearson's
    interval is therefore that of n over the design effect (Korn and Graubard, 1998): the variance of the share between
    seeds over that of independent runs, at least 1.
    """
    if not outcomes:
        return "no run"
    seeds = np.unique([seed for seed, _ in outcomes], return_inverse=True)[1]
    y = np.array([is_alarm for _, is_alarm in outcomes], dtype=np.float64)
    count, of, share = int(y.sum()), len(y), float(y.mean())
    deviations, num_seeds = np.bincount(seeds, y - share), int(seeds.max()) + 1
    # One seed, or no spread: nothing to compare, and the runs count as they are.
    num_seeds_1, num_runs_1 = max(num_seeds - 1, 1), max(of - 1, 1)
    between = num_seeds / num_seeds_1 * float(np.square(deviations).sum()) / of**2
    effect = max(1.0, between * num_runs_1 / (share * (1 - share))) if 0 < count < of else 1.0
    k, n = count / effect, of / effect
    low = float(stats.beta.ppf(0.025, k, n - k + 1)) if k > 0 else 0.0
    high = float(stats.beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return f"{count} of {of} ({low:.0%} to {high:.0%})"


def _candidates(metric: str, relative: bool, rows: Sequence[Row]) -> list[AlarmRule]:
    signals = [_signal(row, metric, relative) for row in rows]
    values = np.concatenate([one[np.isfinite(one)] for one in signals]) if signals else np.zeros(0)
    if not len(values):
        return []
    limits = np.unique(np.quantile(values, np.linspace(0.0, 1.0, GRID)))
    # Rounded to the digits of `AlarmRule.words`, so that the rule on the page is the one that was tried.
    return [AlarmRule(metric, relative, float(f"{WATCHED[metric] * limit:.3g}")) for limit in limits]


def _signal(row: Row, metric: str, relative: bool) -> Float[np.ndarray, " windows"]:
    """The metric's windows, with the sign such that more is worse; relative, the first BASE are nan."""
    series = row["series"].get(metric) or []
    values = np.array([math.nan if value is None else value for value in series], dtype=np.float64)
    if relative and len(values):
        base = values[:BASE].mean()
        # A base of nan (a window without a value) or 0 leaves no ratio: the relative rule stays silent.
        values = values / base if base > 0 else np.full_like(values, math.nan)
        values[:BASE] = math.nan
    return WATCHED[metric] * values


__all__ = [
    "BASE", "WATCHED", "AlarmRule", "Trial", "alarm_at", "by_updates", "choose", "mean_score", "share_text",
    "shares", "tried",
]  # fmt: skip
